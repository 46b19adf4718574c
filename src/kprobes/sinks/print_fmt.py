"""Events of tracepoints as the kernel's ``trace`` file prints them: by their ``print fmt``.

What conversions print, the kernel's lib/vsprintf.c tells. Where a ``print fmt`` is not known, the
event is shown as the kernel does with its trace option ``fields``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct

from kprobes.errors import FormatError
from kprobes.formats.print_c import HelperCall, PrintExpression, UnknownPrint
from kprobes.formats.print_fmt import LINE_MAX, Conversion, parse_print
from kprobes.model.events import Batch, Column
from kprobes.model.resolved import RecordLayout
from kprobes.native.lines import Cells
from kprobes.sinks.names import Names, Shown
from kprobes.sinks.print_binary import binary_text
from kprobes.sinks.print_numbers import Compute, Dtype, Numbers
from kprobes.sinks.print_options import fields_text
from kprobes.sinks.print_pointers import ShowSome, address_shown, bytes_shown, some_shown
from kprobes.sinks.print_values import (
    CStrings,
    HashedAddresses,
    PrintValue,
    RecordBytes,
    Values,
    bytes_of,
    c_string,
    number_of,
)
from kprobes.units import U64

_STAR_MAX = 1 << 8
"""The widest that a record can make a conversion."""
_NULL = b"(null)"
_SIGNED = "di"
_LETTERS = {"i": "d", "u": "d"}


class _Rows(Struct, frozen=True, kw_only=True, eq=False):
    # What conversions are made of.
    columns: tuple[Column, ...]
    count: int
    names: Names

    def of(self, compute: Compute) -> Column:
        """Return a column of all rows."""
        return np.broadcast_to(compute(self.columns), (self.count,))


class _Piece(Struct, frozen=True, kw_only=True):
    # The %-format of a conversion, and its columns.
    form: bytes
    lists: tuple[Callable[[_Rows], Cells], ...]


class PrintedEvent:
    """How events of one layout are printed.

    Attributes:
        unknown: what of the print fmt is not known, or "".
    """

    unknown: str

    def __init__(self, layout: RecordLayout) -> None:
        self._form = b""
        self._lists: list[Callable[[_Rows], Cells]] = []
        try:
            self._add(layout)
        except FormatError as e:
            self.unknown = str(e)
        else:
            self.unknown = ""

    def shown(self, batch: Batch, names: Names) -> Shown:
        """Return what is printed after the event's name, without the end of the line.

        Args:
            batch: of the layout.
            names: of the kernel's symbols.
        """
        if self.unknown:
            return fields_text(batch, names)
        rows = _Rows(columns=batch.values, count=len(batch), names=names)
        found: list[Cells] = []
        room = LINE_MAX * len(batch)
        for each in self._lists:
            column = each(rows)
            found.append(column)
            if isinstance(column, list) and column and isinstance(column[0], bytes):
                room -= sum(map(len, column))
                if room < 0:
                    # The kernel prints no line as long as this.
                    return fields_text(batch, names)
        return self._form, found

    def _add(self, layout: RecordLayout) -> None:
        values = Values(layout.fields)
        for piece in parse_print(layout.print_fmt).pieces:
            if isinstance(piece, bytes):
                self._form += _plain(piece)
            else:
                made = _piece(piece, values)
                self._form += made.form
                self._lists += made.lists


def _plain(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


def _piece(conversion: Conversion, values: Values) -> _Piece:
    match conversion.value:
        case HelperCall(name="bstr_printf", arguments=(form, data)):
            return _binary(values.of(form), values.of(data))
        case _:
            value = values.of(conversion.value)
    if conversion.letter == "p":
        return _pointer(conversion, value, values)
    if conversion.letter == "s":
        return _padded(conversion, values, _string(value))
    number = number_of(value, f"the conversion {conversion.text}")
    if conversion.letter == "c":
        return _padded(conversion, values, _numbers(number, np.dtype(np.uint8)), letter="c")
    if conversion.letter == "o" and "#" in conversion.flags:
        raise UnknownPrint(f"the conversion {conversion.text}")
    is_signed = conversion.letter in _SIGNED
    dtype = np.dtype(f"<{'i' if is_signed else 'u'}{conversion.bits // 8}")
    letter = _LETTERS.get(conversion.letter, conversion.letter)
    flags = conversion.flags if is_signed else conversion.flags.replace("+", "").replace(" ", "")
    return _padded(conversion, values, _numbers(number, dtype), letter=letter, flags=flags)


def _binary(form: PrintValue, data: PrintValue) -> _Piece:
    addresses, packed = number_of(form, "a format"), bytes_of(data, "values")

    def texts(rows: _Rows) -> list[bytes]:
        pairs = zip(rows.of(addresses.column).tolist(), rows.of(packed).tolist(), strict=True)
        return [_binary_text(addr & U64, values, rows.names) for addr, values in pairs]

    return _Piece(form=b"%b", lists=(texts,))


def _binary_text(addr: int, values: bytes, names: Names) -> bytes:
    form = names.known_text(addr)
    if form is None:
        return b"%#x %b" % (addr, values.hex(" ", 4).encode())
    return binary_text(form, values, names)


def _padded(
    conversion: Conversion,
    values: Values,
    column: Callable[[_Rows], Cells],
    *,
    letter: str = "b",
    flags: str | None = None,
) -> _Piece:
    # With its width and precision, which come before it.
    lists: list[Callable[[_Rows], Cells]] = []
    form = "%" + (conversion.flags.replace("0", "").replace("#", "") if flags is None else flags)
    form += _limit(conversion.width, values, lists, most=_STAR_MAX)
    if conversion.precision is not None and letter != "c":
        most = LINE_MAX if letter == "b" else _STAR_MAX
        form += "." + _limit(conversion.precision, values, lists, most=most)
    return _Piece(form=(form + letter).encode(), lists=(*lists, column))


def _limit(
    given: int | PrintExpression | None,
    values: Values,
    lists: list[Callable[[_Rows], Cells]],
    *,
    most: int,
) -> str:
    if given is None:
        return ""
    if isinstance(given, int):
        return str(given)
    number = number_of(values.of(given), "a width")

    def column(rows: _Rows) -> Cells:
        return np.clip(rows.of(number.column).astype(np.int32), -most, most)

    lists.append(column)
    return "*"


def _numbers(number: Numbers, dtype: Dtype) -> Callable[[_Rows], Column]:
    return lambda rows: rows.of(number.column).astype(dtype, copy=False)


def _string(value: PrintValue) -> Callable[[_Rows], Cells]:
    match value:
        case CStrings(column=column):
            return lambda rows: _without_null(rows.of(column).tolist())
        case RecordBytes(column=column):
            return lambda rows: list(map(c_string, rows.of(column).tolist()))
        case Numbers(column=column):
            return lambda rows: [
                rows.names.text_at(addr & U64) if addr else _NULL
                for addr in rows.of(column).tolist()
            ]
        case HashedAddresses():
            raise UnknownPrint("a string of the kernel's memory")


def _without_null(texts: list[bytes | None]) -> list[Any]:
    return [_NULL if text is None else text for text in texts] if None in texts else texts


def _pointer(conversion: Conversion, value: PrintValue, values: Values) -> _Piece:
    suffix = conversion.suffix
    some = some_shown(suffix)
    if some is not None:
        return _some(conversion, value, values, some)
    show = bytes_shown(suffix)
    if show is not None:
        data = bytes_of(value, f"the conversion {conversion.text}")
        return _padded(conversion, values, lambda rows: list(map(show, rows.of(data).tolist())))
    named = address_shown(suffix)
    if isinstance(value, HashedAddresses):
        if named is not None:
            raise UnknownPrint("an address that no record has")
        column = value.column
        return _padded(conversion, values, lambda rows: rows.of(column).tolist())
    number = _numbers(number_of(value, f"the conversion {conversion.text}"), np.dtype(np.uint64))
    if named is not None:
        return _padded(
            conversion,
            values,
            lambda rows: list(map(partial(named, rows.names), number(rows).tolist())),
        )
    # pointer_string(): as many digits as an address has, where no width is given.
    flags = conversion.flags.replace("+", "").replace(" ", "")
    if conversion.width is None:
        width = "#018" if "#" in flags else "016"
        return _Piece(form=f"%{width}x".encode(), lists=(number,))
    return _padded(conversion, values, number, letter="x", flags=flags)


def _some(conversion: Conversion, value: PrintValue, values: Values, show: ShowSome) -> _Piece:
    # The width is how much is printed: of bytes 1 where none is given.
    width = 1 if conversion.width is None else conversion.width
    data = bytes_of(value, f"the conversion {conversion.text}")
    if isinstance(width, int):
        count = width
        return _Piece(
            form=b"%b",
            lists=(lambda rows: [show(each, count) for each in rows.of(data).tolist()],),
        )
    number = number_of(values.of(width), "a width")

    def column(rows: _Rows) -> list[Any]:
        counts = rows.of(number.column).astype(np.int32).tolist()
        return list(map(show, rows.of(data).tolist(), counts))

    return _Piece(form=b"%b", lists=(column,))
