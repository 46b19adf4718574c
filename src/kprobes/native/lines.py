"""Lines of text made of columns: what a %-format makes of each row.

Of few rows Python makes them, of many our C, lines.c, which has the same conversions: ``%d``,
``%x`` and ``%b`` with a width of blanks or zeros. Others are done by Python, column by column.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.native.library import function, function_for

_CONVERSION = re.compile(
    rb"%(?:%|(?P<zeros>0?)(?P<width>\d*)(?P<letter>[dxb])|[-+ #0]*\d*(?:\.\d+)?[a-zA-Z])"
)
_GIVEN_WIDTH = b"*"
"""A width that is a column of its own."""
_LITERAL, _DECIMAL, _HEX, _TEXT = range(4)
_LONGEST = 24
"""Characters of a number, unless its width is more: -9223372036854775808."""
_PIECE = np.dtype(
    [
        *((name, "u4") for name in ("kind", "size", "is_signed", "width", "is_zeroed", "unused")),
        ("rows", "u8"),
        ("stride", "i8"),
        ("bytes", "u8"),
        ("ends", "u8"),
        ("length", "i8"),
    ]
)
_LINES = np.dtype([("bytes", "u8"), ("ends", "u8"), ("taken", "i8")])


class Texts(Struct, frozen=True, kw_only=True, eq=False):
    """A column of texts that repeat.

    Attributes:
        codes: int32 (n,), of each row its text.
        table: the texts by their codes.
    """

    codes: NDArray[np.int32]
    table: Sequence[bytes]

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.codes)

    def tolist(self) -> list[bytes]:
        """Return the text of each row."""
        return list(map(self.table.__getitem__, self.codes.tolist()))


Cells = NDArray[Any] | Texts | list[Any]
"""One value of each row: integers, texts, or whatever Python's own %-format takes."""


class Packed(Struct, frozen=True, kw_only=True, eq=False):
    """Lines one after the other.

    Attributes:
        blob: uint8, the bytes of all.
        ends: int64 (n,), where each ends.
    """

    blob: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.ends)

    def tolist(self) -> list[bytes]:
        """Return each as an object of its own."""
        blob, ends = self.blob.tobytes(), self.ends.tolist()
        return [blob[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


Lines = Packed | list[bytes]


def as_list(lines: Lines) -> list[bytes]:
    """Return each line as an object of its own."""
    return lines if isinstance(lines, list) else lines.tolist()


def listed(form: bytes, columns: Sequence[Cells], rows: int) -> list[bytes]:
    """Return what a %-format makes of each row, as objects of their own.

    Args:
        form: of a line.
        columns: one for each of its conversions, shape (n,).
        rows: how many there are.
    """
    plain = [each if isinstance(each, list) else each.tolist() for each in columns]
    return list(map(form.__mod__, zip(*plain, strict=True) if plain else [()] * rows))


def formatted(form: bytes, columns: Sequence[Cells], rows: int) -> Lines:
    """Return what a %-format makes of each row: as ``listed``, or by C where there are many.

    Args:
        form: of a line.
        columns: one for each of its conversions, shape (n,); arrays are only read.
        rows: how many there are.
    """
    if _GIVEN_WIDTH in form:
        return listed(form, columns, rows)
    format_all = function_for(rows, "lines", "lines_format", 5)
    if format_all is None:
        return listed(form, columns, rows)
    if any(len(each) != rows for each in columns):
        raise ValueError(f"columns that have not {rows} rows")
    pieces = list(_pieces(form, columns))
    table = np.array([each.row for each in pieces], _PIECE)
    room = sum(each.room if each.is_all else each.room * rows for each in pieces)
    data, ends = np.empty(room, np.uint8), np.empty(rows, np.int64)
    size = format_all(table.ctypes.data, len(table), rows, data.ctypes.data, ends.ctypes.data)
    return Packed(blob=data[:size], ends=ends)


def in_order(lines: Sequence[Lines], which: NDArray[np.uint16]) -> Iterable[bytes | memoryview]:
    """Return the bytes of all lines in an order, in one or more pieces.

    Args:
        lines: of several batches.
        which: shape (n,), of each line in that order whose next one it is.
    """
    packed = [each for each in lines if isinstance(each, Packed)]
    if len(packed) < len(lines):
        rests = [iter(as_list(each)) for each in lines]
        return map(next, map(rests.__getitem__, which.tolist()))
    if len(packed) == 1:
        return [packed[0].blob.data]
    table = np.array([(e.blob.ctypes.data, e.ends.ctypes.data, 0) for e in packed], _LINES)
    data = np.empty(sum(len(each.blob) for each in packed), np.uint8)
    order_all = function("lines", "lines_order", 4)
    order_all(table.ctypes.data, which.ctypes.data, len(which), data.ctypes.data)
    return [data.data]


class _Piece(NamedTuple):
    # A row of _PIECE; the bytes that it takes, of all lines or of each; what must be kept for it.
    row: tuple[int, ...]
    room: int
    is_all: bool
    kept: object


def _pieces(form: bytes, columns: Sequence[Cells]) -> Iterator[_Piece]:
    conversions = _conversions(form)
    given = zip((e for e in conversions if not isinstance(e, bytes)), columns, strict=True)
    for each in conversions:
        if isinstance(each, bytes):
            own = np.frombuffer(each, np.uint8)
            row = (_LITERAL, 0, 0, 0, 0, 0, 0, 0, own.ctypes.data, 0, len(own))
            yield _Piece(row, len(own), is_all=False, kept=own)
        else:
            yield _converted(*next(given))
    for _ in given:
        raise ValueError("more columns than conversions")


def _converted(conversion: "_Conversion", column: Cells) -> _Piece:
    is_number = conversion.kind in (_DECIMAL, _HEX)
    if is_number and isinstance(column, np.ndarray) and column.dtype.kind in "iub":
        return _number(conversion, column)
    if conversion.kind == _TEXT and not conversion.width:
        return _text(column if isinstance(column, Texts) else _tolist(column))
    return _text(list(map(conversion.form.__mod__, _tolist(column))))


def _number(conversion: "_Conversion", column: NDArray[Any]) -> _Piece:
    row = (
        *(conversion.kind, column.dtype.itemsize, column.dtype.kind == "i"),
        *(conversion.width, conversion.is_zeroed, 0),
        *(column.ctypes.data, column.strides[0], 0, 0, 0),
    )
    return _Piece(row, max(conversion.width, _LONGEST), is_all=False, kept=column)


def _text(column: Texts | list[bytes]) -> _Piece:
    table = column.table if isinstance(column, Texts) else column
    lengths = list(map(len, table))
    own = np.frombuffer(b"".join(table), np.uint8)
    ends = np.fromiter(accumulate(lengths), np.int64, len(lengths))
    places, room = (0, 0), len(own)
    if isinstance(column, Texts):
        places = column.codes.ctypes.data, column.codes.strides[0]
        room = max(lengths, default=0)
    row = (_TEXT, 0, 0, 0, 0, 0, *places, own.ctypes.data, ends.ctypes.data, 0)
    return _Piece(row, room, is_all=column is table, kept=(column, own, ends))


def _tolist(column: Cells) -> list[Any]:
    return column if isinstance(column, list) else column.tolist()


class _Conversion(NamedTuple):
    # What a conversion is; _LITERAL for one that only Python knows.
    kind: int
    width: int
    is_zeroed: bool
    form: bytes


@lru_cache(256)
def _conversions(form: bytes) -> tuple[bytes | _Conversion, ...]:
    found: list[bytes | _Conversion] = []
    at, literal = 0, b""
    for each in _CONVERSION.finditer(form):
        literal += form[at : each.start()]
        at = each.end()
        if each[0] == b"%%":
            literal += b"%"
            continue
        found += [literal] if literal else []
        literal = b""
        kind = {b"d": _DECIMAL, b"x": _HEX, b"b": _TEXT}.get(each["letter"] or b"", _LITERAL)
        width = int(each["width"] or b"0")
        found.append(_Conversion(kind, width, bool(each["zeros"]), each[0]))
    literal += form[at:]
    return (*found, literal) if literal else tuple(found)
