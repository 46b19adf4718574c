"""x86-64 as one value."""

from kprobes.arch.facts import (
    Arch,
    CallFacts,
    CodeFacts,
    ListingFacts,
    PatchFacts,
    ReturnFacts,
    Segment,
    SiteFacts,
    TrapFacts,
    UpcallFacts,
)
from kprobes.arch.x86_64 import asking, detour, exits, lazily, parameters, registers, site, upcall
from kprobes.arch.x86_64.machine import MACHINE
from kprobes.model.abi import Field
from kprobes.units import U64

_WORD, _ABSOLUTE, _RELATIVE = Field(size=8), Field(size=4), Field(size=4, is_relative=True)

CALL = CallFacts(
    # Preserves everything but r11; rax is made free by returning a value nobody reads.
    # Both are dead at a function's entry, as are the flags.
    convention="preserve_mostcc",
    parameters=registers.ARGUMENTS,
    saved=site.SAVED,
    stack="call ptr @llvm.addressofreturnaddress()",
    # The return address into the entry code, and the one that an ftrace site's call pushes.
    pushed=8,
    above=8,
    link=None,
    pc="ip",
    flags="flags",
    computed={},
    aliases={},
    alignment=8,
    padding=b"\xcc",
)

CODE = CodeFacts(
    triple="x86_64-unknown-none-elf",
    cpu="x86-64",
    # The kernel's vector and x87 registers belong to user space.
    features="-mmx,-sse,-sse2,-avx,-x87",
    model="kernel",
    call=CALL,
    # System V AMD64 ABI, table 4.9: R_X86_64_64, PC32, PLT32, 32, 32S.
    relocations={1: _WORD, 2: _RELATIVE, 4: _RELATIVE, 10: _ABSOLUTE, 11: _ABSOLUTE},
    counter="call i64 @llvm.x86.rdtsc()",
    current=None,
    is_resched_apart=False,
    # Arithmetic flags that are known make reading all of them 2 ns cheaper in an emulated guest.
    flags=(
        'call i64 asm sideeffect "xorl ${0:k}, ${0:k}\\0Apushfq\\0Apopq $0", '
        '"=r,~{flags},~{memory}"()'
    ),
    irqs_flag=1 << 9,
    irqs_set=True,
    per_cpu=Segment(
        # Relative to gs: LLVM, "X86 address spaces".
        space=256,
        exchange=("cmpxchgq $2, %gs:{}", "={rax},{rax},r,~{flags},~{memory}"),
        or_="orl $0, %gs:{}",
        and_="andl $0, %gs:{}",
        add="addl $0, %gs:{}",
        count="addq $0, %gs:{}",
        change="ri,~{flags},~{memory}",
    ),
    increment=("lock incq ($0)", "r,~{flags},~{memory}"),
    address='call i64 asm "movabsq $${}, $0", "=r"()',
    veneer=None,
    intrinsics="declare i64 @llvm.x86.rdtsc()\ndeclare ptr @llvm.addressofreturnaddress()",
)

SITE = SiteFacts(
    size=site.SIZE,
    nops=site.NOPS,
    lead=b"",
    probed_lead=b"",
    idle="a nop",
    compiled="the call to __fentry__",
    offsets=(0, len(site.ENDBR64)),
    is_behind=False,
    branch=site.call,
    target=site.call_target,
    entry=site.entry,
)

LISTING = ListingFacts(
    lines=lazily.lines,
    study=lazily.study,
    follow=lazily.follow,
    reaches=lazily.reaches,
    jump_target=site.jump_target,
)

UPCALL = UpcallFacts(
    saved=upcall.SAVED,
    gate=upcall.gate,
    at_call=asking.at_call,
    at_instruction=asking.at_instruction,
    at_landing=asking.at_landing,
    page_table='call i64 asm sideeffect "movq %cr3, $0", "=r,~{memory}"()',
    pause='call void asm sideeffect "pause", "~{memory}"()',
    pops=True,
)

_SEGMENTS = {"cs": registers.KERNEL_CS, "ss": registers.KERNEL_SS}

PATCH = PatchFacts(
    examine=detour.examine,
    exits=exits.find_exits,
    first=detour.first,
    jump=detour.jump,
    breakpoint=detour.BREAKPOINT,
    trap=TrapFacts(
        symbol="asm_exc_int3",
        # DIE_INT3 in arch/x86/include/asm/kdebug.h.
        action=2,
        ip=8 * registers.NAMES.index("ip"),
    ),
    detour=detour.detour,
    # What an exception without an error code leaves there, and optimized_callback() writes.
    constants=_SEGMENTS | {"orig_ax": U64},
    landing=site.ENDBR64,
)

RETURNS = ReturnFacts(
    value="ax",
    registers=("ax", "dx"),
    behind=8,
    plain=None,
    comes_back=True,
    address_mask=U64,
    trampoline=detour.trampoline,
    mark=detour.TRAMPOLINE_MARK,
    branch_detour=detour.branch_detour,
)

X86_64 = Arch(
    name="x86_64",
    registers=registers.NAMES,
    arguments=registers.ARGUMENTS,
    passed=parameters.passed,
    # Behind the kernel's own int3, whether there is one or not.
    hit_shift=1,
    show=registers.show,
    # orig_ax is 0 in the frame that the kernel's own ftrace gives its kprobes (5.10 to 7.2).
    constants=_SEGMENTS | {"orig_ax": 0},
    reach=(1 << 31) - site.SIZE,
    code=CODE,
    code_for=lambda _vcpus: CODE,
    code_registers=(),
    site=SITE,
    listing=LISTING,
    upcall=UPCALL,
    patch=PATCH,
    returns=RETURNS,
    machine=MACHINE,
    thread_size=16 * 1024,
)
