"""Instructions that no slot may run, whatever is around them, each with the reason.

What the kernel's own aarch64_insn_is_steppable() refuses (arch/arm64/kernel/probes/decode-insn.c,
insn.c) is here, but for what it refuses because a single step would be wrong and a detour is not:
signatures are checked in a detour with the stack pointer and x30 that they were made with.
"""

from collections.abc import Mapping

from kprobes.arch.aarch64.function import Instruction
from kprobes.arch.aarch64.words import LINK, SP_OR_ZR, Kind, first_register, is_authenticated

_DAIF = 0b1_011_0100_0010_001
"""o0, op1, CRn, CRm, op2 of MRS: the interrupt mask."""
_SOMEBODYS = frozenset({0x4, 0x5, 0x6, 0x7, 0x400})
"""KPROBES_BRK_IMM, UPROBES', KPROBES_BRK_SS_IMM, KRETPROBES', KGDB's: asm/brk-imm.h."""
_HINTS = {0b0000_000, 0b0000_111, 0b0001_000, 0b0001_010, 0b0001_100, 0b0001_110}
"""CRm:op2 of what is as harmless as nop: xpaclri, pacia1716 to autib1716."""
_SIGNING = range(0b0011_000, 0b0100_000)
"""paciaz to autibsp."""

_LANDING = "indirect branches land on it, so it must stay: probe the instruction behind it"
_STATE = "it changes the state of the CPU, which the kernel lets no probe run elsewhere"
_EXCLUSIVE = "it belongs to an exclusive sequence, which anything between makes fail for ever"
_HINT = "it is a hint to the CPU that the kernel lets no probe run elsewhere"

_BY_KIND: Mapping[Kind, str] = {
    Kind.UNALLOCATED: "its bytes are no instruction",
    Kind.UDF: "its bytes are no instruction, and fill a gap or stop a runaway CPU",
    Kind.HLT: "it stops the CPU for a debugger",
    Kind.CALL_UP: "it raises an exception for firmware, a hypervisor or the kernel itself",
    Kind.ERET: "it leaves the kernel, or enters it, with another stack",
    Kind.MSR: _STATE,
    Kind.MSR_IMMEDIATE: _STATE,
    Kind.WAIT: "it waits for an event or interrupt, which a probe on it may use up",
    Kind.BTI: _LANDING,
    Kind.LOAD_EXCLUSIVE: _EXCLUSIVE,
    Kind.STORE_EXCLUSIVE: _EXCLUSIVE,
    Kind.VECTOR_LITERAL: "it loads a vector register relative to its own address",
}


def refusal(instruction: Instruction) -> str | None:
    """Return why no slot may run an instruction, or None when one may."""
    word = instruction.word
    match instruction.kind:
        case Kind.BRK:
            return _brk(word >> 5 & 0xFFFF)
        case Kind.HINT:
            return None if _is_harmless(word >> 5 & 0x7F) else _HINT
        case Kind.MRS if word >> 5 & 0x7FFF == _DAIF:
            return "it reads the interrupt mask, which the kernel lets no probe do elsewhere"
        case Kind.BLR:
            return _call(word)
        case Kind.LDR_LITERAL | Kind.LDRSW_LITERAL if word & 31 == SP_OR_ZR:
            return "it loads relative to its own address and keeps nothing"
        case kind:
            return _BY_KIND.get(kind)


def hides_another(instruction: Instruction) -> bool:
    """Return whether a breakpoint stands where another instruction was."""
    return instruction.kind is Kind.BRK and instruction.word >> 5 & 0xFFFF in _SOMEBODYS


def _brk(number: int) -> str:
    if number in _SOMEBODYS:
        return "it is somebody else's breakpoint, and hides another instruction"
    return "it raises an exception on purpose, and the kernel knows what it means by its address"


def _is_harmless(hint: int) -> bool:
    return hint in _HINTS or hint in _SIGNING


def _call(word: int) -> str | None:
    used = {first_register(word)}
    if is_authenticated(word):
        used.add(word & 31)
    if LINK in used:
        return "it calls where x30 points, which its own return address overwrites"
    return None
