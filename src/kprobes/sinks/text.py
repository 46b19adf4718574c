"""Events as the kernel's ``trace`` file prints them, byte for byte.

The lines above them are those of its ``nop`` tracer. A line is made by one %-format per layout;
comm, pid, cpu and context, which repeat, are formatted once each and remembered. A field's column
is a %-format and the columns that go into it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kprobes.model.definition import STACKTRACE, TGID, USER_STACKTRACE
from kprobes.model.events import SYSCALLS, TRACERS, Batch, Column, Events, addresses
from kprobes.model.resolved import MIGRATE_SINCE, Field, Storage
from kprobes.model.strings import Strings
from kprobes.model.text_options import TextOptions
from kprobes.model.visible import visible, visible_line
from kprobes.native.lines import Cells, Lines, formatted, listed
from kprobes.sinks.contexts import ContextInfo, ContextTexts
from kprobes.sinks.names import (
    BH_SINCE,
    Name,
    Names,
    Shown,
    TraceSource,
    flags,
    shown_strings,
    shown_texts,
    write_in_order,
)
from kprobes.sinks.print_options import fields_text, is_raw, probe_text, raw_lines, zeroed

if TYPE_CHECKING:
    from kprobes.sinks.print_fmt import PrintedEvent

_TITLE = b"# tracer: nop\n#\n"
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
_NONE = """\
#           TASK-PID     CPU#     TIMESTAMP  FUNCTION
#              | |         |         |         |
"""
_TGID_AT = 23
_TGID = (" " * 10, "    TGID  ", "      |   ")
"""The column of processes: in lines above the titles, in these, below them."""


def _has_columns(source: TraceSource) -> bool:
    return source.options.context_info and not source.options.verbose


def _counts(entries: int, cpus: int) -> bytes:
    # For a buffer that holds all that was written to it.
    return b"# entries-in-buffer/entries-written: %d/%d   #P:%d\n" % (entries, entries, cpus)


def _columns(source: TraceSource) -> bytes:
    # print_func_help_header_irq() in kernel/trace/trace.c.
    if not source.options.irq_info:
        text = _NONE
    elif source.version < MIGRATE_SINCE:
        text = _FOUR
    elif source.version < BH_SINCE:
        text = _FIVE.replace("/BH-disabled", "")
    else:
        text = _FIVE
    if source.options.record_tgid:
        *above, titles, below = text.splitlines(keepends=True)
        parts = (*((line, _TGID[0]) for line in above), (titles, _TGID[1]), (below, _TGID[2]))
        text = "".join(line[:_TGID_AT] + part + line[_TGID_AT:] for line, part in parts)
    return f"#\n{text}".encode()


Mask = NDArray[np.bool_]

_FAULT = b"(fault)"
_UNKNOWN = b"?"
_CHARACTERS = [bytes((code,)) for code in range(256)]


def reboot_mark(release: str) -> bytes:
    """Return the line in front of the events of a guest's next boot: a comment."""
    return f"# the guest was rebooted: Linux {visible(release)}\n".encode()


def shown(field: Field, values: Column | Strings, faulted: Mask | None, names: Names) -> Shown:
    """Return how a field of many events is shown; arrays are only read.

    Args:
        field: from the layout.
        values: its column, shape (n,), or (n, elements) for an array.
        faulted: shape (n,), where its memory could not be read; None where nothing may fault.
        names: of the kernel's symbols and enumerators.
    """
    if isinstance(values, Strings):
        if field.storage is Storage.STACK:
            return b"%b", [shown_texts(values, lambda stack: names.stack_text(stack or b""))]
        return shown_strings(field, values, _quoted, b"{%b}")
    bad = faulted if faulted is not None and faulted.any() else None
    match field.storage:
        case Storage.TEXT:
            return b'"%b"' % field.text.replace(b"%", b"%%"), []
        case Storage.DURATION:
            return _durations(values, bad)
        case Storage.NUMBER if field.type != "symstr":
            form, columns = _array(field, _number(field, names), zeroed(values, bad))
            if bad is not None and names.enumerator_of(field) is not None:
                columns = _unnamed(field, columns, bad)
            return form, columns
        case Storage.NUMBER:
            return shown_strings(field, _symbols(values, bad, names), _quoted, b"{%b}")
        case _:
            return shown_strings(field, values, _quoted, b"{%b}")


def _durations(values: Column, bad: Mask | None) -> Shown:
    if bad is None:
        return b"%d", [values]
    took = zip(values.tolist(), bad.tolist(), strict=True)
    return b"%b", [[_UNKNOWN if is_unknown else b"%d" % ns for ns, is_unknown in took]]


def _unnamed(field: Field, columns: Sequence[Cells], bad: Mask) -> list[Cells]:
    # What could not be read is not an enumerator: it stays the number 0.
    zero = b"0x0" if field.type.startswith("x") else b"0"
    faults: list[bool] = bad.tolist()
    texts = (column if isinstance(column, list) else column.tolist() for column in columns)
    return [[zero if f else v for f, v in zip(faults, each, strict=True)] for each in texts]


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


def _named(values: Column, name: Name | None) -> Cells:
    return values if name is None else list(map(name, values.tolist()))


def _symbols(values: Column, bad: Mask | None, names: Names) -> Column:
    found = np.empty(values.shape, object)
    found[:] = list(map(names.symbol, values.tolist()))
    if bad is not None:
        found[bad] = None
    return found


def _quoted(value: bytes | None) -> bytes:
    return _FAULT if value is None else b'"%b"' % value


_BLOCK = 1 << 20
_REMEMBERED = 1 << 14
_NS_PER_US = np.uint64(1000)
_US_PER_S = np.uint64(1_000_000)


_ENTRY = b"%%b%%b<%b>\n%%b"
_USER_FRAME = b" => %b%b\n"
_FUNCTION = "function"
"""The function tracer's event."""


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
        self._options = source.options
        self._contexts = ContextTexts(partial(_head, source.version, source.options))
        self._names = Names(source)
        self._stacks = _StackTexts(self._field)
        self._entries = {
            STACKTRACE: (_ENTRY % b"stack trace", _StackTexts(self._entry)),
            USER_STACKTRACE: (_ENTRY % b"user stack trace", _StackTexts(_user_entry)),
        }
        self._print_fmts: dict[int, PrintedEvent] = {}
        self._written: int | None = None
        self._counts_at: int | None = None
        # There a guest's text could change what else is shown, and look like another event.
        self._is_terminal = out.isatty()

    def write(self, events: Events) -> None:
        """Write and flush one line per event."""
        written = self._begin()
        write_in_order(self._out, events, self.lines)
        self._written = written + len(events)
        self._out.flush()

    def close(self) -> None:
        """Write the header if nothing was written, and its counts where that is possible."""
        written = self._begin()
        if self._counts_at is not None and written:
            self._out.flush()
            cpus = self._source.cpus
            old, new = _counts(0, cpus), _counts(written, cpus)
            _grow(self._out, self._counts_at, len(old), new)
            self._counts_at = None
        self._out.flush()

    def _begin(self) -> int:
        if self._written is None:
            self._written = 0
            self._out.write(_TITLE)
            if _has_columns(self._source):
                if self._source.entries is None and self._out.seekable() and self._out.readable():
                    self._counts_at = self._out.tell()
                self._out.write(_counts(self._source.entries or 0, self._source.cpus))
                self._out.write(_columns(self._source))
        return self._written

    def lines(self, batch: Batch) -> Lines:
        """Return one line per event."""
        if is_raw(self._options):
            version, is_terminal = self._source.version, self._is_terminal
            return raw_lines(batch, self._options, version, is_terminal=is_terminal)
        form, where = self._where(batch)
        spec, found = self._event(batch)
        whole = form + spec + b"\n", [*where, *found], len(batch)
        is_tracers, layout = batch.layout.group == TRACERS, batch.layout
        has_stacks = any(field.storage is Storage.STACK for field in layout.fields)
        if not (is_tracers or has_stacks or self._is_terminal):
            return formatted(*whole)
        lines = listed(*whole)
        if is_tracers:
            # What is written to trace_marker ends its line itself.
            lines = [line.rstrip(b"\n") + b"\n" for line in lines]
        if self._is_terminal:
            lines = list(map(visible_line, lines))
        return self._with_stacks(batch, lines, partial(listed, form, where, len(batch)))

    def _where(self, batch: Batch) -> Shown:
        # Task, CPU and time.
        if not self._options.context_info:
            return b"", []
        if self._source.has_ns:
            return b"%b%5d.%06d: ", [self._contexts.of(batch), *microseconds(batch.ts)]
        return b"%b%12d: ", [self._contexts.of(batch), batch.ts]

    def _event(self, batch: Batch) -> Shown:
        layout, options = batch.layout, self._options
        if options.fields:
            is_probe = not layout.print_fmt
            spec, found = (probe_text if is_probe else fields_text)(batch, self._names)
            return _literal(f"{layout.event}:{'' if is_probe else ' '}") + spec, found
        if not layout.print_fmt:
            return self._of_probe(batch)
        if layout.group == TRACERS and layout.event == _FUNCTION:
            return self._of_function(batch)
        return self._printed(batch)

    def _with_stacks(
        self, batch: Batch, lines: list[bytes], heads: Callable[[], Iterable[bytes]]
    ) -> list[bytes]:
        # Below the event's line, whatever their place among the fields.
        for field, values in zip(batch.layout.fields, batch.columns, strict=True):
            if field.storage is not Storage.STACK:
                continue
            entry, texts = self._entries.get(field.name, (b"", self._stacks))
            stacks = map(texts.__getitem__, values.tolist())
            if field.name == USER_STACKTRACE and self._options.sym_userobj:
                stacks = map(self._of_program, batch.pid.tolist(), values.tolist())
            if entry:
                # As of the kernel's trace option, or trigger: an entry of its own.
                entries = zip(lines, heads(), stacks, strict=True)
                lines = [entry % each if each[2] else each[0] for each in entries]
            else:
                form = b"%b" + _literal(f" {field.name}=STACK:\n") + b"%b"
                pairs = zip((line[:-1] for line in lines), stacks, strict=True)
                lines = list(map(form.__mod__, pairs))
        return lines

    def _of_probe(self, batch: Batch) -> Shown:
        layout, columns = batch.layout, list[Cells]()
        form = _literal(f"{layout.event}: ")
        if batch.caller is None:
            form += _literal(f"({layout.where}{self._address(layout.ip)})")
        else:
            form += b"(%b" + _literal(f" <- {layout.function}{self._address(layout.ip)})")
            columns.append(self._callers(batch.caller))
        hidden = TGID if self._options.record_tgid else ""
        for field, values, faulted in zip(layout.fields, batch.columns, batch.faulted, strict=True):
            if field.storage is Storage.STACK or field.name == hidden:
                continue
            spec, found = shown(field, values, faulted, self._names)
            form += _literal(f" {field.name}=") + spec
            columns += found
        return form, columns

    def _address(self, addr: int) -> str:
        # seq_print_ip_sym() in kernel/trace/trace_output.c.
        return f" <{addr:016x}>" if self._options.sym_addr and addr else ""

    def _callers(self, addrs: NDArray[np.uint64]) -> list[bytes]:
        names = self._names.callers(addrs)
        if not self._options.sym_addr:
            return names
        pairs = zip(names, addrs.tolist(), strict=True)
        return [name + self._address(addr).encode() for name, addr in pairs]

    def _place(self, name: bytes, addr: int) -> bytes:
        shown = name if self._options.sym_offset else name.partition(b"+")[0]
        return shown + self._address(addr).encode()

    def _of_function(self, batch: Batch) -> Shown:
        # trace_fn_trace().
        fields = zip(batch.layout.fields, batch.values, strict=True)
        named = {field.name: values.tolist() for field, values in fields}
        names = ("ip", "parent_ip") if self._options.print_parent else ("ip",)
        columns = [[self._place(self._names.symbol(a), a) for a in named[each]] for each in names]
        return b" <-".join([b"%b"] * len(names)), columns

    def _field(self, stack: bytes) -> bytes:
        # print_synth_event() in kernel/trace/trace_events_synth.c.
        return b"".join(b"=> %b\n" % frame for frame in self._frames(stack))

    def _entry(self, stack: bytes) -> bytes:
        # trace_stack_print() in kernel/trace/trace_output.c.
        pairs = zip(self._frames(stack), addresses(stack), strict=True)
        return b"".join(b" => %b\n" % self._place(frame, addr) for frame, addr in pairs)

    def _of_program(self, pid: int, stack: bytes) -> bytes:
        # With it; seq_print_user_ip() in kernel/trace/trace_output.c.
        frames = list[bytes]()
        for addr in addresses(stack):
            place = self._source.program_at(pid, addr) or b""
            has_addr = self._options.sym_addr or not place
            if self._is_terminal:
                place = visible(place.decode(errors="surrogateescape")).encode()
            frames.append(_USER_FRAME % (place, b" <%016x>" % addr * has_addr))
        return b"".join(frames)

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


def _user_entry(stack: bytes) -> bytes:
    # trace_user_stack_print(), without the option ``sym-userobj``.
    return b"".join(_USER_FRAME % (b"", b" <%016x>" % addr) for addr in addresses(stack))


def _head(version: tuple[int, int], options: TextOptions, info: ContextInfo) -> bytes:
    # What stands before the time. __trace_find_cmdline: whatever the idle task is called.
    name = info.comm if info.pid else b"<idle>"
    process = b""
    if options.record_tgid:
        process = b"(%7d) " % info.tgid if info.tgid else b"(-------) "
    context = flags(info.context, version).encode() if options.irq_info else b""
    return b"%16b-%-7d %b[%03d] %b " % (name, info.pid, process, info.cpu, context)


def _literal(text: str) -> bytes:
    return text.replace("%", "%%").encode()


def microseconds(ts: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return ns, shape (n,), as seconds and the rest in µs, as the kernel rounds: copies."""
    us = (ts + _NS_PER_US // np.uint64(2)) // _NS_PER_US
    seconds = us // _US_PER_S
    return seconds, us - seconds * _US_PER_S


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
