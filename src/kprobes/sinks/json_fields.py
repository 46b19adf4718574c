"""One field's column as JSON: a %-format, and the columns that go into it."""

from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kprobes.model.batch import Column
from kprobes.model.layout import Field, Storage
from kprobes.sinks.names import Name, Names

Mask = NDArray[np.bool_]
Shown = tuple[bytes, list[list[Any]]]
"""The format, and one column for each of its conversions."""

_NULL = b"null"


def quoted(value: bytes) -> bytes:
    """Return bytes as a JSON string; see the sink for those that are no UTF-8."""
    return encode_basestring_ascii(value.decode("utf-8", "surrogateescape")).encode("ascii")


def shown(field: Field, values: Column, faulted: Mask | None, names: Names) -> Shown:
    """Return how a field of many events is shown."""
    if field.storage is Storage.TEXT:
        return quoted(field.text).replace(b"%", b"%%"), []
    if field.storage not in (Storage.NUMBER, Storage.DURATION):
        return _strings(field, values)
    bad = faulted if faulted is not None and faulted.any() else None
    form, columns = _array(field, _named(field, names), values)
    if bad is None:
        return form, columns
    rows = zip(*columns, strict=True)
    whole = [_NULL if fault else form % row for fault, row in zip(bad.tolist(), rows, strict=True)]
    return b"%b", [whole]


def _named(field: Field, names: Names) -> Name | None:
    match field.type:
        case "char":
            return lambda code: quoted(bytes((code,)))
        case "symbol" | "symstr":
            return lambda addr: quoted(names.symbol(addr))
        case _:
            name = names.enumerator_of(field)
            return None if name is None else lambda number: _enum(name(number), number)


def _enum(name: bytes | None, number: int) -> bytes:
    return b"%d" % number if name is None else quoted(name)


def _array(field: Field, name: Name | None, values: Column) -> Shown:
    form = b"%d" if name is None else b"%b"
    if field.count is None:
        return form, [_column(values, name)]
    columns = [_column(values[:, i], name) for i in range(field.count)]
    return b"[%b]" % b",".join([form] * field.count), columns


def _column(values: Column, name: Name | None) -> list[Any]:
    numbers = values.tolist()
    return numbers if name is None else list(map(name, numbers))


def _strings(field: Field, values: Column) -> Shown:
    columns = [values] if field.count is None else [values[:, i] for i in range(field.count)]
    found = [[_NULL if v is None else quoted(v) for v in column.tolist()] for column in columns]
    whole = b"%b" if field.count is None else b"[%b]" % b",".join([b"%b"] * field.count)
    return whole, found
