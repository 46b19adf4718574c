"""x86-64 as one value.

What needs iced-x86 imports it when it is first used: that takes 20 ms of the 300 to a first armed
probe, and arming one at an entry needs none of it.
"""

from collections.abc import Mapping, Sequence

from kprobes.arch.arch import (
    Arch,
    CallAbi,
    CodeInfo,
    DisasmOps,
    FtraceInfo,
    PatchOps,
    ReturnOps,
    Segment,
    TrapInfo,
    UpcallOps,
)
from kprobes.arch.entry import EntryInfo, EntryKind
from kprobes.arch.insn import Analysis, Disassembled, InsnVerdict, MemoryAccess, Read, Syntax
from kprobes.arch.x86_64 import cfg, cfi, registers, slot, trampoline, upcall
from kprobes.arch.x86_64.machine import MACHINE
from kprobes.model.abi import Field
from kprobes.model.kernel import TextPart, TextTables
from kprobes.units import U64, Addr

_Pieces = tuple[tuple[Addr, bytes], ...]


def lines(code: bytes, addr: int, syntax: Syntax) -> tuple[Disassembled, ...]:
    """Return the lines of some code; see ``disasm.list_code``.

    Args:
        code: bytes that begin with an instruction.
        addr: where they are.
        syntax: how operands are written.
    """
    from kprobes.arch.x86_64.disasm import list_code

    return list_code(code, addr, syntax)


def analyse(name: str, parts: Sequence[TextPart], tables: TextTables) -> Analysis:
    """Decode a function, for verdicts on its instructions; see ``decode`` and ``insn_verdict``.

    Args:
        name: of the function's symbol.
        parts: its range, then its ``.cold`` ones.
        tables: what is known of the kernel's text.
    """
    from kprobes.arch.x86_64.decode import decode_function
    from kprobes.arch.x86_64.verdict import insn_verdict

    function = decode_function(name, parts, tables)

    def verdict(addr: int) -> InsnVerdict:
        found = insn_verdict(function, addr, tables)
        return InsnVerdict(verdict=found.verdict.value, why=found.why)

    sizes = {addr: len(found.code) for addr, found in function.instructions.items()}
    return Analysis(sizes=sizes, insn_verdict=verdict)


def follow(read: Read, entry: int, inside: range) -> _Pieces:
    """Return all code that an entry leads to; see ``disasm.follow``.

    Args:
        read: memory.
        entry: of the code.
        inside: which addresses belong to it.
    """
    from kprobes.arch.x86_64.disasm import follow

    return follow(read, entry, inside)


def reaches(entry: int, pieces: _Pieces, window: range) -> Mapping[Addr, MemoryAccess]:
    """Return which instructions touch a window of memory; see ``disasm.reaches``.

    Args:
        entry: of the code.
        pieces: as ``follow`` returns them for it.
        window: addresses.
    """
    from kprobes.arch.x86_64.disasm import reaches

    return reaches(entry, pieces, window)


_WORD, _ABSOLUTE, _RELATIVE = Field(size=8), Field(size=4), Field(size=4, is_relative=True)

CALL = CallAbi(
    # Preserves everything but r11; rax is made free by returning a value nobody reads.
    # Both are dead at a function's entry, as are the flags.
    convention="preserve_mostcc",
    parameters=registers.ARGUMENTS,
    saved=slot.SAVED,
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

CODE = CodeInfo(
    triple="x86_64-unknown-none-elf",
    cpu="x86-64",
    # The kernel's vector and x87 registers belong to user space.
    features="-mmx,-sse,-sse2,-avx,-x87",
    model="kernel",
    call=CALL,
    # System V AMD64 ABI, table 4.9: R_X86_64_64, PC32, PLT32, 32, 32S.
    relocations={1: _WORD, 2: _RELATIVE, 4: _RELATIVE, 10: _ABSOLUTE, 11: _ABSOLUTE},
    counter="call i64 @llvm.x86.rdtsc()",
    pause='call void asm sideeffect "pause", "~{memory}"()',
    current=None,
    is_resched_apart=False,
    # Arithmetic flags that are known make reading all of them 2 ns cheaper in an emulated guest.
    flags=(
        'call i64 asm sideeffect "xorl ${0:k}, ${0:k}\\0Apushfq\\0Apopq $0", '
        '"=r,~{flags},~{memory}"()'
    ),
    set_flags='call void asm sideeffect "pushq $0\\0Apopfq", "r,~{{flags}},~{{memory}}"({})',
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
    add_own=("addq $1, ($0)", "r,re,~{flags},~{memory}"),
    address='call i64 asm "movabsq $${}, $0", "=r"()',
    veneer=None,
    intrinsics="declare i64 @llvm.x86.rdtsc()\ndeclare ptr @llvm.addressofreturnaddress()",
)

SITE = FtraceInfo(
    size=slot.SIZE,
    nops=slot.NOPS,
    preamble=b"",
    probed_preamble=b"",
    idle="a nop",
    compiled="the call to __fentry__",
    offsets=(0, len(slot.ENDBR64)),
    reports_entry=False,
    branch=slot.call,
    target=slot.call_target,
    entry=slot.entry,
)

LISTING = DisasmOps(
    lines=lines,
    analyse=analyse,
    follow=follow,
    reaches=reaches,
    jump_target=slot.jump_target,
    entry=EntryInfo(
        words={"endbr64": EntryKind.LANDING_PAD},
        # poison_endbr(): no pointer leads there, so with IBT nothing may.
        sealed=bytes.fromhex("660f1f00"),
        nop=r"nop|xchg %ax,%ax$",
        call="call",
        jump="jmp",
        breakpoint="int3",
        site=len(SITE.nops[0]),
        prologue=r"push %rbp; mov %rsp,%rbp$|mov %rsp,%rbp\b",
        checks=cfi.entry_check,
    ),
)

UPCALL = UpcallOps(
    saved=upcall.SAVED,
    entry_stub=upcall.entry_stub,
    at_call=upcall.at_call,
    at_instruction=upcall.at_instruction,
    at_trampoline=upcall.at_trampoline,
    page_table='call i64 asm sideeffect "movq %cr3, $0", "=r,~{memory}"()',
    pops=True,
)

_SEGMENTS = {"cs": registers.KERNEL_CS, "ss": registers.KERNEL_SS}

PATCH = PatchOps(
    examine=trampoline.examine,
    exits=cfg.find_exits,
    first=trampoline.first,
    jump=trampoline.jump,
    breakpoint=trampoline.BREAKPOINT,
    # arch_prepare_kprobe() refuses another's int3, and each is decoded as one byte.
    filler=trampoline.BREAKPOINT,
    trap=TrapInfo(
        symbol="asm_exc_int3",
        # DIE_INT3 in arch/x86/include/asm/kdebug.h.
        action=2,
        ip=8 * registers.NAMES.index("ip"),
        # The compiler may have made one of them.
        callers=("notifier_call_chain", "atomic_notifier_call_chain", "notify_die"),
        preamble=cfi.preamble,
    ),
    detour=trampoline.detour,
    # What an exception without an error code leaves there, and optimized_callback() writes.
    constants=_SEGMENTS | {"orig_ax": U64},
    landing_pad=slot.ENDBR64,
    ret=b"\xc3",
)

RETURNS = ReturnOps(
    value="ax",
    registers=("ax", "dx"),
    return_address_size=8,
    plain=None,
    comes_back=True,
    address_mask=U64,
    trampoline=trampoline.trampoline,
    mark=trampoline.TRAMPOLINE_MARK,
    branch_detour=trampoline.branch_detour,
)

X86_64 = Arch(
    name="x86_64",
    registers=registers.NAMES,
    arguments=registers.ARGUMENTS,
    passed=registers.passed,
    # SC_X86_64_REGS_TO_ARGS() in arch/x86/include/asm/syscall_wrapper.h.
    system_call=tuple(
        8 * registers.NAMES.index(name) for name in ("di", "si", "dx", "r10", "r8", "r9")
    ),
    # arch/x86/kernel/unwind_orc.c and unwind_frame.c. r10 and r13 have the caller's stack pointer
    # where a function aligns its own.
    unwound=("ip", "sp", "bp", "cs", "r10", "r13"),
    # After the kernel's own int3, whether there is one or not.
    hit_shift=1,
    show=registers.show,
    # orig_ax is 0 in the frame that the kernel's own ftrace gives its kprobes (5.10 to 7.2).
    constants=_SEGMENTS | {"orig_ax": 0},
    reach=(1 << 31) - slot.SIZE,
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
