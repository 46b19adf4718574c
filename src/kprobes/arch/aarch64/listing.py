"""Bytes to lines of assembly, and what of them a reader wants named.

capstone formats; addresses are written as objdump writes them, without ``#``.
"""

from collections.abc import Iterator

from kprobes.arch.aarch64._capstone import text_of
from kprobes.arch.aarch64.decode import decode_one
from kprobes.arch.aarch64.function import Instruction
from kprobes.arch.aarch64.words import (
    LEADING,
    SIZE,
    Kind,
    first_register,
    is_wide_move,
    target_register,
    wide_move,
)
from kprobes.arch.listed import Listed, Syntax
from kprobes.units import Addr

_ADD = (0xFFC00000, 0x91000000)
_KERNEL = 1 << 63
"""What is above, and comes in parts, is an address."""
_ADDRESSES = frozenset({Kind.ADR, Kind.ADRP})
_SCALED = (0x3B000000, 0x39000000)
"""Loads and stores with an unsigned, scaled immediate."""


def list_code(code: bytes, addr: int, syntax: Syntax = Syntax.ATT) -> tuple[Listed, ...]:
    """Return the lines of some code, every byte in one of them.

    Args:
        code: bytes that begin with an instruction.
        addr: where they are.
        syntax: of no account: there is one only.
    """
    del syntax
    return tuple(_lines(code, addr))


def _lines(code: bytes, addr: int) -> Iterator[Listed]:
    held: dict[int, int] = {}
    for at in range(0, len(code), SIZE):
        word = code[at : at + SIZE]
        if len(word) < SIZE:
            yield Listed(addr=Addr(addr + at), code=word, mnemonic="(bad)", operands="")
            return
        yield _line(decode_one(word, addr + at), held)


def _line(i: Instruction, held: dict[int, int]) -> Listed:
    # `held` has what adrp and movz have put into registers, for what adds the rest.
    text = text_of(i.code, i.addr)
    mnemonic, operands = ("(bad)", "") if text is None else text
    if i.kind in LEADING:
        # Of a number of a bit before it, tbz's, that is left alone.
        operands = "".join(operands.rsplit("#", 1))
    place, value = _named(i, held)
    made = i.mention if i.kind is Kind.ADRP else None
    if is_wide_move(i.word):
        made = wide_move(i.word, held.get(target_register(i.word)))
        value = made if made is not None and made >= _KERNEL else None
    held.pop(target_register(i.word), None)
    if made is not None:
        held[target_register(i.word)] = made
    return Listed(
        addr=i.addr,
        code=i.code,
        mnemonic=mnemonic,
        operands=operands,
        target=i.target,
        place=None if place is None else Addr(place),
        value=value,
    )


def _named(i: Instruction, held: dict[int, int]) -> tuple[int | None, int | None]:
    # The place that it accesses, and the address that it computes.
    if i.mention is not None:
        return (None, i.mention) if i.kind in _ADDRESSES else (i.mention, None)
    page = held.get(first_register(i.word))
    immediate = i.word >> 10 & 0xFFF
    if page is None:
        return None, None
    if i.word & _ADD[0] == _ADD[1]:
        return None, page + immediate
    if i.word & _SCALED[0] == _SCALED[1]:
        return page + immediate * access_scale(i.word), None
    return None, None


def access_scale(word: int) -> int:
    """Return how many bytes a load or store of one register accesses."""
    is_quad = word & 1 << 26 and word & 1 << 23
    return 16 if is_quad else 1 << (word >> 30)
