"""What instructions do to the stack: how far a function is from its return address."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from iced_x86 import FlowControl, Mnemonic, OpKind, Register
from iced_x86 import Instruction as Decoded

from kprobes.units import U64

_CALLS = frozenset({FlowControl.CALL, FlowControl.INDIRECT_CALL})
_STACK = frozenset({Register.RSP, Register.ESP, Register.SP})
_TRACKED = _STACK | {Register.RBP, Register.EBP, Register.BP}
_KEEPERS = frozenset({Register.R10, Register.R13})
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
    if register in _KEEPERS and mnemonic == Mnemonic.LEA and decoded.memory_base == Register.RSP:
        return None
    if mnemonic in _OTHERS and (mnemonic != Mnemonic.XCHG or decoded.op1_register in _TRACKED):
        return None
    return decoded.stack_pointer_increment


def after(decoded: Decoded, before: Stack) -> Stack:
    """Return the stack behind an instruction for which ``added`` is None."""
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
    return _set(decoded, before, held - _signed(decoded.memory_displacement))


def _add(decoded: Decoded, before: Stack) -> Stack:
    held = _held(decoded.op0_register, before)
    if held is None or decoded.op1_kind not in _IMMEDIATES:
        return _set(decoded, before, None)
    by = _signed(decoded.immediate(1) & U64)
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


def _signed(value: int) -> int:
    return value - (value >> 63 << 64)


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
