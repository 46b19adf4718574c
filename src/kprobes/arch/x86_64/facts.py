"""x86-64 as one value."""

from kprobes.arch.facts import (
    Arch,
    CodeFacts,
    ListingFacts,
    PatchFacts,
    ReturnFacts,
    SiteFacts,
    UpcallFacts,
)
from kprobes.arch.x86_64 import asking, detour, exits, lazily, parameters, registers, site, upcall
from kprobes.arch.x86_64.machine import MACHINE
from kprobes.units import U64

CODE = CodeFacts(
    triple="x86_64-unknown-none-elf",
    # The kernel's vector and x87 registers belong to user space.
    features="-mmx,-sse,-sse2,-avx,-x87",
    machine=62,
    # Preserves everything but r11; rax is made free by returning a value nobody reads.
    # Both are dead at a function's entry, as are the flags.
    convention="preserve_mostcc",
    parameters=registers.ARGUMENTS,
    saved=site.SAVED,
    # System V AMD64 ABI, table 4.9: R_X86_64_64, PC32, PLT32, 32, 32S.
    relocations={1: (8, False), 2: (4, True), 4: (4, True), 10: (4, False), 11: (4, False)},
    counter="call i64 @llvm.x86.rdtsc()",
    # Arithmetic flags that are known make reading all of them 2 ns cheaper in an emulated guest.
    flags=(
        'call i64 asm sideeffect "xorl ${0:k}, ${0:k}\\0Apushfq\\0Apopq $0", '
        '"=r,~{flags},~{memory}"()'
    ),
    irqs_flag=1 << 9,
    exchange=("cmpxchgq $2, %gs:{}", "={rax},{rax},r,~{flags},~{memory}"),
    per_cpu_or="orl $0, %gs:{}",
    per_cpu_and="andl $0, %gs:{}",
    per_cpu_add="addl $0, %gs:{}",
    per_cpu_count="addq $0, %gs:{}",
    locked_increment="lock incq ($0)",
    address='call i64 asm "movabsq $${}, $0", "=r"()',
    intrinsics="declare i64 @llvm.x86.rdtsc()",
)

SITE = SiteFacts(
    size=site.SIZE,
    nops=site.NOPS,
    offsets=(0, len(site.ENDBR64)),
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
    pause="pause",
)

_SEGMENTS = {"cs": registers.KERNEL_CS, "ss": registers.KERNEL_SS}

PATCH = PatchFacts(
    examine=detour.examine,
    exits=exits.find_exits,
    first=detour.first,
    jump=detour.jump,
    breakpoint=detour.BREAKPOINT,
    detour=detour.detour,
    # What an exception without an error code leaves there, and optimized_callback() writes.
    constants=_SEGMENTS | {"orig_ax": U64},
    landing=site.ENDBR64,
    trap="asm_exc_int3",
    # DIE_INT3 in arch/x86/include/asm/kdebug.h.
    trap_action=2,
    trap_ip=8 * registers.NAMES.index("ip"),
)

RETURNS = ReturnFacts(
    value="ax",
    registers=("ax", "dx"),
    behind=8,
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
    code=CODE,
    site=SITE,
    listing=LISTING,
    upcall=UPCALL,
    patch=PATCH,
    returns=RETURNS,
    machine=MACHINE,
    thread_size=16 * 1024,
)
