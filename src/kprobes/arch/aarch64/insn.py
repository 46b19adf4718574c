"""Instruction words to what they are: kinds, fields, and where they lead, many at a time.

Arm ARM (DDI 0487), C4.1 "A64 instruction set encoding": C4.1.92 for data processing with
immediates (ADR, ADRP), C4.1.93 for branches, exception generating and system instructions,
C4.1.94 for loads and stores. Only what differs by where it stands, or may not be probed, is told
apart; all else is OTHER.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kprobes.units import U64

SIZE = 4
"""Bytes of every instruction."""
LINK = 30
"""The register that a call leaves its return address in: x30."""
FRAME_POINTER = 29
SP_OR_ZR = 31
NOP = 0xD503201F

Row = tuple[int, int]
"""Bits of an instruction that are fixed, and what they are."""
Words = NDArray[np.uint32]
Addrs = NDArray[np.uint64]
Kinds = NDArray[np.uint8]


class Kind(IntEnum):
    """What is told apart."""

    OTHER = 0
    UNALLOCATED = 1
    UDF = 2
    B = 3
    BL = 4
    B_COND = 5
    CBZ = 6
    TBZ = 7
    BR = 8
    BLR = 9
    RET = 10
    RET_AUTH = 11
    ERET = 12
    BRK = 13
    HLT = 14
    CALL_UP = 15
    """svc, hvc, smc, dcps: to another exception level."""
    HINT = 16
    MSR_IMMEDIATE = 17
    MSR = 18
    MRS = 19
    ADR = 20
    ADRP = 21
    LDR_LITERAL = 22
    LDRSW_LITERAL = 23
    PRFM_LITERAL = 24
    VECTOR_LITERAL = 25
    LOAD_EXCLUSIVE = 26
    STORE_EXCLUSIVE = 27
    CLREX = 28
    WAIT = 29
    """wfe, wfi, wfet, wfit."""
    BTI = 30
    PACIASP = 31
    """and pacibsp."""
    AUTIASP = 32
    """and autibsp."""


# (kind, bits that are fixed, what they are). The first row that fits counts.
_ROWS: Sequence[tuple[Kind, int, int]] = (
    (Kind.B, 0b111111 << 26, 0b000101 << 26),
    (Kind.BL, 0b111111 << 26, 0b100101 << 26),
    # B.cond and BC.cond: bit 4 tells them apart.
    (Kind.B_COND, 0xFF << 24, 0b01010100 << 24),
    (Kind.CBZ, 0b0111_1110 << 24, 0b0011_0100 << 24),
    (Kind.TBZ, 0b0111_1110 << 24, 0b0011_0110 << 24),
    (Kind.BR, 0xFFFFFC1F, 0xD61F0000),
    # braa, brab, braaz, brabz; blraa and so on.
    (Kind.BR, 0xFEFFF800, 0xD61F0800),
    (Kind.BLR, 0xFFFFFC1F, 0xD63F0000),
    (Kind.BLR, 0xFEFFF800, 0xD63F0800),
    (Kind.RET, 0xFFFFFC1F, 0xD65F0000),
    (Kind.RET_AUTH, 0xFFFFFBFF, 0xD65F0BFF),
    (Kind.ERET, 0xFFFFF3FF, 0xD69F03E0),
    (Kind.ERET, 0xFFFFFBFF, 0xD69F0BFF),
    # drps
    (Kind.ERET, 0xFFFFFFFF, 0xD6BF03E0),
    (Kind.BRK, 0xFFE0001F, 0xD4200000),
    (Kind.HLT, 0xFFE0001F, 0xD4400000),
    (Kind.CALL_UP, 0xFFE0001C, 0xD4000000),
    (Kind.CALL_UP, 0xFFE0001C, 0xD4A00000),
    (Kind.WAIT, 0xFFFFFFDF, 0xD503205F),
    (Kind.WAIT, 0xFFFFFFC0, 0xD5031000),
    (Kind.BTI, 0xFFFFFF3F, 0xD503241F),
    (Kind.PACIASP, 0xFFFFFFBF, 0xD503233F),
    (Kind.AUTIASP, 0xFFFFFFBF, 0xD50323BF),
    (Kind.HINT, 0xFFFFF01F, 0xD503201F),
    (Kind.CLREX, 0xFFFFF0FF, 0xD503305F),
    (Kind.MSR_IMMEDIATE, 0xFFF8F01F, 0xD500401F),
    (Kind.MSR, 0xFFF00000, 0xD5100000),
    (Kind.MRS, 0xFFF00000, 0xD5300000),
    (Kind.ADR, 0x9F000000, 0x10000000),
    (Kind.ADRP, 0x9F000000, 0x90000000),
    (Kind.VECTOR_LITERAL, 0x3F000000, 0x1C000000),
    (Kind.PRFM_LITERAL, 0xFF000000, 0xD8000000),
    (Kind.LDRSW_LITERAL, 0xFF000000, 0x98000000),
    (Kind.LDR_LITERAL, 0xBF000000, 0x18000000),
    # size 001000 o2 L o1: a single register (o2 = o1 = 0), and pairs (bit 31, o2 = 0, o1 = 1).
    (Kind.LOAD_EXCLUSIVE, 0x3FE00000, 0x08400000),
    (Kind.LOAD_EXCLUSIVE, 0xBFE00000, 0x88600000),
    (Kind.STORE_EXCLUSIVE, 0x3FE00000, 0x08000000),
    (Kind.STORE_EXCLUSIVE, 0xBFE00000, 0x88200000),
    (Kind.UDF, 0xFFFF0000, 0),
    # op0, bits 28:25: reserved but for SME's, and twice unallocated.
    (Kind.UNALLOCATED, 0x9E000000, 0),
    (Kind.UNALLOCATED, 0x1E000000, 0x02000000),
    (Kind.UNALLOCATED, 0x1E000000, 0x06000000),
    # Exception generating, and branches to registers, that are none of the above.
    (Kind.UNALLOCATED, 0xFF000000, 0xD4000000),
    (Kind.UNALLOCATED, 0xFE000000, 0xD6000000),
)

_IMM26 = frozenset({Kind.B, Kind.BL})
_LITERALS = frozenset(
    {Kind.LDR_LITERAL, Kind.LDRSW_LITERAL, Kind.PRFM_LITERAL, Kind.VECTOR_LITERAL}
)
_IMM19 = _LITERALS | {Kind.B_COND, Kind.CBZ}
LEADING = _IMM26 | _IMM19 | {Kind.TBZ, Kind.ADR, Kind.ADRP}
"""Kinds that name an address relative to their own."""


def classify(words: Words) -> Kinds:
    """Return the kind of each word: a new column for one of the same shape, (n,)."""
    kinds = np.zeros(len(words), np.uint8)
    for kind, mask, value in reversed(_ROWS):
        kinds[words & np.uint32(mask) == value] = kind
    return kinds


def kind_of(word: int) -> Kind:
    """Return the kind of one word."""
    return next((kind for kind, mask, value in _ROWS if word & mask == value), Kind.OTHER)


def leads_to(words: Words, kinds: Kinds, addrs: Addrs) -> Addrs:
    """Return the address that each word of a LEADING kind names, else 0.

    Args:
        words: shape (n,), as the CPU reads them.
        kinds: shape (n,), from ``classify``.
        addrs: shape (n,), where each word is.

    Returns:
        A new column, shape (n,).
    """
    signed = words.astype(np.int64)
    found = np.zeros(len(words), np.uint64)
    fields: Sequence[tuple[frozenset[Kind], Any]] = (
        (_IMM26, _extended(signed, 0, 26) * SIZE),
        (_IMM19, _extended(signed, 5, 19) * SIZE),
        (frozenset({Kind.TBZ}), _extended(signed, 5, 14) * SIZE),
    )
    for members, offsets in fields:
        chosen = np.isin(kinds, list(members))
        found[chosen] = addrs[chosen] + offsets[chosen].astype(np.uint64)
    near = _extended(signed, 5, 19) * 4 + (signed >> 29 & 3)
    for kind, base, scale in ((Kind.ADR, addrs, 1), (Kind.ADRP, addrs & ~np.uint64(4095), 4096)):
        chosen = kinds == kind
        found[chosen] = base[chosen] + (near[chosen] * scale).astype(np.uint64)
    return found


def named_by(word: int, kind: Kind, addr: int) -> int | None:
    """Return the address that one word names, or None.

    Args:
        word: an instruction, as the CPU reads it.
        kind: from ``kind_of``.
        addr: where it is.
    """
    if kind not in LEADING:
        return None
    if kind in _IMM26:
        return addr + sign_extended(word, 26) * SIZE & U64
    if kind in _IMM19:
        return addr + sign_extended(word >> 5, 19) * SIZE & U64
    if kind is Kind.TBZ:
        return addr + sign_extended(word >> 5, 14) * SIZE & U64
    near = sign_extended(word >> 5, 19) * 4 + (word >> 29 & 3)
    return (addr + near if kind is Kind.ADR else (addr & ~4095) + near * 4096) & U64


def fits(word: int, row: Row) -> bool:
    """Return whether a word has its fixed bits as a row says."""
    mask, value = row
    return word & mask == value


def code_of(word: int) -> bytes:
    """Return a word as it lies in memory."""
    return word.to_bytes(SIZE, "little")


def sign_extended(value: int, bits: int) -> int:
    """Return the number that the lowest ``bits`` of a value are in two's complement."""
    value &= (1 << bits) - 1
    return value - (value >> (bits - 1) << bits)


def is_wide_move(word: int) -> bool:
    """Return whether a word is movn, movz or movk of 64 bits."""
    return word & 0x9F800000 == 0x92800000


def wide_move(word: int, before: int | None) -> int | None:
    """Return what movn, movz or movk leaves in its register, or None when that is not known."""
    shift, half = (word >> 21 & 3) * 16, word >> 5 & 0xFFFF
    match word >> 29 & 3:
        case 0:
            return ~(half << shift) & U64
        case 2:
            return half << shift
        case _:
            return None if before is None else before & ~(0xFFFF << shift) | half << shift


def target_register(word: int) -> int:
    """Return Rd or Rt, bits 4:0."""
    return word & 31


def first_register(word: int) -> int:
    """Return Rn, bits 9:5."""
    return word >> 5 & 31


def is_authenticated(word: int) -> bool:
    """Return whether a branch to a register checks a signature first: braa, blraaz, ..."""
    return bool(word & 1 << 11)


def _extended(signed: NDArray[np.int64], low: int, bits: int) -> NDArray[np.int64]:
    return signed << (64 - low - bits) >> (64 - bits)
