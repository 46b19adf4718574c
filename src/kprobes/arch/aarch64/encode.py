"""Instructions of our own code as bytes, and veneers for calls that are far away.

Arm ARM (DDI 0487), C6.2, by each one's name there. Register 31 is the zero register or the stack
pointer, as the instruction has it. ``bl`` goes 128 MB far; any call may change x16 and x17, as
linkers use them for this (AAPCS64, 6.1.1), and a branch by x16 may land on ``bti c``.
"""

from kprobes.arch.aarch64.insn import LINK, SIZE, SP_OR_ZR, code_of
from kprobes.units import Addr

SP = ZR = SP_OR_ZR

NOP = bytes.fromhex("1f2003d5")
BTI_C = bytes.fromhex("5f2403d5")
BRK = bytes.fromhex("000020d4")
"""brk #0: what nothing of ours comes to."""
MOV_X9_X30 = bytes.fromhex("e9031eaa")
"""What comes before every site of the kernel's function tracer."""

_B, _BL = 0b000101 << 26, 0b100101 << 26
_STP, _LDP = 0b10_101_0_010_0 << 22, 0b10_101_0_010_1 << 22
_STP_DOWN = 0b10_101_0_011_0 << 22
_STR, _LDR = 0b11_111_0_01_00 << 22, 0b11_111_0_01_01 << 22
_ADD = 0b1_0_0_100010_0 << 22
_ORR = 0b1_01_01010_00_0 << 21
_MOVZ, _MOVK = 0b1_10_100101 << 23, 0b1_11_100101 << 23
_BR = 0b1101011_0_0_00_11111_0000_0_0 << 10
_RET = 0b1101011_0_0_10_11111_0000_0_0 << 10
_CBZ = 0b1_011010_0 << 24
_NZCV = 0b1_011_0100_0010_000
_MSR, _MRS = 0b1101010100_0_1 << 20, 0b1101010100_1_1 << 20
_REACH = range(-(1 << 25), 1 << 25)
REACH = SIZE * _REACH[-1]
"""Bytes that B and BL go at least."""
_HALVES = range(4)


def b(place: Addr, target: Addr) -> bytes:
    """Branch.

    Raises:
        ValueError: the target is further than 128 MB away.
    """
    return code_of(_B | _distance(place, target))


def bl(place: Addr, target: Addr) -> bytes:
    """Branch with link; raises as ``b``."""
    return code_of(_BL | _distance(place, target))


def bl_target(place: Addr, code: bytes) -> Addr | None:
    """Return where a ``bl`` leads, or None when it is none."""
    return _target(_BL, place, code)


def b_target(place: Addr, code: bytes) -> Addr | None:
    """Return where a ``b`` leads, or None when it is none."""
    return _target(_B, place, code)


def cbz(register: int, over: int) -> bytes:
    """Branch if zero, over so many bytes after it."""
    return code_of(_CBZ | (over // SIZE + 1) << 5 | register)


def br(register: int) -> bytes:
    """Branch to a register."""
    return code_of(_BR | register << 5)


def ret(register: int = LINK) -> bytes:
    """Return to where a register says: it needs no landing pad there."""
    return code_of(_RET | register << 5)


def stp(first: int, second: int, offset: int) -> bytes:
    """Store a pair at an offset from the stack pointer.

    Args:
        first: the number of the register whose place comes first.
        second: the number of the other.
        offset: bytes, a multiple of 8.
    """
    return code_of(_STP | _scaled(offset) << 15 | second << 10 | SP << 5 | first)


def stp_down(first: int, second: int, size: int) -> bytes:
    """Lower the stack pointer by a size, and store a pair there.

    Args:
        first: the number of the register whose place comes first.
        second: the number of the other.
        size: bytes, a multiple of 8.
    """
    return code_of(_STP_DOWN | _scaled(-size) << 15 | second << 10 | SP << 5 | first)


def ldp(first: int, second: int, offset: int) -> bytes:
    """Load a pair from an offset from the stack pointer.

    Args:
        first: the number of the register whose place comes first.
        second: the number of the other.
        offset: bytes, a multiple of 8.
    """
    return code_of(_LDP | _scaled(offset) << 15 | second << 10 | SP << 5 | first)


def store(register: int, offset: int) -> bytes:
    """STR (immediate, unsigned offset) at an offset from the stack pointer."""
    return code_of(_STR | offset // 8 << 10 | SP << 5 | register)


def load(register: int, offset: int) -> bytes:
    """LDR (immediate, unsigned offset) from an offset from the stack pointer."""
    return code_of(_LDR | offset // 8 << 10 | SP << 5 | register)


def add(register: int, source: int, number: int) -> bytes:
    """ADD (immediate), where 31 is the stack pointer.

    Args:
        register: the number of the one that is set.
        source: the number of the one that is added to.
        number: below 4096.
    """
    return code_of(_ADD | number << 10 | source << 5 | register)


def mov(register: int, source: int) -> bytes:
    """MOV (register): 31 is the zero register."""
    return code_of(_ORR | source << 16 | ZR << 5 | register)


def move_number(register: int, number: int) -> bytes:
    """MOVZ and three MOVK: always as long."""
    words = (
        (_MOVK if half else _MOVZ) | half << 21 | (number >> 16 * half & 0xFFFF) << 5 | register
        for half in _HALVES
    )
    return b"".join(map(code_of, words))


def movz(register: int, number: int) -> bytes:
    """Move 16 bits, the others zero."""
    return code_of(_MOVZ | number << 5 | register)


def read_nzcv(register: int) -> bytes:
    """MRS of the condition flags."""
    return code_of(_MRS | _NZCV << 5 | register)


def write_nzcv(register: int) -> bytes:
    """MSR of the condition flags."""
    return code_of(_MSR | _NZCV << 5 | register)


def _scaled(offset: int) -> int:
    return offset // 8 & 0x7F


def _distance(place: Addr, target: Addr) -> int:
    distance = (target - place) // SIZE
    if distance not in _REACH or (target - place) % SIZE:
        raise ValueError(f"{target:#x} cannot be reached from {place:#x}")
    return distance & 0x3FFFFFF


def _target(opcode: int, place: Addr, code: bytes) -> Addr | None:
    word = int.from_bytes(code, "little")
    if len(code) != SIZE or word & 0b111111 << 26 != opcode:
        return None
    distance = word & 0x3FFFFFF
    distance -= distance >> 25 << 26
    return Addr(place + SIZE * distance & (1 << 64) - 1)


_X16 = 16


def veneer(target: Addr) -> bytes:
    """Return code that a call of a far function goes to instead; it runs anywhere."""
    return move_number(_X16, target) + br(_X16)
