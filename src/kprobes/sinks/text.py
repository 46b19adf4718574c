"""Events as the kernel's ``trace`` file prints them, byte for byte.

The lines above them are those of its ``nop`` tracer. A line is made by one %-format per layout;
comm, pid, cpu and context, which repeat, are formatted once each and remembered. A field's column
is a %-format and the columns that go into it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kprobes.model.definition import STACKTRACE
from kprobes.model.events import SYSCALLS, TRACERS, Batch, Column, Events
from kprobes.model.resolved import MIGRATE_SINCE, Field, Storage
from kprobes.model.visible import visible, visible_line
from kprobes.sinks.names import BH_SINCE, Name, Names, Shown, TraceSource, flags, in_order

if TYPE_CHECKING:
    from kprobes.sinks.print_fmt import PrintedEvent

_TITLE = """\
# tracer: nop
#
"""
_FOUR = """\
#                                _-----=> irqs-off
#                               / _----=> need-resched
#                              | / _---=> hardirq/softirq
#                              || / _--=> preempt-depth
#                              ||| /     delay
#           TASK-PID     CPU#  ||||   TIMESTAMP  FUNCTION
#              | |         |   ||||      |         |
"""
_FIVE = """\
#                                _-----=> irqs-off/BH-disabled
#                               / _----=> need-resched
#                              | / _---=> hardirq/softirq
#                              || / _--=> preempt-depth
#                              ||| / _-=> migrate-disable
#                              |||| /     delay
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
#              | |         |   |||||     |         |
"""


def before_counts() -> bytes:
    """Return what stands before the line of counts."""
    return _TITLE.encode()


def counts(entries: int, cpus: int) -> bytes:
    """Return the line of counts for a buffer that holds all that was written to it."""
    return b"# entries-in-buffer/entries-written: %d/%d   #P:%d\n" % (entries, entries, cpus)


def after_counts(source: TraceSource) -> bytes:
    """Return what stands between the line of counts and the events."""
    if source.version < MIGRATE_SINCE:
        columns = _FOUR
    elif source.version < BH_SINCE:
        columns = _FIVE.replace("/BH-disabled", "")
    else:
        columns = _FIVE
    return f"#\n{columns}".encode()


Mask = NDArray[np.bool_]

_FAULT = b"(fault)"
_UNKNOWN = b"?"
_CHARACTERS = [bytes((code,)) for code in range(256)]


def reboot_mark(release: str) -> bytes:
    """Return the line in front of the events of a guest's next boot: a comment."""
    return f"# the guest was rebooted: Linux {visible(release)}\n".encode()


def shown(field: Field, values: Column, faulted: Mask | None, names: Names) -> Shown:
    """Return how a field of many events is shown; arrays are only read.

    Args:
        field: from the layout.
        values: its column, shape (n,), or (n, elements) for an array.
        faulted: shape (n,), where its memory could not be read; None where nothing may fault.
        names: of the kernel's symbols and enumerators.
    """
    bad = faulted if faulted is not None and faulted.any() else None
    match field.storage:
        case Storage.TEXT:
            return b'"%b"' % field.text.replace(b"%", b"%%"), []
        case Storage.DURATION:
            return _durations(values, bad)
        case Storage.STACK:
            return b"%b", [list(map(names.stack_text, values.tolist()))]
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
    # What could not be read is not an enumerator: it stays the number 0.
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


_BLOCK = 1 << 20
_REMEMBERED = 1 << 14
_NS_PER_US = np.uint64(1000)
_US_PER_S = np.uint64(1_000_000)

_TASK = np.dtype([("comm", "S16"), ("pid", "<i4"), ("cpu", "<u4"), ("context", "<u8")])
_KEY = f"V{_TASK.itemsize}"
_RUN = 4
"""Events of one task in a row, on average, from which on they are taken together."""


class TaskTexts(dict[bytes, bytes]):
    """What is shown of a task, its CPU and its context, by their bytes; remembered, as it repeats.

    A key of bytes is made and found in half of the time of a tuple.
    """

    def __init__(self, show: Callable[[bytes, int, int, int], bytes]) -> None:
        """Have comm, pid, cpu and context be shown by a function."""
        super().__init__()
        self._show = show

    def __missing__(self, key: bytes) -> bytes:
        """Return what is shown for the first time."""
        text = self[key] = self._show(*np.frombuffer(key, _TASK).tolist()[0])
        return text

    def of(self, batch: Batch) -> list[bytes]:
        """Return what is shown of each event."""
        if len(self) > _REMEMBERED:
            self.clear()
        keys = np.empty(len(batch), _TASK)
        keys["comm"], keys["pid"] = batch.comm, batch.pid
        keys["cpu"], keys["context"] = batch.cpu, batch.context
        words = keys.view(np.uint64).reshape(len(keys), -1)
        # Events of a task follow each other: then one look-up is for all of them.
        begins = np.flatnonzero((words[1:] != words[:-1]).any(axis=1)) + 1
        if len(begins) > len(keys) // _RUN:
            return list(map(self.__getitem__, keys.view(_KEY).tolist()))
        begins = np.concatenate([[0], begins])[: len(keys)]
        found = np.empty(len(begins), object)
        found[:] = list(map(self.__getitem__, keys[begins].view(_KEY).tolist()))
        return found.repeat(np.diff(begins, append=len(keys))).tolist()


_ENTRY = b"%b%b<stack trace>\n%b"
_NamesOf = Callable[[bytes], Iterable[bytes]]


class _StackTexts(dict[bytes, bytes]):
    # What is shown of a stack; remembered, as it repeats.
    def __init__(self, show: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._show = show

    def __missing__(self, stack: bytes) -> bytes:
        if len(self) > _REMEMBERED:
            self.clear()
        text = self[stack] = self._show(stack)
        return text


def _field(frames: _NamesOf, stack: bytes) -> bytes:
    # print_synth_event() in kernel/trace/trace_events_synth.c.
    return b"".join(b"=> %b\n" % frame for frame in frames(stack))


def _entry(frames: _NamesOf, stack: bytes) -> bytes:
    # trace_stack_print() in kernel/trace/trace_output.c: functions, without offsets and modules.
    return b"".join(b" => %b\n" % frame.partition(b"+")[0] for frame in frames(stack))


class TextSink:
    """Writes the trace file of a kernel. Does not close the output.

    On a terminal control characters are escapes. The header counts the events. While they are still
    coming it says 0/0, as a kernel's empty buffer does; at the end the counts are put in if the
    output can be read and sought.
    """

    def __init__(self, out: BinaryIO, source: TraceSource) -> None:
        """Write nothing yet: the header comes with the first ``write``, even of no events.

        Args:
            out: a binary stream, not one that is opened for appending.
            source: the traced kernel.
        """
        self._out = out
        self._source = source
        self._tasks = TaskTexts(partial(_head, source.version))
        self._names = Names(source)
        self._stacks = [_StackTexts(partial(show, self._frames)) for show in (_field, _entry)]
        self._print_fmts: dict[int, PrintedEvent] = {}
        self._written: int | None = None
        self._counts_at: int | None = None
        # There a guest's text could change what else is shown, and look like another event.
        self._is_terminal = out.isatty()

    def write(self, events: Events) -> None:
        """Write and flush one line per event."""
        written = self._begin()
        for lines in in_order(events, self.lines):
            self._out.writelines(lines)
        self._written = written + len(events)
        self._out.flush()

    def close(self) -> None:
        """Write the header if nothing was written, and its counts where that is possible."""
        written = self._begin()
        if self._counts_at is not None and written:
            self._out.flush()
            old, new = counts(0, self._source.cpus), counts(written, self._source.cpus)
            _grow(self._out, self._counts_at, len(old), new)
            self._counts_at = None
        self._out.flush()

    def _begin(self) -> int:
        if self._written is None:
            self._written = 0
            self._out.write(before_counts())
            if self._source.entries is None and self._out.seekable() and self._out.readable():
                self._counts_at = self._out.tell()
            self._out.write(counts(self._source.entries or 0, self._source.cpus))
            self._out.write(after_counts(self._source))
        return self._written

    def lines(self, batch: Batch) -> list[bytes]:
        """Return one line per event."""
        layout = batch.layout
        times = microseconds(batch.ts) if self._source.has_ns else (batch.ts.tolist(),)
        form = b"%b%5d.%06d: " if self._source.has_ns else b"%b%12d: "
        spec, found = self._of_probe(batch) if not layout.print_fmt else self._printed(batch)
        columns: list[list[Any]] = [self._tasks.of(batch), *times, *found]
        lines = map((form + spec + b"\n").__mod__, zip(*columns, strict=True))
        if layout.group == TRACERS:
            # What is written to trace_marker ends its line itself.
            lines = (line.rstrip(b"\n") + b"\n" for line in lines)
        if self._is_terminal:
            lines = map(visible_line, lines)
        heads = map(form.__mod__, zip(*columns[: 1 + len(times)], strict=True))
        return self._with_stacks(batch, list(lines), heads)

    def _with_stacks(self, batch: Batch, lines: list[bytes], heads: Iterable[bytes]) -> list[bytes]:
        # Below the event's line, whatever their place among the fields.
        for field, values in zip(batch.layout.fields, batch.values, strict=True):
            if field.storage is not Storage.STACK:
                continue
            stacks = map(self._stacks[field.name == STACKTRACE].__getitem__, values.tolist())
            if field.name == STACKTRACE:
                # As of the kernel's trace option, or trigger: an entry of its own.
                entries = zip(lines, heads, stacks, strict=True)
                lines = [_ENTRY % each if each[2] else each[0] for each in entries]
            else:
                form = b"%b" + _literal(f" {field.name}=STACK:\n") + b"%b"
                pairs = zip((line[:-1] for line in lines), stacks, strict=True)
                lines = list(map(form.__mod__, pairs))
        return lines

    def _of_probe(self, batch: Batch) -> Shown:
        layout, columns = batch.layout, list[list[Any]]()
        form = _literal(f"{layout.event}: ")
        if batch.caller is None:
            form += _literal(f"({layout.where})")
        else:
            form += b"(%b" + _literal(f" <- {layout.function})")
            columns.append(self._names.callers(batch.caller))
        for field, values, faulted in zip(layout.fields, batch.values, batch.faulted, strict=True):
            if field.storage is Storage.STACK:
                continue
            spec, found = shown(field, values, faulted, self._names)
            form += _literal(f" {field.name}=") + spec
            columns += found
        return form, columns

    def _frames(self, stack: bytes) -> Iterable[bytes]:
        frames = self._names.stack(stack)
        if not self._is_terminal:
            return frames
        return [visible(frame.decode(errors="surrogateescape")).encode() for frame in frames]

    def _printed(self, batch: Batch) -> Shown:
        layout = batch.layout
        printed = self._print_fmts.get(layout.event_id)
        if printed is None:
            # Events of probes do without.
            from kprobes.sinks.print_fmt import PrintedEvent

            printed = self._print_fmts[layout.event_id] = PrintedEvent(layout)
        spec, columns = printed.shown(batch, self._names)
        is_named = bool(printed.unknown) or layout.group not in (TRACERS, SYSCALLS)
        return (_literal(f"{layout.event}: ") + spec if is_named else spec), columns


def _head(version: tuple[int, int], comm: bytes, pid: int, cpu: int, context: int) -> bytes:
    # What stands before the time. __trace_find_cmdline: whatever the idle task is called.
    name = comm if pid else b"<idle>"
    return b"%16b-%-7d [%03d] %b " % (name, pid, cpu, flags(context, version).encode())


def _literal(text: str) -> bytes:
    return text.replace("%", "%%").encode()


def microseconds(ts: NDArray[np.uint64]) -> tuple[list[int], list[int]]:
    """Return times in ns, shape (n,), as whole seconds and the rest in µs, as the kernel rounds."""
    us = (ts + _NS_PER_US // np.uint64(2)) // _NS_PER_US
    seconds = us // _US_PER_S
    return seconds.tolist(), (us - seconds * _US_PER_S).tolist()


def _grow(out: BinaryIO, at: int, size: int, new: bytes) -> None:
    # Replace ``size`` bytes at ``at`` by longer ones. The rest moves block by block from the
    # end, so what is cut short in the middle repeats a few bytes but loses none.
    grown = len(new) - size
    stop = out.seek(0, 2)
    while stop > at + size:
        start = max(stop - _BLOCK, at + size)
        out.seek(start)
        block = out.read(stop - start)
        out.seek(start + grown)
        out.write(block)
        stop = start
    out.seek(at)
    out.write(new)
    out.seek(0, 2)
