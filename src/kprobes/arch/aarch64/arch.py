"""arm64 as one value: what its machine code needs to know of it.

What needs capstone, imported when it is first used: arming a probe does not.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile

from msgspec.structs import replace

from kprobes.arch.aarch64 import cfg, encode, registers, trampoline, upcall, verdict
from kprobes.arch.aarch64.machine import MACHINE, runs_at_el2
from kprobes.arch.arch import (
    Arch,
    Base,
    CallAbi,
    CodeInfo,
    DisasmOps,
    FtraceInfo,
    PatchOps,
    ReturnOps,
    UpcallOps,
)
from kprobes.arch.entry import EntryInfo, EntryKind
from kprobes.arch.insn import Disassembled, MemoryAccess, Read, Syntax
from kprobes.model.abi import Field
from kprobes.units import Addr

_Pieces = tuple[tuple[Addr, bytes], ...]


def lines(code: bytes, addr: int, syntax: Syntax) -> tuple[Disassembled, ...]:
    """Return the lines of some code; see ``disasm.list_code``.

    Args:
        code: bytes that begin with an instruction.
        addr: where they are.
        syntax: of no account: there is one only.
    """
    from kprobes.arch.aarch64.disasm import list_code

    return list_code(code, addr, syntax)


def follow(read: Read, entry: int, inside: range) -> _Pieces:
    """Return all code that an entry leads to; see ``disasm.follow``.

    Args:
        read: memory.
        entry: of the code.
        inside: which addresses belong to it.
    """
    from kprobes.arch.aarch64.disasm import follow

    return follow(read, entry, inside)


def reaches(entry: int, pieces: _Pieces, window: range) -> Mapping[Addr, MemoryAccess]:
    """Return which instructions touch a window of memory; see ``disasm.reaches``.

    Args:
        entry: of the code.
        pieces: as ``follow`` returns them for it.
        window: addresses.
    """
    from kprobes.arch.aarch64.disasm import reaches

    return reaches(entry, pieces, window)


_READ = 'call i64 @llvm.read_volatile_register.i64(metadata !{{!"{}"}})'
_INTRINSICS = """
declare ptr @llvm.sponentry.p0()
declare void @llvm.aarch64.hint(i32)
declare i64 @llvm.read_register.i64(metadata)
declare i64 @llvm.read_volatile_register.i64(metadata)
declare void @llvm.write_register.i64(metadata, i64)
define internal i64 @pstate() alwaysinline nounwind {
  %masks = call i64 @llvm.read_register.i64(metadata !{!"daif"})
  %level = call i64 @llvm.read_register.i64(metadata !{!"currentel"})
  %stack = call i64 @llvm.read_register.i64(metadata !{!"spsel"})
  %mode = or i64 %level, %stack
  %all = or i64 %masks, %mode
  ret i64 %all
}
"""

CALL = CallAbi(
    convention="",
    parameters=(),
    saved=trampoline.SAVED,
    stack="call ptr @llvm.sponentry.p0()",
    pushed=0,
    above=trampoline.ABOVE,
    link="x30",
    pc="pc",
    # A hit changes no masks: they are read where they are wanted.
    flags=None,
    computed={"pstate": "call i64 @pstate()"},
    aliases={"lr": "x30"},
    alignment=16,
    padding=encode.BRK,
)

_MOVES = {
    # ELF for the Arm 64-bit Architecture, "Group relocations to create a 16-, 32-, 48-, or 64-bit
    # unsigned data value or address inline": MOVW_UABS_G0_NC, G1_NC, G2_NC, G3.
    kind: Field(size=4, at=5, width=16, drop=drop, is_part=True)
    for kind, drop in ((264, 0), (266, 16), (268, 32), (269, 48))
}
_BRANCH = Field(size=4, width=26, drop=2, is_relative=True)

CODE = CodeInfo(
    triple="aarch64-unknown-none-elf",
    cpu="generic",
    # The vector registers belong to user space; x18 may be the shadow call stack's. Without +lse
    # atomics are pairs of exclusives, which every CPU has.
    features="-fp-armv8,-neon,+reserve-x18",
    # Numbers that linking gives are anywhere.
    model="large",
    call=CALL,
    # JUMP26, CALL26, ABS64.
    relocations={**_MOVES, 282: _BRANCH, 283: _BRANCH, 257: Field(size=8)},
    counter=_READ.format("cntvct_el0"),
    # YIELD.
    pause="call void @llvm.aarch64.hint(i32 1)",
    # current_thread_info() in arch/arm64/include/asm/current.h.
    current=_READ.format("sp_el0"),
    # struct thread_info in arch/arm64/include/asm/thread_info.h, with little-endian words.
    is_resched_apart=True,
    flags=_READ.format("daif"),
    set_flags='call void @llvm.write_register.i64(metadata !{{!"daif"}}, {})',
    # PSR_I_BIT.
    irqs_flag=1 << 7,
    irqs_set=False,
    per_cpu=Base(expression=_READ.format("tpidr_el1")),
    increment=None,
    add_own=None,
    address="add i64 ptrtoint (ptr @{} to i64), 0",
    veneer=encode.veneer,
    intrinsics=_INTRINSICS,
)


_ATOMIC = 0b0010
"""ID_AA64ISAR0_EL1.Atomic: FEAT_LSE."""


def code_info(*, is_hypervisor: bool, has_lse: bool) -> CodeInfo:
    """Return how code is made for one kernel and its CPUs.

    Args:
        is_hypervisor: whether it runs at EL2 (VHE), where per-CPU memory is at TPIDR_EL2:
            ARM64_HAS_VIRT_HOST_EXTN in arch/arm64/include/asm/percpu.h.
        has_lse: whether all of its CPUs have atomic instructions: ID_AA64ISAR0_EL1.Atomic.
    """
    base = Base(expression=_READ.format("tpidr_el2" if is_hypervisor else "tpidr_el1"))
    features = CODE.features + (",+lse" if has_lse else "")
    return replace(CODE, per_cpu=base, features=features)


def _code_for(vcpus: Sequence[Mapping[str, int]]) -> CodeInfo:
    return code_info(
        is_hypervisor=any(map(runs_at_el2, vcpus)),
        # Pairs of exclusives are never wrong.
        has_lse=all(found.get("ID_AA64ISAR0_EL1", 0) >> 20 & 0xF >= _ATOMIC for found in vcpus),
    )


BREAKPOINT = bytes.fromhex("800020d4")
"""BRK_KPROBES_BREAKPOINT: what the kernel's own probes put there."""

SITE = FtraceInfo(
    size=trampoline.SIZE,
    nops=trampoline.NOPS,
    preamble=encode.MOV_X9_X30,
    probed_preamble=BREAKPOINT,
    idle="mov x9, x30 and a nop",
    compiled="two nops",
    offsets=trampoline.OFFSETS,
    reports_entry=True,
    branch=encode.bl,
    target=encode.bl_target,
    entry=trampoline.entry,
)

UPCALL = UpcallOps(
    saved=upcall.SAVED,
    entry_stub=upcall.entry_stub,
    at_call=upcall.at_call,
    at_instruction=upcall.at_instruction,
    at_trampoline=upcall.at_trampoline,
    # A task's user memory; the kernel's own tables never change.
    page_table=_READ.format("ttbr0_el1"),
    pops=False,
)

RETURNS = ReturnOps(
    value="x0",
    registers=("x0", "x1"),
    return_address_size=0,
    # Kernel addresses have their upper bits set; a signature is in some of them.
    plain="or i64 {}, -281474976710656",
    # They are signed where they are kept, and nobody but the guest can sign.
    comes_back=False,
    address_mask=(1 << 48) - 1,
    trampoline=trampoline.trampoline,
    mark=trampoline.TRAMPOLINE_MARK,
    branch_detour=trampoline.branch_detour,
)


def _entry_check(before: bytes) -> tuple[int, int, EntryKind] | None:
    # A word that is no instruction; the nops of -fpatchable-function-entry may be between.
    words = [before[at : at + encode.SIZE] for at in range(0, len(before), encode.SIZE)]
    nops = sum(1 for _ in takewhile(lambda word: word == encode.NOP, reversed(words)))
    offset = -encode.SIZE * (nops + 1)
    if nops == len(words) or not int.from_bytes(words[-nops - 1], "little"):
        return None
    (line,) = lines(words[-nops - 1], 0, Syntax.ATT)
    return None if line.mnemonic != "(bad)" else (offset, encode.SIZE, EntryKind.KCFI)


LISTING = DisasmOps(
    lines=lines,
    analyse=verdict.analyse,
    follow=follow,
    reaches=reaches,
    jump_target=encode.b_target,
    entry=EntryInfo(
        words={
            **dict.fromkeys(("bti c", "bti j", "bti jc"), EntryKind.LANDING_PAD),
            **dict.fromkeys(("paciasp", "pacibsp"), EntryKind.SIGNING),
            "mov x9, x30": EntryKind.SAVED_LINK,
        },
        sealed=b"",
        nop="nop$",
        call="bl ",
        jump="b ",
        breakpoint="brk ",
        site=encode.SIZE,
        prologue=r"stp x29, x30, \[sp|(mov|add) x29, sp\b",
        checks=_entry_check,
    ),
)

PATCH = PatchOps(
    examine=verdict.examine,
    exits=cfg.find_exits,
    first=verdict.first,
    jump=encode.b,
    breakpoint=BREAKPOINT,
    # All instructions are as long as a branch.
    filler=b"\0",
    # A branch can be used everywhere.
    trap=None,
    detour=trampoline.detour,
    constants={},
    landing_pad=trampoline.LANDING_PAD,
    ret=encode.ret(encode.LINK),
)

AARCH64 = Arch(
    name="aarch64",
    registers=registers.QUERIED,
    arguments=registers.ARGUMENTS,
    passed=registers.passed,
    # SC_ARM64_REGS_TO_ARGS() in arch/arm64/include/asm/syscall_wrapper.h.
    system_call=tuple(8 * n for n in range(6)),
    # arch/arm64/kernel/stacktrace.c.
    unwound=("pc", "x29"),
    hit_shift=0,
    show=registers.show,
    constants={},
    reach=encode.REACH,
    code=CODE,
    code_for=_code_for,
    code_registers=("ID_AA64ISAR0_EL1", "HCR_EL2"),
    site=SITE,
    listing=LISTING,
    upcall=UPCALL,
    patch=PATCH,
    returns=RETURNS,
    machine=MACHINE,
    thread_size=16 * 1024,
)
