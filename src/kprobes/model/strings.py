"""Strings of many events as bytes one after the other: none is an object before it is asked for.

They are cut out of what they stand in, and those that are alike are found, by C where there are
many: native/strings.c.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kprobes.native.library import function_for

Index = NDArray[np.int64]
_CUT_PARTS = "data size begins lengths count is_raw blob starts kept"
_CUT = np.dtype([(name, "u8") for name in _CUT_PARTS.split()])
_ALIKE_PARTS = "bytes starts lengths count slots mask firsts codes"
_ALIKE = np.dtype([(name, "u8") for name in _ALIKE_PARTS.split()])
_WORD = 8
_MOST_UNUSED = 2
"""Times the bytes of its strings that a column keeps when it is joined to others."""


class Coded(NamedTuple):
    """Strings that repeat.

    Attributes:
        codes: int32 (n,), of each row its string's index.
        table: the strings, each once; None is one that could not be read.
    """

    codes: NDArray[np.int32]
    table: list[bytes | None]


class Strings:
    """A column of strings, shape (n,), or (n, count) of an array. It is never changed.

    Attributes:
        blob: uint8, the bytes of all, and maybe others.
        starts: int64, where each one's begin.
        lengths: int32, how many each one has; -1 for one that could not be read, which is None.
    """

    def __init__(self, blob: NDArray[np.uint8], starts: Index, lengths: NDArray[np.int32]) -> None:
        """Copy nothing; ``starts`` and ``lengths`` have the column's shape."""
        self.blob, self.starts, self.lengths = blob, starts, lengths

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the column."""
        return self.starts.shape

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.starts)

    def __getitem__(self, rows: Any) -> "Strings":
        """Return some rows, or one of an array's columns, as NumPy does; the bytes are shared."""
        return Strings(self.blob, self.starts[rows], self.lengths[rows])

    @cached_property
    def coded(self) -> Coded:
        """All rows, one after the other, as codes of different strings."""
        starts = np.ascontiguousarray(self.starts).reshape(-1)
        lengths = np.ascontiguousarray(self.lengths).reshape(-1)
        code = function_for(len(starts), "strings", "strings_code", 1)
        if code is None:
            found = _listed(self.blob, starts, lengths)
            numbers: dict[bytes | None, int] = {}
            codes = [numbers.setdefault(each, len(numbers)) for each in found]
            return Coded(np.array(codes, np.int32), [*numbers])
        codes, firsts = np.empty(len(starts), np.int32), np.empty(len(starts), np.int64)
        slots = np.zeros(2 << len(starts).bit_length(), np.uint32)
        row = (
            *(_address(each) for each in (self.blob, starts, lengths)),
            *(len(starts), _address(slots), len(slots) - 1, _address(firsts), _address(codes)),
        )
        table = np.array(row, _ALIKE)
        firsts = firsts[: code(_address(table))]
        return Coded(codes, _listed(self.blob, starts[firsts], lengths[firsts]))

    def mapped(self, make: Callable[[bytes | None], Any]) -> NDArray[Any]:
        """Return what a function makes of each, an array of objects of the column's shape, new.

        Args:
            make: is asked of each different string once.
        """
        codes, table = self.coded
        found = np.fromiter(map(make, table), object, len(table))
        return found[codes].reshape(self.shape)

    @cached_property
    def objects(self) -> NDArray[Any]:
        """An array of the column's shape, new at first, of ``bytes`` objects and None.

        Those that are alike are one object.
        """
        return self.mapped(lambda text: text)

    def tolist(self) -> list[Any]:
        """Return each row as an object."""
        return self.objects.tolist()


def cut(
    data: NDArray[np.uint8], begins: Index, lengths: NDArray[np.int32], *, is_raw: bool = False
) -> Strings:
    """Return strings that stand anywhere, as copies.

    Args:
        data: the bytes that they stand in.
        begins: of any shape, which is the answer's: where each begins.
        lengths: of that shape: how many bytes it has at most; -1 for one that could not be read.
        is_raw: whether NULs are bytes like others; else a string ends in front of the first.
    """
    shape, begins = begins.shape, np.ascontiguousarray(begins).reshape(-1)
    lengths = np.ascontiguousarray(lengths, np.int32).reshape(-1)
    cut_all = function_for(len(begins), "strings", "strings_cut", 1)
    if cut_all is None:
        found = _listed(data, begins, lengths)
        if not is_raw:
            found = [each and each.partition(b"\0")[0] for each in found]
        return strings_of(found, shape)
    room = int(np.maximum(lengths, 0).sum(dtype=np.int64)) + _WORD
    blob, starts = np.empty(room, np.uint8), np.empty(len(begins), np.int64)
    kept = np.empty(len(begins), np.int32)
    row = (
        *(_address(data), len(data), _address(begins), _address(lengths), len(begins), is_raw),
        *(_address(blob), _address(starts), _address(kept)),
    )
    table = np.array(row, _CUT)
    size = cut_all(_address(table))
    return Strings(blob[:size], starts.reshape(shape), kept.reshape(shape))


def strings_of(values: Sequence[bytes | None], shape: tuple[int, ...]) -> Strings:
    """Return objects as a column.

    Args:
        values: row by row.
        shape: of the column.
    """
    kept = np.array([-1 if each is None else len(each) for each in values], np.int32)
    sizes = np.maximum(kept, 0).astype(np.int64)
    blob = np.frombuffer(b"".join(filter(None, values)), np.uint8)
    return Strings(blob, (np.cumsum(sizes) - sizes).reshape(shape), kept.reshape(shape))


def joined(columns: Sequence[Strings]) -> Strings:
    """Return the rows of columns of one width, one after the other."""
    parts = list(map(_compact, columns))
    firsts = np.cumsum([0, *(len(each.blob) for each in parts)])
    return Strings(
        np.concatenate([each.blob for each in parts]),
        np.concatenate([each.starts + first for each, first in zip(parts, firsts, strict=False)]),
        np.concatenate([each.lengths for each in parts]),
    )


def _compact(column: Strings) -> Strings:
    # Some rows of many keep the bytes of all.
    used = int(np.maximum(column.lengths, 0).sum(dtype=np.int64))
    if len(column.blob) <= _MOST_UNUSED * used:
        return column
    return cut(column.blob, column.starts, column.lengths, is_raw=True)


def _listed(
    data: NDArray[np.uint8], begins: Index, lengths: NDArray[np.int32]
) -> list[bytes | None]:
    view = data.data
    pairs = zip(begins.tolist(), lengths.tolist(), strict=True)
    return [None if size < 0 else bytes(view[begin : begin + size]) for begin, size in pairs]


def _address(array: NDArray[Any]) -> int:
    return array.ctypes.data
