"""Decoder of aarch64 functions: columns of words, what each does to the path, which are data.

Every instruction is four bytes at a multiple of four (Arm ARM, B2.6.2), so that boundaries need
no proof. What is not an instruction may still lie between them: constants that are loaded relative
to the instruction pointer, and padding.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from kprobes.arch.aarch64.insn import (
    NOP,
    SIZE,
    Addrs,
    Kind,
    Kinds,
    Words,
    classify,
    code_of,
    kind_of,
    leads_to,
    named_by,
)
from kprobes.arch.insn import Flow
from kprobes.model.kernel import TextPart, TextTables
from kprobes.units import Addr

FLOWS: Mapping[Kind, Flow] = {
    Kind.UNALLOCATED: Flow.UNKNOWN,
    Kind.UDF: Flow.TRAP,
    Kind.B: Flow.JUMP,
    Kind.BL: Flow.CALL,
    Kind.B_COND: Flow.BRANCH,
    Kind.CBZ: Flow.BRANCH,
    Kind.TBZ: Flow.BRANCH,
    Kind.BR: Flow.INDIRECT_JUMP,
    Kind.BLR: Flow.INDIRECT_CALL,
    Kind.RET: Flow.RETURN,
    Kind.RET_AUTH: Flow.RETURN,
    Kind.ERET: Flow.LEAVE,
    Kind.BRK: Flow.TRAP,
    Kind.HLT: Flow.TRAP,
}
"""Of kinds that do not simply go on to the next instruction."""

BRANCHING = frozenset({Kind.B, Kind.BL, Kind.B_COND, Kind.CBZ, Kind.TBZ})
"""Kinds that go to an address of their own."""


class Instruction(Struct, frozen=True, kw_only=True):
    """One instruction.

    Attributes:
        addr: where it is.
        word: its four bytes, as the CPU reads them.
        kind: what it is.
        target: of a direct branch or call; else None.
        mention: an address that it computes or loads from, without going there; or None.
    """

    addr: Addr
    word: int
    kind: Kind
    target: Addr | None = None
    mention: Addr | None = None

    @property
    def code(self) -> bytes:
        """Its bytes."""
        return code_of(self.word)

    @property
    def next(self) -> Addr:
        """The first address after it."""
        return Addr(self.addr + SIZE)

    @property
    def flow(self) -> Flow:
        """Where it goes on."""
        return FLOWS.get(self.kind, Flow.NEXT)


class Function(Struct, frozen=True, kw_only=True, eq=False):
    """A decoded function.

    Attributes:
        name: of its symbol.
        parts: its pieces, the one with its entry first.
        addrs, words, kinds, named: columns, one row for each word of all parts: where it is, what
            it is, and the address that it names or 0.
        rows: where each part's rows begin.
        targets: addresses inside that something may go to: branches of its own, exception
            fixups, jump labels, addresses that its code takes.
        data: addresses inside that its code reads constants from: they are not instructions.
        fillers: addresses after the last instruction of a part.
    """

    name: str
    parts: tuple[TextPart, ...]
    addrs: Addrs
    words: Words
    kinds: Kinds
    named: Addrs
    rows: tuple[int, ...]
    targets: frozenset[int]
    data: frozenset[int]
    fillers: frozenset[int] = field(default=frozenset())

    def part_of(self, addr: int) -> TextPart | None:
        """Return the part that an address lies in, or None."""
        return next((part for part in self.parts if part.addr <= addr < part.stop), None)

    def row(self, addr: int) -> int | None:
        """Return the row of the word that begins at an address, or None."""
        for part, first in zip(self.parts, self.rows, strict=True):
            if part.addr <= addr <= part.stop - SIZE and not (addr - part.addr) % SIZE:
                return first + (addr - part.addr) // SIZE
        return None

    def at(self, addr: int) -> Instruction | None:
        """Return the instruction that begins at an address, or None."""
        row = self.row(addr)
        return None if row is None else self.instruction(row)

    def instruction(self, row: int) -> Instruction:
        """Return the instruction of a row."""
        kind, named = Kind(int(self.kinds[row])), int(self.named[row])
        is_branch = kind in BRANCHING
        return Instruction(
            addr=Addr(int(self.addrs[row])),
            word=int(self.words[row]),
            kind=kind,
            target=Addr(named) if is_branch else None,
            mention=Addr(named) if named and not is_branch else None,
        )

    def place(self, addr: int) -> str:
        """Return an address as ``name+0x12``."""
        return f"{self.name}+{addr - self.parts[0].addr:#x}"


_NOWHERE = TextTables()
_POINTER = 8
_MAX_TAIL = 8
"""Words of padding after a function: to 16 bytes, and what the next one's tracer keeps there."""
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
        parts: its range, then its ``.cold`` ones; bytes after their last whole word are left out.
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
        own.update(tables.table_targets.intersection(range(part.addr, part.stop, SIZE)))
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
    # What is after the last end, unless something leads there. Where a register may lead, only
    # what is not code of any compiler's.
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
