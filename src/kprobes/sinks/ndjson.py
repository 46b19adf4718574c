"""Events as JSON, one object per line.

    {"event": "open", "group": "kprobes", "ts_ns": 4435259123, "cpu": 1, "pid": 89,
     "comm": "sh", "flags": ".....", "function": "do_sys_openat2",
     "ip": "0xffffffff81301230", "args": {"dfd": -100, "path": "/etc/passwd", "bad": null}}

without the blanks. An event of a return probe also has, behind ``flags``, where the call came
from, with the symbol that the address lies in and as a number:

     "caller": "ksys_read+0x6a/0xa0", "caller_ip": "0xffffffff8130125a",

A clock that counts no nanoseconds gives ``ts`` in place of ``ts_ns``. docs/formats/json.md is for
those who read it.
"""

from typing import Any, BinaryIO

from kprobes.model.batch import Batch, Events
from kprobes.model.layout import RecordLayout
from kprobes.sinks.flags import NEWEST, flags
from kprobes.sinks.json_fields import dumps, quoted, shown
from kprobes.sinks.lines import in_order
from kprobes.sinks.names import Names
from kprobes.sinks.origin import Origin

_REMEMBERED = 1 << 14

_Task = tuple[int, int, bytes, int]  # cpu, pid, comm, context


class NdjsonSink:
    """Writes one JSON object per event. Does not close the output."""

    def __init__(self, out: BinaryIO, origin: Origin) -> None:
        """Write to ``out``; JSON is the same for every kernel's release."""
        self._out = out
        self._names = Names(origin)
        self._time = "ts_ns" if origin.has_ns else "ts"
        self._tasks = _Tasks()

    def write(self, events: Events) -> None:
        """Write and flush one line per event."""
        for lines in in_order(events, self._lines):
            self._out.writelines(lines)
        self._out.flush()

    def close(self) -> None:
        """Write what is buffered."""
        self._out.flush()

    def _lines(self, batch: Batch) -> list[bytes]:
        columns: list[list[Any]] = [batch.ts.tolist(), self._heads(batch)]
        if batch.caller is not None:
            callers = batch.caller.tolist()
            columns += [[quoted(self._names.symbol(caller)) for caller in callers], callers]
        specs: list[bytes] = []
        fields = zip(batch.layout.fields, batch.values, batch.faulted, strict=True)
        for field, values, faulted in fields:
            spec, found = shown(field, values, faulted, self._names)
            specs.append(_literal(dumps(field.name)) + b":" + spec)
            columns += found
        form = _form(batch.layout, b",".join(specs), self._time)
        return list(map(form.__mod__, zip(*columns, strict=True)))

    def _heads(self, batch: Batch) -> list[bytes]:
        if len(self._tasks) > _REMEMBERED:
            self._tasks.clear()
        columns = (batch.cpu, batch.pid, batch.comm, batch.context)
        keys = zip(*(column.tolist() for column in columns), strict=True)
        return list(map(self._tasks.__getitem__, keys))


class _Tasks(dict[_Task, bytes]):
    # The members that repeat.
    def __missing__(self, task: _Task) -> bytes:
        cpu, pid, comm, context = task
        text = self[task] = b'"cpu":%d,"pid":%d,"comm":%b,"flags":"%b"' % (
            cpu,
            pid,
            quoted(comm),
            flags(context, NEWEST).encode(),
        )
        return text


def _form(layout: RecordLayout, args: bytes, time: str) -> bytes:
    begin = f'{{"event":{dumps(layout.event)},"group":{dumps(layout.group)},"{time}":'
    middle = f',"function":{dumps(layout.function)},"ip":"{layout.ip:#x}","args":{{'
    caller = b"" if layout.caller_offset is None else b',"caller":%b,"caller_ip":"0x%x"'
    return _literal(begin) + b"%d,%b" + caller + _literal(middle) + args + b"}}\n"


def _literal(text: str) -> bytes:
    return text.replace("%", "%%").encode()
