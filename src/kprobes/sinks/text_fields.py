"""One field's column as the trace file shows it: a %-format, and the columns that go into it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kprobes.model.batch import Column
from kprobes.model.layout import Field, Storage
from kprobes.sinks.names import Name, Names

Mask = NDArray[np.bool_]
Shown = tuple[bytes, list[list[Any]]]
"""The format, and one column for each of its conversions."""

_FAULT = b"(fault)"
_UNKNOWN = b"?"
_CHARACTERS = [bytes((code,)) for code in range(256)]


def shown(field: Field, values: Column, faulted: Mask | None, names: Names) -> Shown:
    """Return how a field of many events is shown."""
    bad = faulted if faulted is not None and faulted.any() else None
    match field.storage:
        case Storage.TEXT:
            return b'"%b"' % field.text.replace(b"%", b"%%"), []
        case Storage.DURATION:
            return _durations(values, bad)
        case Storage.NUMBER if field.type != "symstr":
            form, columns = _array(field, _number(field, names), _zeroed(values, bad))
            if bad is not None and names.enumerator_of(field) is not None:
                columns = _unnamed(field, columns, bad)
            return form, columns
        case Storage.NUMBER:
            return _strings(field, _symbols(values, bad, names), is_sound=bad is None)
        case _:
            return _strings(field, values, is_sound=bad is None)


def _durations(values: Column, bad: Mask | None) -> Shown:
    if bad is None:
        return b"%d", [values.tolist()]
    took = zip(values.tolist(), bad.tolist(), strict=True)
    return b"%b", [[_UNKNOWN if is_unknown else b"%d" % ns for ns, is_unknown in took]]


def _unnamed(field: Field, columns: list[list[Any]], bad: Mask) -> list[list[Any]]:
    # What could not be read is no enumerator: it stays the number 0.
    zero = b"0x0" if field.type.startswith("x") else b"0"
    faults: list[bool] = bad.tolist()
    return [[zero if f else v for f, v in zip(faults, c, strict=True)] for c in columns]


def _zeroed(values: Column, bad: Mask | None) -> Column:
    if bad is None:
        return values
    mask = bad if values.ndim == 1 else bad[:, None]
    return np.where(mask, values.dtype.type(0), values)


def _number(field: Field, names: Names) -> tuple[bytes, Name | None]:
    match field.type:
        case "char":
            return b"'%b'", _CHARACTERS.__getitem__
        case "symbol":
            return b"%b", names.symbol
        case type_:
            plain = b"0x%x" if type_.startswith("x") else b"%d"
            name = names.enumerator_of(field)
            if name is None:
                return plain, None
            return b"%b", lambda number: name(number) or plain % number


def _array(field: Field, one: tuple[bytes, Name | None], values: Column) -> Shown:
    form, name = one
    if field.count is None:
        return form, [_named(values, name)]
    columns = [_named(values[:, i], name) for i in range(field.count)]
    return b"{%b}" % b",".join([form] * field.count), columns


def _named(values: Column, name: Name | None) -> list[Any]:
    numbers = values.tolist()
    return numbers if name is None else list(map(name, numbers))


def _symbols(values: Column, bad: Mask | None, names: Names) -> Column:
    found = np.empty(values.shape, object)
    found[:] = list(map(names.symbol, values.tolist()))
    if bad is not None:
        found[bad] = None
    return found


def _strings(field: Field, values: Column, *, is_sound: bool) -> Shown:
    columns = [values] if field.count is None else [values[:, i] for i in range(field.count)]
    form, found = b'"%b"', [column.tolist() for column in columns]
    if not is_sound:
        form, found = b"%b", [list(map(_quoted, column)) for column in found]
    whole = form if field.count is None else b"{%b}" % b",".join([form] * field.count)
    return whole, found


def _quoted(value: bytes | None) -> bytes:
    return _FAULT if value is None else b'"%b"' % value
