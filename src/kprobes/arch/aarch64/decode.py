"""A function's bytes to its instructions: columns of words, where they lead, what is data.

Every instruction is four bytes at a multiple of four (Arm ARM, B2.6.2), so that boundaries need
no proof; what is no instruction at all may still lie between them: constants that are loaded
relative to the instruction pointer, and padding.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from kprobes.arch.aarch64.function import BRANCHING, FLOWS, Function, Instruction
from kprobes.arch.aarch64.words import (
    NOP,
    SIZE,
    Addrs,
    Kind,
    Kinds,
    Words,
    classify,
    kind_of,
    leads_to,
    named_by,
)
from kprobes.model.text import TextPart, TextTables
from kprobes.units import Addr

_NOWHERE = TextTables()
_POINTER = 8
_MAX_TAIL = 8
"""Words of padding behind a function: to 16 bytes, and what the next one's tracer keeps there."""
_ENDS = [kind for kind, flow in FLOWS.items() if not flow.falls_through]
_LITERALS = (
    (Kind.LDR_LITERAL, 2),
    (Kind.LDRSW_LITERAL, 1),
    (Kind.VECTOR_LITERAL, 4),
)
"""Words that each reads at most."""


def decode_function(
    name: str, parts: Sequence[TextPart], tables: TextTables = _NOWHERE
) -> Function:
    """Decode a function.

    Args:
        name: of its symbol.
        parts: its range, then its ``.cold`` ones; bytes behind their last whole word are left out.
        tables: where branches come from and lead to, besides what its bytes say.
    """
    words, addrs = _columns(parts)
    pointers = _pointers(parts, tables)
    words = np.where(np.isin(addrs, pointers), np.uint32(0), words) if pointers else words
    kinds = classify(words)
    named = leads_to(words, kinds, addrs)
    targets = _targets(parts, named, kinds, tables)
    counts = [len(part.code) // SIZE for part in parts]
    rows = tuple(sum(counts[:i]) for i in range(len(counts)))
    return Function(
        name=name,
        parts=tuple(parts),
        addrs=addrs,
        words=words,
        kinds=kinds,
        named=named,
        rows=rows,
        targets=targets,
        data=_data(parts, words, kinds, named).union(pointers),
        fillers=_fillers(zip(rows, counts, strict=True), words, kinds, (addrs, targets)),
    )


def decode_one(code: bytes, addr: int) -> Instruction:
    """Return the instruction that some bytes begin with."""
    word = int.from_bytes(code[:SIZE], "little")
    kind = kind_of(word)
    named = named_by(word, kind, addr)
    is_branch = kind in BRANCHING
    return Instruction(
        addr=Addr(addr),
        word=word,
        kind=kind,
        target=Addr(named) if named is not None and is_branch else None,
        mention=Addr(named) if named is not None and not is_branch else None,
    )


def _columns(parts: Sequence[TextPart]) -> tuple[Words, Addrs]:
    words = [np.frombuffer(p.code, "<u4", len(p.code) // SIZE) for p in parts]
    addrs = [
        np.uint64(part.addr) + np.arange(len(column), dtype=np.uint64) * np.uint64(SIZE)
        for part, column in zip(parts, words, strict=True)
    ]
    return np.concatenate(words), np.concatenate(addrs)


def _targets(
    parts: Sequence[TextPart], named: Addrs, kinds: Kinds, tables: TextTables
) -> frozenset[int]:
    leading = named[np.isin(kinds, [*BRANCHING, Kind.ADR])]
    own = set[int]()
    for part in parts:
        inside = leading[(leading >= part.addr) & (leading < part.stop)]
        own.update(inside.tolist())
        own.update(tables.landings.intersection(range(part.addr, part.stop, SIZE)))
    return frozenset(own)


def _pointers(parts: Sequence[TextPart], tables: TextTables) -> list[int]:
    # Both words of each, which mean nothing to a CPU whatever they are.
    starts = (range(part.addr - part.addr % _POINTER, part.stop, _POINTER) for part in parts)
    found = sorted(tables.pointers.intersection(itertools.chain(*starts)))
    return [addr + at for addr in found for at in range(0, _POINTER, SIZE)]


def _data(parts: Sequence[TextPart], words: Words, kinds: Kinds, named: Addrs) -> frozenset[int]:
    found = set[int]()
    for kind, most in _LITERALS:
        for row in np.flatnonzero(kinds == kind).tolist():
            opc = int(words[row]) >> 30
            count = {Kind.LDR_LITERAL: opc + 1, Kind.VECTOR_LITERAL: 1 << opc}.get(kind, 1)
            start = int(named[row])
            found.update(range(start, start + min(count, most) * SIZE, SIZE))
    return frozenset(a for a in found if any(part.addr <= a < part.stop for part in parts))


def _fillers(
    pieces: Iterable[tuple[int, int]],
    words: Words,
    kinds: Kinds,
    places: tuple[Addrs, frozenset[int]],
) -> frozenset[int]:
    # What is behind the last end, unless something leads there. Where a register may lead, only
    # what is no code of any compiler's.
    addrs, targets = places
    is_open = bool(np.any(kinds == Kind.BR))
    found = set[int]()
    for first, count in pieces:
        stop = row = first + count
        while row > first and row > stop - _MAX_TAIL and int(addrs[row - 1]) not in targets:
            row -= 1
            if is_open and not _is_padding(int(words[row])):
                break
            if (row > first and kinds[row - 1] in _ENDS) or _is_all_padding(words[row:stop]):
                found.update(addrs[row:stop].tolist())
    return frozenset(found)


def _is_padding(word: int) -> bool:
    return word in (0, NOP)


def _is_all_padding(words: Words) -> bool:
    return all(_is_padding(word) for word in words.tolist())
