"""Checks of kernels before they call through a pointer: clang's kCFI, and FineIBT.

The caller's register has a hash of the function's type, which is also right before the function.
Sources: arch/x86/kernel/cfi.c, arch/x86/kernel/alternative.c.
"""

from collections.abc import Sequence
from itertools import pairwise

from kprobes.arch.arch import PREAMBLE_SIZE
from kprobes.arch.entry import EntryKind
from kprobes.arch.x86_64.decode import decode_function
from kprobes.arch.x86_64.insn import Instruction
from kprobes.arch.x86_64.slot import ENDBR64
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart

_MOV_R10D, _MOV_EAX = b"\x41\xba", b"\xb8"
_SUB = {_MOV_R10D: b"\x41\x81\xea", _MOV_EAX: b"\x2d"}
_BACK = (b"\x49\x83\xeb\x10", b"\x4d\x8d\x5b\xf0")
"""``sub $16, %r11``, later ``lea -16(%r11), %r11``: calls go to what is before the function."""
_CS = b"\x2e"
_JMP = 0xEB
_INT3, _NOP = b"\xcc", b"\x90"
_HASH = 4
_BYTE = 0b01
"""ModRM.mod of a displacement of 8 bits."""
_U32 = 0xFFFF_FFFF


def is_check(first: Instruction, second: Instruction | None) -> bool:
    """Return whether two instructions are ``mov $-hash, %r10d; add disp(%reg), %r10d``."""
    if second is None or not first.code.startswith(_MOV_R10D) or len(second.code) < 4:
        return False
    rex, opcode, modrm = second.code[:3]
    return rex & ~1 == 0x44 and opcode == 0x03 and modrm >> 3 & 7 == 2


def entry_check(before: bytes) -> tuple[int, int, EntryKind] | None:
    """Return what callers through a pointer look at before a function: offset, bytes, and kind.

    Args:
        before: bytes that end where it begins.
    """
    fineibt = before[-PREAMBLE_SIZE:]
    if any(fineibt.startswith(ENDBR64 + sub) for sub in _SUB.values()):
        return -PREAMBLE_SIZE, PREAMBLE_SIZE, EntryKind.FINEIBT
    size = len(_MOV_EAX) + _HASH
    # Nops may be between: -fpatchable-function-entry.
    stop = len(before.rstrip(_NOP))
    if stop < size or not before.startswith(_MOV_EAX, stop - size):
        return None
    return stop - size - len(before), size, EntryKind.KCFI


def preamble(name: str, parts: Sequence[TextPart]) -> bytes | None:
    """Return what has to be before a function that another calls through its only pointer.

    Args:
        name: of the one that calls.
        parts: its text.

    Returns:
        PREAMBLE_SIZE bytes, or None where it looks at none.

    Raises:
        RefusedError: it looks elsewhere.
    """
    instructions = list(decode_function(name, parts).instructions.values())
    for at, (first, second) in enumerate(pairwise(instructions)):
        if is_check(first, second):
            return _compared(first, second)
        after = (each.code.removeprefix(_CS) for each in instructions[at + 1 : at + 3])
        if any(code in _BACK for code in after):
            found = _called(first)
            if found is not None:
                return found
    return None


def _compared(first: Instruction, second: Instruction) -> bytes:
    value = -int.from_bytes(first.code[2:], "little") & _U32
    at = PREAMBLE_SIZE + int.from_bytes(second.code[-1:], "little", signed=True)
    if second.code[2] >> 6 != _BYTE or not 0 <= at <= PREAMBLE_SIZE - _HASH:
        raise RefusedError("this kernel checks whom it calls in a way that is not known (kCFI)")
    return (at * _INT3 + value.to_bytes(_HASH, "little")).ljust(PREAMBLE_SIZE, _INT3)


def _called(first: Instruction) -> bytes | None:
    # As in the kernel's own: those that compare beforehand find the hash in the subtraction.
    for mov, sub in _SUB.items():
        if first.code.startswith(mov) and len(first.code) == len(mov) + _HASH:
            code = ENDBR64 + sub + first.code[len(mov) :]
            over = PREAMBLE_SIZE - len(code) - 2
            return code + bytes((_JMP, over)) + over * _INT3
    return None
