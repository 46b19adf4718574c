"""Many names in one blob, each between two NULs, looked up without an object per name.

The form of an ELF or BTF string table (``\\0name\\0name\\0``), and of decoded kallsyms names.
"""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_SCANS = 32
"""Look-ups answered by a scan (about 0.1 ms) before a dict is built (about 30 ms)."""
_FEW = 16
"""Candidates that are compared one by one."""


class Names:
    """The names of a blob, by their number in it.

    Args:
        blob: starts and ends with a NUL.
        starts: uint32 (n,), where in the blob each name begins, ascending; made when None.
    """

    def __init__(self, blob: bytes, starts: NDArray[np.uint32] | None = None) -> None:
        if starts is None:
            starts = np.flatnonzero(np.frombuffer(blob, np.uint8) == 0)[:-1].astype(np.uint32)
            starts += np.uint32(1)
        self.blob = blob
        self.starts = starts
        ends = np.append(starts[1:], np.uint32(len(blob))) if len(starts) else starts
        self._sizes = ends.astype(np.int64) - starts - 1
        self._bytes = np.frombuffer(blob, np.uint8)
        self._scans = 0
        self._first: dict[bytes, int] = {}
        self._again: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """Return how many names there are."""
        return len(self.starts)

    def name(self, number: int) -> bytes:
        """Return one name, without NUL."""
        start: int = self.starts.data[number]
        return self.blob[start : self.blob.index(0, start)]

    def some(self, numbers: NDArray[np.intp]) -> Iterator[bytes]:
        """Yield the names of some numbers, shape (n,): faster than one by one."""
        starts = self.starts[numbers].astype(np.int64)
        for start, size in zip(starts.tolist(), self._sizes[numbers].tolist(), strict=True):
            yield self.blob[start : start + size]

    def first(self, name: bytes) -> int | None:
        """Return the number of the first name equal to ``name``, or None."""
        if self._first:
            return self._first.get(name)
        at = -1 if b"\0" in name else next(self._scan(name), -1)
        return None if at < 0 else int(np.searchsorted(self.starts, np.uint32(at)))

    def numbers(self, name: bytes) -> list[int]:
        """Return the numbers of all names equal to ``name``, ascending."""
        if b"\0" in name:
            return []
        if not self._first and self._scans < _SCANS:
            self._scans += 1
            return self._number_at(self._scan(name))
        self._index()
        first = self._first.get(name)
        return [] if first is None else [first, *self._again.get(name, ())]

    def matching(self, pattern: bytes) -> NDArray[np.intp]:
        """Return the numbers of the names that a regular expression matches as a whole.

        The expression must not match a NUL. The numbers are a copy, shape (n,), ascending.
        """
        found = re.finditer(rb"\0(?=(?:" + pattern + rb")\0)", self.blob, re.DOTALL)
        starts = np.fromiter((match.start() for match in found), np.uint32) + np.uint32(1)
        return np.searchsorted(self.starts, starts[starts < len(self.blob)])

    def around(self, literal: bytes) -> NDArray[np.intp]:
        """Return the numbers of the names in which some bytes are; a NUL stands for an end.

        The numbers are a copy, shape (n,), ascending.
        """
        found = re.finditer(re.escape(literal), self.blob)
        places = np.fromiter((match.start() for match in found), np.uint32)
        places += np.uint32(literal.startswith(b"\0"))
        return np.unique(np.searchsorted(self.starts, places, "right")) - 1

    def lengths(self, numbers: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return how long some names are: a copy of the shape of their numbers, (n,)."""
        return self._sizes[numbers]

    def _scan(self, name: bytes) -> Iterator[int]:
        whole = name + b"\0"
        return (at for at in self._candidates(name).tolist() if self.blob.startswith(whole, at))

    def _candidates(self, name: bytes) -> NDArray[np.uint32]:
        # Names as long, then those with the same last byte, and so on: ten times quicker than
        # to look for the name in the blob, where every search stops at every NUL.
        found = self.starts[self._sizes == len(name)]
        for at in range(len(name) - 1, -1, -3):
            if len(found) <= _FEW:
                break
            found = found[self._bytes[found + np.uint32(at)] == name[at]]
        return found

    def _number_at(self, starts: Iterator[int]) -> list[int]:
        return np.searchsorted(self.starts, np.fromiter(starts, np.uint32)).tolist()

    def _index(self) -> None:
        if self._first or not len(self):
            return
        names = self.blob[1:-1].split(b"\0")
        last = dict(zip(names, range(len(names)), strict=True))
        at = np.fromiter(map(last.__getitem__, names), np.intp, len(names))
        for number in np.flatnonzero(at != np.arange(len(names))).tolist():
            self._again.setdefault(names[number], []).append(number)
        for name, numbers in self._again.items():
            numbers.append(last[name])
            last[name] = numbers.pop(0)
        self._first = last
