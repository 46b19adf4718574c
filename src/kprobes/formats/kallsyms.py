"""A kernel's own symbol table, found in its image without any symbol, as columns.

The tables follow each other in the kernel's read-only data, as scripts/kallsyms.c writes them:

    v5.10   offsets, relative_base, num_syms, names, markers, token_table, token_index
    v6.2    the same with seqs_of_names before token_table (also in 6.1 stable)
    v6.4    num_syms, names, markers, token_table, token_index, offsets, relative_base, seqs
    v7.x    the same without relative_base, and 4-byte instead of 8-byte alignment

An offset means one of three things: bytes from relative_base (unsigned); with
KALLSYMS_ABSOLUTE_PERCPU (up to v6.14) a positive one is the address itself and a negative one
counts down from relative_base - 1; in v7.x it counts from its own place in memory. What is
found is believed only when every table agrees with the others.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats.kallsyms_names import CHUNK, Bytes, Expanded, Tokens, expand, find_tokens, walk
from kprobes.units import U64

_WINDOWS = (1 << 16, 1 << 21, 1 << 25)
"""Bytes before the token table in which markers are looked for: right there, or after seqs."""
_MIN_CHUNK, _MAX_CHUNK = 2 * CHUNK, (2 + CHUNK) * CHUNK
_MAX_SYMBOLS = 1 << 22
_MAX_CANDIDATES = 16
_REACH = 1 << 31
"""Kernel text and data lie within 2 GB of the tables."""

_Addrs = NDArray[np.uint64]


class SymbolTable(Struct, frozen=True, kw_only=True, eq=False):
    """Symbols in the kernel's order, which is by address.

    Attributes:
        addrs: uint64 (n,), ascending.
        types: nm's letters, one byte per symbol.
        blob: the names, each between two NULs, in the same order.
        starts: uint32 (n,), where in ``blob`` each name begins.
        sources: (addr, size) of the memory it was made of, without what the kernel relocates:
            equal bytes there mean equal symbols, but for the slide.
    """

    addrs: _Addrs
    types: bytes
    blob: bytes
    starts: NDArray[np.uint32]
    sources: tuple[tuple[int, int], ...] = ()

    def shifted(self, by: int) -> "SymbolTable":
        """Return the table of the same kernel at another place; small (per-CPU) values stay."""
        move = np.uint64(by & U64) * (self.addrs >= np.uint64(1 << 63))
        sources = tuple((addr + by, size) for addr, size in self.sources)
        return replace(self, addrs=self.addrs + move, sources=sources)

    def with_data(self, found: Mapping[str, int]) -> "SymbolTable":
        """Return the table with names of data that it lacked."""
        names: list[bytes] = self.blob[1:-1].split(b"\0") if len(self.starts) else []
        names += [name.encode() for name in found]
        addrs = np.concatenate([self.addrs, np.array([*found.values()], np.uint64)])
        types = self.types + b"d" * len(found)
        order: NDArray[np.intp] = np.argsort(addrs, kind="stable")
        sorted_names: list[bytes] = [names[i] for i in order.tolist()]
        lengths = np.array([len(name) + 1 for name in sorted_names], np.uint32)
        return replace(
            self,
            addrs=addrs[order],
            types=bytes(np.frombuffer(types, np.uint8)[order]),
            blob=b"\0" + b"\0".join(sorted_names) + b"\0",
            starts=(1 + np.cumsum(lengths) - lengths).astype(np.uint32),
        )


class _Names(Struct, frozen=True, kw_only=True, eq=False):
    # The name stream and where its neighbours are, as positions in the image.
    tokens: Tokens
    num_syms_at: int
    n: int
    stream: Bytes
    places: NDArray[np.int64]


def find(data: bytes, addr: int) -> SymbolTable | None:
    """Return the symbols in a piece of a kernel's image, or None when there are none.

    Args:
        data: the piece that has the kernel's read-only data.
        addr: its address: in a running kernel the symbols come out at running addresses.
    """
    for tokens in find_tokens(data):
        for names in _names_before(data, tokens):
            placed = _addresses(data, names, addr)
            expanded = _expanded(names)
            if placed is not None and expanded is not None:
                return SymbolTable(
                    addrs=placed[1],
                    types=expanded.types,
                    blob=expanded.blob,
                    starts=expanded.starts,
                    sources=_sources(names, placed[0], addr),
                )
    return None


def _sources(names: _Names, offsets_at: int, addr: int) -> tuple[tuple[int, int], ...]:
    named = (addr + names.num_syms_at, names.tokens.stop - names.num_syms_at)
    return named, (addr + offsets_at, 4 * names.n)


def _expanded(names: _Names) -> Expanded | None:
    try:
        return expand(names.stream, names.places, names.tokens)
    except FormatError:
        return None


def _names_before(data: bytes, tokens: Tokens) -> Iterator[_Names]:
    for at, markers in _markers_before(data, tokens.start):
        for start, num_syms_at, n in _counts_before(data, at, markers):
            stream = np.frombuffer(data, np.uint8, at - start, start)
            places = walk(stream, markers, n)
            if places is not None and at - start - int(places[-1]) < 8:
                yield _Names(
                    tokens=tokens, num_syms_at=num_syms_at, n=n, stream=stream, places=places
                )


def _markers_before(data: bytes, stop: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    # A 0 and then ever larger words, in steps that 256 names can have; the longest first.
    tried: set[int] = set()
    for window in _WINDOWS:
        start = max(stop - window, 0) // 4 * 4
        words = np.frombuffer(data, "<u4", (stop - start) // 4, start).astype(np.int64)
        firsts, counts = _ascending(words)
        for i in np.argsort(-counts, kind="stable")[:_MAX_CANDIDATES].tolist():
            first, count = int(firsts[i]), int(counts[i])
            at = start + 4 * first
            if at not in tried:
                tried.add(at)
                yield at, words[first : first + count]


def _ascending(words: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    # First index and length of every run that starts with 0 and rises in plausible steps.
    step = np.diff(words)
    rises = (step >= _MIN_CHUNK) & (step <= _MAX_CHUNK)
    ends = np.append(np.flatnonzero(~rises), len(rises))
    firsts = np.flatnonzero((words[:-1] == 0) & rises)
    lasts = ends[np.searchsorted(ends, firsts)]
    return firsts, lasts - firsts + 1


def _counts_before(
    data: bytes, markers_at: int, markers: NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    # (where names begin, where num_syms is, num_syms): the last chunk is of unknown size.
    stop = markers_at - int(markers[-1])
    start = max(stop - _MAX_CHUNK - 8, 0) // 4 * 4
    if stop - start < 8:
        return
    words = np.frombuffer(data, "<u4", (stop - start) // 4, start)
    full = CHUNK * (len(markers) - 1)
    for i in np.flatnonzero((words > full) & (words <= full + CHUNK)).tolist():
        at, n = start + 4 * i, int(words[i])
        for names_at in (at + 4, at + 8):
            if n <= _MAX_SYMBOLS and _first_chunk(data, names_at) == int(markers[1]):
                yield names_at, at, n


def _first_chunk(data: bytes, at: int) -> int:
    # Bytes of the 256 names from here on: the cheap test before all are walked.
    start = at
    for _ in range(CHUNK):
        if at + 1 >= len(data):
            return -1
        size = data[at]
        at += 1 + size if size < 128 else 2 + (size - 128 | data[at + 1] << 7)
    return at - start


def _addresses(data: bytes, names: _Names, addr: int) -> tuple[int, _Addrs] | None:
    # Where the offsets are in the image, and what they mean.
    for at in _offset_places(names):
        if at < 0 or at + 4 * names.n > len(data):
            continue
        offsets = np.frombuffer(data, "<i4", names.n, at)
        bases = (at + 4 * names.n, _up8(at + 4 * names.n))
        known = dict.fromkeys(_word(data, base_at) for base_at in bases)
        near = [base for base in known if abs(base - addr) < _REACH]
        for addrs in _readings(offsets, addr + at, near):
            if _is_plausible(addrs, addr):
                return at, addrs
    return None


def _offset_places(names: _Names) -> Iterator[int]:
    # Before num_syms with relative_base between them, or after the token index.
    yield names.tokens.stop
    yield _up8(names.tokens.stop)
    for base_at in (names.num_syms_at - 8, names.num_syms_at - 12):
        yield base_at - 4 * names.n
        yield base_at - 4 * names.n - 4


def _readings(offsets: NDArray[np.int32], addr: int, bases: list[int]) -> Iterator[_Addrs]:
    # With a base first: offsets from it look sound as offsets from their own places too.
    signed = offsets.astype(np.int64)
    for base in bases:
        down = np.uint64(base - 1) - signed.view(np.uint64)
        yield np.where(signed < 0, down, signed.view(np.uint64))
        yield np.uint64(base) + offsets.view(np.uint32)
    place = np.arange(len(offsets), dtype=np.uint64) * np.uint64(4) + np.uint64(addr)
    yield place + signed.view(np.uint64)


def _is_plausible(addrs: _Addrs, addr: int) -> bool:
    # The kernel searches by bisection, so order is certain; per-CPU symbols may be small.
    if np.any(addrs[1:] < addrs[:-1]):
        return False
    low = np.uint64(max(addr - _REACH, 0))
    near = (addrs >= low) & (addrs - low < np.uint64(2 * _REACH))
    return bool(np.count_nonzero(near) * 2 > len(addrs))


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _up8(value: int) -> int:
    return value + -value % 8
