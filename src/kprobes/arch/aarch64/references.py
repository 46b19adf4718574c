"""Which data an aarch64 function names, by what its instructions compute.

ADRP gives a page, ADD (immediate) what is in it, loads and stores add an offset (Arm ARM, C4.1).
Nothing is followed: what is found is where data may be, in the order of the instructions.
"""

from collections.abc import Iterator

import numpy as np

from kprobes.units import U64

_ADRP_MASK, _ADRP = 0b1_00_11111 << 24, 0b1_00_10000 << 24
_ADD_MASK, _ADD = 0b111111111 << 23, 0b100100010 << 23
# LDR and STR (unsigned immediate), LDP and STP (signed offset), of general registers.
_LOAD_MASK, _LOAD = 0b111_1_11 << 24, 0b111_0_01 << 24
_PAIR_MASK, _PAIR = 0b111_1_111 << 23, 0b101_0_010 << 23
# LDR of 64 bits (pre-indexed): lists are walked from a head that is loaded so.
_WALK_MASK, _WALK = 0xFFE0_0C00, 0b11_111_0_00_01_0_000000000_11_00000_00000
_MOV_MASK, _MOV = 0xFFE0_FFE0, 0b1_01_01010_00_0_00000_000000_11111_00000


def references(code: bytes, addr: int) -> Iterator[int]:
    """Yield the addresses of data that code names, as it comes to them."""
    known: dict[int, int] = {}
    words = np.frombuffer(code, "<u4", len(code) // 4).tolist()
    for at, word in zip(range(addr, addr + 4 * len(words), 4), words, strict=True):
        if word & _ADRP_MASK == _ADRP:
            known[word & 31] = _page(word, at)
        elif word & _MOV_MASK == _MOV and word >> 16 & 31 in known:
            known[word & 31] = known[word >> 16 & 31]
        elif word >> 5 & 31 in known:
            yield from _named(word, known)


def _named(word: int, known: dict[int, int]) -> Iterator[int]:
    register, base = word & 31, word >> 5 & 31
    if word & _ADD_MASK == _ADD:
        known[register] = known[base] + _immediate(word) & U64
        yield known[register]
    elif word & _WALK_MASK == _WALK:
        known[base] = known[base] + _signed(word >> 12 & 0x1FF, 9) & U64
        yield known[base]
    elif word & _LOAD_MASK == _LOAD:
        yield known[base] + ((word >> 10 & 0xFFF) << (word >> 30)) & U64
    elif word & _PAIR_MASK == _PAIR:
        yield known[base] + _signed(word >> 15 & 0x7F, 7) * (8 if word >> 31 else 4) & U64


def _page(word: int, at: int) -> int:
    pages = _signed((word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3, 21)
    return (at & ~0xFFF) + (pages << 12) & U64


def _immediate(word: int) -> int:
    return (word >> 10 & 0xFFF) << (12 if word >> 22 & 1 else 0)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
