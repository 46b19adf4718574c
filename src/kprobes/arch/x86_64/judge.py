"""May an instruction carry a probe, and how does its slot come about: a verdict with a reason.

The order of the questions is that of the kernel's check_kprobe_address_safe(), can_probe() and
arch_copy_kprobe(); where the answers differ from its own, docs/design.md says why.
"""

from dataclasses import dataclass
from enum import StrEnum

from iced_x86 import Mnemonic

from kprobes.arch.forbidden import forbidden_place, in_alternative, probed_place
from kprobes.arch.x86_64.function import Flow, Function, Instruction
from kprobes.arch.x86_64.refusals import changes_ss, refusal
from kprobes.arch.x86_64.slot import is_rip_relative
from kprobes.model.text import TextTables

_SITE = 5
"""Bytes of a call, jump or nop that the kernel puts into its text."""
_WAITS = frozenset({Mnemonic.HLT, Mnemonic.MWAIT, Mnemonic.MWAITX})
# What a kernel may lean on right behind sti: interrupts stay off until it has begun.
_LEANS_ON_STI = _WAITS | {
    Mnemonic.VMRUN,
    Mnemonic.VMLAUNCH,
    Mnemonic.VMRESUME,
    Mnemonic.IRETQ,
    Mnemonic.SYSRETQ,
    Mnemonic.SYSEXIT,
    Mnemonic.SYSEXITQ,
}
_CFI_MOV = bytes.fromhex("41ba")


class Verdict(StrEnum):
    """What a slot does with an instruction."""

    COPY = "copy"
    RELOCATE = "relocate"
    EMULATE = "emulate"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on an address.

    Attributes:
        why: the reason, for a user.
        instruction: that begins there, or None when none is known to.
    """

    verdict: Verdict
    why: str
    instruction: Instruction | None = None

    @property
    def is_refused(self) -> bool:
        """Whether no slot may run what is there."""
        return self.verdict is Verdict.REFUSE


_NO_TABLES = TextTables()


def judge(function: Function, addr: int, tables: TextTables = _NO_TABLES) -> Judgement:
    """Judge the instruction at an address.

    Args:
        function: that the address is in.
        addr: any.
        tables: what is known of the kernel's text.
    """
    why = _no_boundary(function, addr)
    if why:
        return Judgement(verdict=Verdict.REFUSE, why=why)
    instruction = function.instructions[addr]
    why = (
        forbidden(function, addr, tables)
        or probed_place(addr, tables)
        or _reserved(instruction, tables)
        or refusal(instruction)
        or _beside(function, instruction)
    )
    if why:
        return Judgement(verdict=Verdict.REFUSE, why=why, instruction=instruction)
    verdict, why = _how(instruction)
    return Judgement(verdict=verdict, why=why, instruction=instruction)


def forbidden(function: Function, addr: int, tables: TextTables = _NO_TABLES) -> str | None:
    """Return why a place may carry no probe, whatever instruction is there, or None."""
    return forbidden_place(function.name, function.parts, addr, tables)


def _no_boundary(function: Function, addr: int) -> str | None:
    if function.part_of(addr) is None:
        return f"{addr:#x} is not in {function.name}"
    inside = function.covering(addr)
    if inside is None or inside.addr == addr:
        return function.doubt(addr)
    size, start = len(inside.code), function.place(inside.addr)
    why = f"{function.place(addr)} is inside the {size}-byte instruction at {start}"
    return function.doubt(addr) or why


def _reserved(instruction: Instruction, tables: TextTables) -> str | None:
    # A site's bytes may hold several instructions now: a static call's ret and its int3s.
    around = range(instruction.addr - _SITE + 1, instruction.next)
    if not tables.ftrace.isdisjoint(around):
        return "the kernel's function tracer changes it: the ftrace strategy probes it"
    if not tables.static_calls.isdisjoint(around):
        return "it is a static call, which the kernel points elsewhere while it runs"
    if instruction.addr in tables.jump_labels:
        return "it is a jump label, which the kernel flips between nop and jump"
    if instruction.addr in tables.exceptions:
        return "the exception table repairs its faults, and knows it by its address"
    if in_alternative(instruction.addr, instruction.next, tables):
        return "it is an alternative, which boot rewrites"
    return None


def _beside(function: Function, instruction: Instruction) -> str | None:
    before = function.before(instruction.addr)
    after = function.instructions.get(instruction.next)
    if before is not None and changes_ss(before):
        return "the instruction before it changes the stack segment: both must run as one"
    if before is not None and before.mnemonic == Mnemonic.STI and _leans(instruction):
        return "sti before it holds interrupts off until it has begun: a trap between loses them"
    if instruction.mnemonic == Mnemonic.STI and (after is None or _leans(after)):
        return "what is behind it relies on interrupts being held off until it has begun"
    if _is_cfi(instruction, after) or (before is not None and _is_cfi(before, instruction)):
        return "it belongs to a CFI check, whose failure is told by reading these bytes"
    return None


def _leans(instruction: Instruction) -> bool:
    return instruction.mnemonic in _LEANS_ON_STI


def _is_cfi(first: Instruction, second: Instruction | None) -> bool:
    # mov r10d, -id; add r10d, [reg - disp]: decode_cfi_insn() in arch/x86/kernel/cfi.c.
    if second is None or not first.code.startswith(_CFI_MOV) or len(second.code) < 4:
        return False
    rex, opcode, modrm = second.code[:3]
    return rex & ~1 == 0x44 and opcode == 0x03 and modrm >> 3 & 7 == 2


def _how(instruction: Instruction) -> tuple[Verdict, str]:
    if instruction.mnemonic == Mnemonic.CALL:
        return Verdict.EMULATE, "pushes the original return address, then jumps as it would call"
    if instruction.flow is Flow.BRANCH and instruction.mnemonic in _COUNTED:
        return Verdict.EMULATE, "its own test, stretched by a jump: it reaches 127 bytes only"
    if instruction.target is not None:
        return Verdict.RELOCATE, "branches to the same target from the slot"
    if is_rip_relative(instruction):
        return Verdict.RELOCATE, "its rip-relative displacement is made anew for the slot"
    if instruction.mnemonic in _FLAGS:
        return Verdict.COPY, "runs in the slot with the true flags: nothing is single-stepped"
    if not instruction.flow.falls_through:
        return Verdict.COPY, "runs in the slot and leaves it by itself"
    return Verdict.COPY, "means the same at every address"


_COUNTED = frozenset(
    {
        Mnemonic.LOOP,
        Mnemonic.LOOPE,
        Mnemonic.LOOPNE,
        Mnemonic.JCXZ,
        Mnemonic.JECXZ,
        Mnemonic.JRCXZ,
    }
)
_FLAGS = frozenset(
    {
        Mnemonic.PUSHF,
        Mnemonic.PUSHFQ,
        Mnemonic.POPF,
        Mnemonic.POPFQ,
        Mnemonic.CLI,
        Mnemonic.STI,
    }
)
