"""A decoded function: its instructions, where each goes on, and where proof of them ends.

What instructions do to the stack: how far a function is from its return address.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from iced_x86 import FlowControl, Mnemonic, OpKind, Register
from iced_x86 import Instruction as Decoded
from msgspec import Struct

from kprobes.arch.insn import Flow
from kprobes.model.kernel import TextPart
from kprobes.units import Addr, signed

MAX_SIZE = 15
"""Bytes of the longest instruction."""
PREFIX_SIZE = 5
"""Of a forced emulation prefix, which counts as part of what it is for."""

_PADDING = frozenset({Mnemonic.NOP, Mnemonic.INT3})


class Instruction(Struct, frozen=True, kw_only=True):
    """One instruction.

    Attributes:
        addr: where it is.
        code: its bytes, prefixes included.
        mnemonic: iced's number of it.
        flow: where it goes on; to a thunk is where the thunk goes.
        target: of a direct branch or call; else None.
        mention: an address that it computes or holds, without going there; or None.
        is_filler: padding that nothing is known to reach: at the end, or after a jump.
        stack: what it adds to the stack pointer, a callee's work aside; None: something else.
    """

    addr: Addr
    code: bytes
    mnemonic: int
    flow: Flow
    target: Addr | None = None
    mention: Addr | None = None
    is_filler: bool = False
    stack: int | None = 0

    @property
    def next(self) -> Addr:
        """The first address after it."""
        return Addr(self.addr + len(self.code))

    @property
    def is_padding(self) -> bool:
        """Whether it is what linkers and compilers fill gaps with."""
        return self.mnemonic in _PADDING


class Function(Struct, frozen=True, kw_only=True, eq=False):
    """A decoded function.

    Attributes:
        name: of its symbol.
        parts: its pieces, the one with its entry first.
        instructions: by address.
        targets: addresses inside that something may go to: branches of its own, exception
            fixups, jump labels, addresses that its code takes.
        doubts: one for each part whose boundaries are not proven to the end: from which address
            on, and why.
    """

    name: str
    parts: tuple[TextPart, ...]
    instructions: Mapping[int, Instruction]
    targets: frozenset[int]
    doubts: Mapping[int, str]

    def part_of(self, addr: int) -> TextPart | None:
        """Return the part that an address lies in, or None."""
        return next((part for part in self.parts if part.addr <= addr < part.stop), None)

    def covering(self, addr: int) -> Instruction | None:
        """Return the instruction that an address lies in, or None."""
        longest = MAX_SIZE + PREFIX_SIZE
        found = (self.instructions.get(addr - back) for back in range(longest))
        return next((i for i in found if i is not None and addr < i.next), None)

    def before(self, addr: int) -> Instruction | None:
        """Return the instruction that ends at an address, or None."""
        found = self.covering(addr - 1)
        return found if found is not None and found.next == addr else None

    def doubt(self, addr: int) -> str | None:
        """Return why an address is not proven to be a boundary, or None where it is."""
        part = self.part_of(addr)
        starts = (at for at in self.doubts if part and part.addr <= at <= addr)
        return next((self.doubts[at] for at in starts), None)

    def place(self, addr: int) -> str:
        """Return an address as ``name+0x12``."""
        return f"{self.name}+{addr - self.parts[0].addr:#x}"


_CALLS = frozenset({FlowControl.CALL, FlowControl.INDIRECT_CALL})
_STACK = frozenset({Register.RSP, Register.ESP, Register.SP})
_TRACKED = _STACK | {Register.RBP, Register.EBP, Register.BP}
_SUPERVISORS = frozenset({Register.R10, Register.R13})
_IMMEDIATES = frozenset({OpKind.IMMEDIATE8TO64, OpKind.IMMEDIATE32TO64})
# With a register in front that they only read.
_READERS = frozenset(
    {
        Mnemonic.PUSH,
        Mnemonic.CMP,
        Mnemonic.TEST,
        Mnemonic.BT,
        Mnemonic.CALL,
        Mnemonic.JMP,
        Mnemonic.MUL,
        Mnemonic.DIV,
        Mnemonic.IDIV,
    }
)


class Stack(NamedTuple):
    """The stack before an instruction.

    Attributes:
        depth: bytes pushed since the function's entry, or None when that is not known.
        frame: what ``depth`` would be if the stack pointer were what rbp holds, or None.
        caller: likewise for what r10 or r13 keeps for the end of a function that aligns its stack:
            the first that was made of the stack pointer.
    """

    depth: int | None
    frame: int | None = None
    caller: int | None = None

    @property
    def is_as_at_entry(self) -> bool:
        """Whether a jump to a function would be one more call of it."""
        return self.depth == 0


ENTRY = Stack(0)
UNKNOWN = Stack(None)


def added(decoded: Decoded) -> int | None:
    """Return what an instruction adds to the stack pointer, what a callee does left aside.

    None is for what ``after`` must look at: it sets the stack pointer or the frame's, or another
    register from the stack pointer.
    """
    if decoded.flow_control in _CALLS:
        return 0
    register, mnemonic = decoded.op0_register, decoded.mnemonic
    if register in _TRACKED and mnemonic not in _READERS:
        return None
    if (
        register in _SUPERVISORS
        and mnemonic == Mnemonic.LEA
        and decoded.memory_base == Register.RSP
    ):
        return None
    if mnemonic in _OTHERS and (mnemonic != Mnemonic.XCHG or decoded.op1_register in _TRACKED):
        return None
    return decoded.stack_pointer_increment


def after(decoded: Decoded, before: Stack) -> Stack:
    """Return the stack after an instruction for which ``added`` is None."""
    change = _CHANGES.get(decoded.mnemonic)
    if change is not None:
        return change(decoded, before)
    if decoded.op0_register in _STACK or decoded.mnemonic in _OTHERS:
        return before._replace(depth=None)
    return before._replace(frame=None)


def _leave(decoded: Decoded, before: Stack) -> Stack:
    del decoded
    depth = None if before.frame is None else before.frame - 8
    return before._replace(depth=depth, frame=None)


def _pop(decoded: Decoded, before: Stack) -> Stack:
    depth = None if before.depth is None else before.depth - decoded.stack_pointer_increment
    if decoded.op0_register in _STACK:
        return before._replace(depth=None)
    return before._replace(depth=depth, frame=None)


def _move(decoded: Decoded, before: Stack) -> Stack:
    is_register = decoded.op1_kind == OpKind.REGISTER
    return _set(decoded, before, _held(decoded.op1_register, before) if is_register else None)


def _lea(decoded: Decoded, before: Stack) -> Stack:
    held = _held(decoded.memory_base, before)
    if held is None or decoded.memory_index != Register.NONE:
        return _set(decoded, before, None)
    return _set(decoded, before, held - signed(decoded.memory_displacement))


def _add(decoded: Decoded, before: Stack) -> Stack:
    held = _held(decoded.op0_register, before)
    if held is None or decoded.op1_kind not in _IMMEDIATES:
        return _set(decoded, before, None)
    by = signed(decoded.immediate(1))
    return _set(decoded, before, held - by if decoded.mnemonic == Mnemonic.ADD else held + by)


def _held(register: int, before: Stack) -> int | None:
    match register:
        case Register.RSP:
            return before.depth
        case Register.RBP:
            return before.frame
        case Register.R10 | Register.R13:
            return before.caller
        case _:
            return None


def _set(decoded: Decoded, before: Stack, value: int | None) -> Stack:
    match decoded.op0_register:
        case Register.RSP:
            return before._replace(depth=value)
        case Register.RBP:
            return before._replace(frame=value)
        case Register.R10 | Register.R13:
            return before._replace(caller=value) if before.caller is None else before
        case Register.EBP | Register.BP:
            return before._replace(frame=None)
        case _:
            return before._replace(depth=None)


# They set it without naming it in front.
_OTHERS = frozenset({Mnemonic.LEAVE, Mnemonic.ENTER, Mnemonic.XCHG})
_CHANGES: Mapping[int, Callable[[Decoded, Stack], Stack]] = {
    Mnemonic.LEAVE: _leave,
    Mnemonic.POP: _pop,
    Mnemonic.MOV: _move,
    Mnemonic.LEA: _lea,
    Mnemonic.ADD: _add,
    Mnemonic.SUB: _add,
}
