"""Events as JSON, one object per line.

    {"event": "open", "group": "kprobes", "ts_ns": 4435259123, "cpu": 1, "pid": 89,
     "comm": "sh", "flags": ".....", "function": "do_sys_openat2",
     "ip": "0xffffffff81301230", "args": {"dfd": -100, "path": "/etc/passwd", "bad": null}}

without the blanks. An event of a return probe also has, after ``flags``, where the call came
from, with the symbol that the address lies in and as a number:

     "caller": "ksys_read+0x6a/0xa0", "caller_ip": "0xffffffff8130125a",

A clock that counts no nanoseconds gives ``ts`` in place of ``ts_ns``. The first line is a header:

    {"event": "header", "group": "kprobes", "version": "1.0", "release": "6.1.0-56-cloud-amd64",
     "arch": "x86_64", "cpus": 2, "time": "ts_ns", "numbers": "string", "args": {}}

For readers: docs/reference/formats/json.md, and events.schema.json, which ``kprobe --json-schema``
prints. A field's column is shown by a %-format and the columns that go into it; text may have any
bytes.
"""

import json
import re
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from kprobes.model.events import Batch, Column, Events
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.model.strings import Strings
from kprobes.native.lines import Cells, Lines, formatted, listed
from kprobes.sinks.contexts import ContextInfo, ContextTexts
from kprobes.sinks.names import (
    NEWEST,
    Name,
    Names,
    Shown,
    TraceSource,
    flags,
    shown_strings,
    shown_texts,
    write_in_order,
)

VERSION = "1.0"
"""Of the lines, as the header has it: "major.minor", what may change is in json.md."""

Mask = NDArray[np.bool_]
_NULL = b"null"
_WIDE = 8
_PLAIN = bytes(code for code in range(0x20, 0x7F) if code not in b'"\\')
"""What stands in a JSON string as it is."""
_LIKE_AN_ESCAPE = re.compile(rb"\\(?=x[0-9a-f]{2})")


def valid_text(value: bytes) -> str:
    r"""Return bytes as valid Unicode, losslessly.

    A byte that is not UTF-8 becomes ``\xNN``, and so does a backslash that would look like the
    start of one: replacing every ``\xNN`` by its byte gives back what was there.
    """
    if b"\\" in value:
        value = _LIKE_AN_ESCAPE.sub(rb"\\x5c", value)
    return value.decode("utf-8", "backslashreplace")


def quoted(value: bytes) -> bytes:
    """Return bytes as a JSON string of ``valid_text``."""
    if not value.translate(None, _PLAIN):
        return b'"%b"' % value
    return encode_basestring_ascii(valid_text(value)).encode("ascii")


def dumps(value: object) -> str:
    """Return a value as JSON on one line; texts, decoded by surrogateescape, by ``valid_text``."""
    return json.dumps(_valid(value))


def header_line(source: TraceSource) -> bytes:
    """Return the line in front of all events."""
    members: dict[str, object] = {
        "event": "header",
        "group": "kprobes",
        "version": VERSION,
        "release": source.release,
        "arch": source.arch,
        "cpus": source.cpus,
        "time": _time(source),
        "numbers": "number" if source.has_wide_numbers else "string",
        "args": {},
    }
    return f"{json.dumps(_valid(members), separators=(',', ':'))}\n".encode()


def reboot_mark(release: str) -> bytes:
    """Return the line in front of the events of a guest's next boot."""
    name = quoted(release.encode(errors="surrogateescape"))
    return b'{"event":"reboot","group":"kprobes","args":{"release":%b}}\n' % name


def _time(source: TraceSource) -> str:
    return "ts_ns" if source.has_ns else "ts"


def _valid(value: object) -> object:
    match value:
        case str():
            return valid_text(value.encode("utf-8", "surrogateescape"))
        case dict():
            items = cast("dict[str, object]", value).items()
            return {_valid(key): _valid(member) for key, member in items}
        case list() | tuple():
            return [_valid(member) for member in cast("list[object]", value)]
        case _:
            return value


def shown(field: Field, values: Column | Strings, faulted: Mask | None, names: Names) -> Shown:
    """Return how a field of many events is shown; arrays are only read.

    Args:
        field: from the layout.
        values: its column, shape (n,), or (n, elements) for an array.
        faulted: shape (n,), where its memory could not be read; None where nothing may fault.
        names: of the kernel's symbols and enumerators.
    """
    if field.storage is Storage.TEXT:
        return quoted(field.text).replace(b"%", b"%%"), []
    if field.storage is Storage.STACK:
        return b"%b", [shown_texts(values, partial(_stack, names))]
    if isinstance(values, Strings) or field.storage is Storage.COMM:
        return shown_strings(field, values, _text, b"[%b]")
    bad = faulted if faulted is not None and faulted.any() else None
    name = _named(field, names)
    form = _number_form(field, names) if name is None else b"%b"
    form, columns = _array(field, form, name, values)
    if bad is None:
        return form, columns
    texts = zip(bad.tolist(), listed(form, columns, len(bad)), strict=True)
    return b"%b", [[_NULL if is_bad else text for is_bad, text in texts]]


def _stack(names: Names, stack: bytes | None) -> bytes:
    return b"[%b]" % b",".join(map(quoted, names.stack(stack or b"")))


def _named(field: Field, names: Names) -> Name | None:
    match field.type:
        case "char":
            return lambda code: quoted(bytes((code,)))
        case "symbol" | "symstr":
            return lambda addr: quoted(names.symbol(addr))
        case _:
            name = names.enumerator_of(field)
            form = _number_form(field, names)
            return None if name is None else lambda number: _enum(name(number), form % number)


def _enum(name: bytes | None, number: bytes) -> bytes:
    return number if name is None else quoted(name)


def _number_form(field: Field, names: Names) -> bytes:
    # By the type, never by the value: a column has one type in all lines.
    if field.size < _WIDE or names.has_wide_numbers:
        return b"%d"
    return b'"0x%x"' if field.type == "x64" else b'"%d"'


def _array(field: Field, form: bytes, name: Name | None, values: Column) -> Shown:
    if field.count is None:
        return form, [_column(values, name)]
    columns = [_column(values[:, i], name) for i in range(field.count)]
    return b"[%b]" % b",".join([form] * field.count), columns


def _column(values: Column, name: Name | None) -> Cells:
    return values if name is None else list(map(name, values.tolist()))


def _text(value: bytes | None) -> bytes:
    return _NULL if value is None else quoted(value)


_REMEMBERED = 1 << 14


class NdjsonSink:
    """Writes a header and one JSON object per event. Does not close the output."""

    def __init__(self, out: BinaryIO, source: TraceSource) -> None:
        """Write nothing yet: the header comes with the first ``write``, even of no events."""
        self._out = out
        self._names = Names(source)
        self._time = _time(source)
        self._contexts = ContextTexts(_context)
        self._known: dict[int, bytes] = {}
        self._header = b"" if source.is_rebooted else header_line(source)

    def write(self, events: Events) -> None:
        """Write and flush one line per event."""
        self._begin()
        write_in_order(self._out, events, self.lines)
        self._out.flush()

    def close(self) -> None:
        """Write the header if nothing was written, and what is buffered."""
        self._begin()
        self._out.flush()

    def _begin(self) -> None:
        line, self._header = self._header, b""
        if line:
            self._out.write(line)

    def lines(self, batch: Batch) -> Lines:
        """Return one line per event."""
        columns: list[Cells] = [batch.ts, self._contexts.of(batch)]
        if batch.caller is not None:
            columns += [self._places(batch.caller.tolist()), batch.caller]
        specs: list[bytes] = []
        fields = zip(batch.layout.fields, batch.columns, batch.faulted, strict=True)
        for field, values, faulted in fields:
            spec, found = shown(field, values, faulted, self._names)
            specs.append(_literal(dumps(field.name)) + b":" + spec)
            columns += found
        form = _form(batch.layout, b",".join(specs), self._time)
        return formatted(form, columns, len(batch))

    def _places(self, addrs: list[int]) -> list[bytes]:
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        for addr in {*addrs} - self._known.keys():
            self._known[addr] = quoted(self._names.symbol(addr))
        return list(map(self._known.__getitem__, addrs))


def _context(info: ContextInfo) -> bytes:
    # The members that repeat.
    shown, comm = flags(info.context, NEWEST).encode(), quoted(info.comm)
    return b'"cpu":%d,"pid":%d,"comm":%b,"flags":"%b"' % (info.cpu, info.pid, comm, shown)


def _form(layout: RecordLayout, args: bytes, time: str) -> bytes:
    begin = f'{{"event":{dumps(layout.event)},"group":{dumps(layout.group)},"{time}":'
    middle = f',"function":{dumps(layout.function)},"ip":"{layout.ip:#x}","args":{{'
    caller = b"" if layout.caller_offset is None else b',"caller":%b,"caller_ip":"0x%x"'
    return _literal(begin) + b"%d,%b" + caller + _literal(middle) + args + b"}}\n"


def _literal(text: str) -> bytes:
    return text.replace("%", "%%").encode()
