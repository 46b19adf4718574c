"""An instruction to code that does the same elsewhere, and then goes on after the original.

A slot is entered with all registers and flags as the instruction would find them, and leaves
them as the instruction would. It needs no stack, no register of its own and no trap: what counts
from the instruction pointer writes a register of its own, or none.

    anything              its word
    b target              b target
    b.cond, cbz, tbz      the same to L; b after; L: b target
    bl target             x30 = ORIGINAL return address; b target
    blr xN, blraa ...     x30 = ORIGINAL return address; x16 = xN; br x16, braa ...
    adr, adrp xD          xD = what it computes
    ldr, ldrsw xT, label  xT = label; ldr, ldrsw xT, [xT]
    prfm label            nothing: it only hints
    br, ret, retaa ...    their words: they leave by themselves

A value comes from ``adrp; add`` where that reaches, else from ``movz`` or ``movn`` and ``movk``.
Encodings: Arm ARM, C6.2.
"""

from collections.abc import Callable, Mapping

from kprobes.arch.aarch64.decode import Flow, Instruction
from kprobes.arch.aarch64.encode import mov
from kprobes.arch.aarch64.insn import (
    LINK,
    SIZE,
    SP_OR_ZR,
    Kind,
    code_of,
    first_register,
    target_register,
)
from kprobes.errors import RefusedError
from kprobes.units import Addr, signed

MAX_SIZE = 24
"""Bytes that a slot needs at most."""

_B = 0b000101 << 26
_ADRP = 0b1_00_10000 << 24
_ADD = 0b1_0_0_100010_0 << 22
_MOVN, _MOVZ, _MOVK = (0b1_00_100101 << 23 | opc << 29 for opc in (0, 2, 3))
_LDR, _LDR_X, _LDRSW = 0xB9400000, 0xF9400000, 0xB9800000
_CALLS_TO_JUMPS = 1 << 21
"""The bit by which blr, blraa, ... differ from br, braa, ..."""
_INTRA_PROCEDURE = (16, 17)
_HALVES = (0, 16, 32, 48)
_REACH = range(-(1 << 27), 1 << 27)
_PAGES = range(-(1 << 20), 1 << 20)
_PAGE = 4096
_ENDS = frozenset({Flow.JUMP, Flow.INDIRECT_JUMP, Flow.RETURN, Flow.CALL, Flow.INDIRECT_CALL})


def slot(instruction: Instruction, at: Addr) -> bytes:
    """Return code for a slot that runs one instruction and goes on after the original.

    Args:
        instruction: one that ``insn_verdict`` did not refuse.
        at: where the slot is.

    Raises:
        RefusedError: the slot is too far from what the instruction names.
    """
    code = body(instruction, at)
    if not comes_back(instruction):
        return code
    return code + branch(Addr(at + len(code)), instruction.next)


def comes_back(instruction: Instruction) -> bool:
    """Return whether a slot goes on after an instruction; a callee returns there by itself."""
    return instruction.flow not in _ENDS


def body(instruction: Instruction, at: Addr) -> bytes:
    """Return code for ``at`` that runs one instruction; what comes next is to stand after it.

    Raises:
        RefusedError: as ``slot``.
    """
    made = _BODIES.get(instruction.kind)
    return instruction.code if made is None else made(instruction, at)


def branch(at: Addr, target: Addr) -> bytes:
    """Return the word that branches from ``at`` to ``target``.

    Raises:
        RefusedError: it is further away than 128 MB.
    """
    distance = signed(target - at)
    if distance not in _REACH:
        raise RefusedError(f"a slot at {at:#x} is too far from {target:#x}")
    return code_of(_B | distance // SIZE & 0x3FFFFFF)


def branch_over(instruction: Instruction, over: int) -> bytes:
    """Return a conditional branch that jumps over so many bytes after it where it is taken.

    Args:
        instruction: b.cond, cbz, cbnz, tbz or tbnz.
        over: a multiple of four, less than 32 KB.
    """
    bits = 14 if instruction.kind is Kind.TBZ else 19
    field = ((1 << bits) - 1) << 5
    return code_of(instruction.word & ~field | (over + SIZE) // SIZE << 5 & field)


def set_register(register: int, value: int, at: Addr) -> bytes:
    """Return code for ``at`` that sets a register, not the stack pointer, to an address.

    Nothing else changes, flags included.
    """
    pages = signed((value & ~(_PAGE - 1)) - (at & ~(_PAGE - 1))) // _PAGE
    if pages not in _PAGES:
        return _moves(register, value)
    adrp = _ADRP | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5 | register
    low = value % _PAGE
    add = code_of(_ADD | low << 10 | register << 5 | register)
    return code_of(adrp) + (add if low else b"")


def _moves(register: int, value: int) -> bytes:
    halves = [value >> shift & 0xFFFF for shift in _HALVES]
    is_negative = halves.count(0xFFFF) > halves.count(0)
    idle, first = (0xFFFF, _MOVN) if is_negative else (0, _MOVZ)
    needed = [(i, half) for i, half in enumerate(halves) if half != idle] or [(0, idle)]
    words = list[int]()
    for i, half in needed:
        opcode = _MOVK if words else first
        field = ~half & 0xFFFF if opcode == _MOVN else half
        words.append(opcode | i << 21 | field << 5 | register)
    return b"".join(code_of(word) for word in words)


def _jump(instruction: Instruction, at: Addr) -> bytes:
    assert instruction.target is not None
    return branch(at, instruction.target)


def _conditional(instruction: Instruction, at: Addr) -> bytes:
    # The branch comes last in time and in place: what falls through jumps over it.
    assert instruction.target is not None
    over = branch(Addr(at + SIZE), Addr(at + 3 * SIZE))
    return branch_over(instruction, SIZE) + over + branch(Addr(at + 2 * SIZE), instruction.target)


def _call(instruction: Instruction, at: Addr) -> bytes:
    assert instruction.target is not None
    code = set_register(LINK, instruction.next, at)
    return code + branch(Addr(at + len(code)), instruction.target)


def _indirect_call(instruction: Instruction, at: Addr) -> bytes:
    return set_register(LINK, instruction.next, at) + indirect_jump(instruction)


def indirect_jump(instruction: Instruction) -> bytes:
    """Return code that jumps where an indirect call would go.

    By x16 or x17, which no call preserves: by them only may a jump out of guarded memory land on
    ``bti c`` or ``paciasp`` (Arm ARM, D8.4.5, BTYPE).
    """
    word, register = instruction.word & ~_CALLS_TO_JUMPS, first_register(instruction.word)
    if register in _INTRA_PROCEDURE:
        return code_of(word)
    # Whoever checks a signature first names what it was made with in the lowest bits.
    own = next(each for each in _INTRA_PROCEDURE if each != target_register(word))
    return mov(own, register) + code_of(word & ~(31 << 5) | own << 5)


def _address(instruction: Instruction, at: Addr) -> bytes:
    assert instruction.mention is not None
    register = target_register(instruction.word)
    return b"" if register == SP_OR_ZR else set_register(register, instruction.mention, at)


def _literal(instruction: Instruction, at: Addr) -> bytes:
    assert instruction.mention is not None
    register = target_register(instruction.word)
    is_long = instruction.word >> 30 == 1
    load = _LDRSW if instruction.kind is Kind.LDRSW_LITERAL else _LDR_X if is_long else _LDR
    code = set_register(register, instruction.mention, at)
    return code + code_of(load | register << 5 | register)


def _nothing(instruction: Instruction, at: Addr) -> bytes:
    del instruction, at
    return b""


_BODIES: Mapping[Kind, Callable[[Instruction, Addr], bytes]] = {
    Kind.B: _jump,
    Kind.BL: _call,
    Kind.B_COND: _conditional,
    Kind.CBZ: _conditional,
    Kind.TBZ: _conditional,
    Kind.BLR: _indirect_call,
    Kind.ADR: _address,
    Kind.ADRP: _address,
    Kind.LDR_LITERAL: _literal,
    Kind.LDRSW_LITERAL: _literal,
    Kind.PRFM_LITERAL: _nothing,
}
