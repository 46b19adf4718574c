"""Events as the kernel's trace options ``fields``, ``raw``, ``hex`` and ``bin`` print them.

``fields`` is each field by its size: print_fields() of kernel/trace/trace_output.c as 7.2 has it,
whatever the traced kernel. There is one since 6.4, in the reversed order at first, without symbols,
and with strings as they are. The others are print_raw_fmt(), print_hex_fmt() and print_bin_fmt() of
trace.c: where it happened as numbers, and of the event, which has no such form of its own, the
type: trace_nop_print().
"""

import numpy as np
from numpy.typing import NDArray

from kprobes.model.definition import STACKTRACE, USER_STACKTRACE
from kprobes.model.events import Batch, Column
from kprobes.model.resolved import Field, Storage
from kprobes.model.text_options import TextOptions
from kprobes.model.visible import visible_line
from kprobes.native.lines import Cells
from kprobes.sinks.names import Names, Shown

Mask = NDArray[np.bool_]
_PRINTABLE = range(0x20, 0x7F)
_BYTE_TEXTS = [b"'%c'(%d)" % (n, n) if n in _PRINTABLE else b"(%d)" % n for n in range(256)]
_PLAIN = bytes(_PRINTABLE)
_DOTS = bytes(code if code in _PRINTABLE else ord(".") for code in range(256))
_SIZES = (1, 2, 4, 8)


def zeroed(values: Column, bad: Mask | None) -> Column:
    """Return numbers with 0 for those that could not be read: themselves, or a copy.

    Args:
        values: shape (n,), or (n, elements).
        bad: shape (n,), which could not; None where all could.
    """
    if bad is None or not bad.any():
        return values
    mask = bad if values.ndim == 1 else bad[:, None]
    return np.where(mask, values.dtype.type(0), values)


def probe_text(batch: Batch, names: Names) -> Shown:
    """Return what is printed of probes' events after their name and its colon."""
    place = b"%b (%d)" % (names.symbol(batch.layout.ip), _signed(batch.layout.ip))
    form, columns = fields_text(batch, names)
    if batch.caller is None:
        return _with(b" __probe_ip=" + _literal(place), form), columns
    spec, callers = _pointers(batch.caller, names)
    head = b" __probe_func=" + _literal(place) + b" __probe_ret_ip=" + spec
    return _with(head, form), [*callers, *columns]


def fields_text(batch: Batch, names: Names) -> Shown:
    """Return what is printed of an event's own fields, without the blank in front of it.

    Bytes are shown where the kernel says <INVALID-SIZE> or <INVALID-TYPE>.
    """
    forms: list[bytes] = []
    columns: list[Cells] = []
    for field, values, bad in zip(batch.layout.fields, batch.values, batch.faulted, strict=True):
        if field.storage is Storage.STACK:
            continue
        if field.storage in (Storage.NUMBER, Storage.DURATION):
            form, found = _number(field, zeroed(values, bad), names)
        elif field.storage is Storage.TEXT:
            form, found = _literal(field.text), []
        else:
            form, found = b"%b", [_texts(field, values)]
        forms.append(_literal(field.name.encode()) + b"=" + form)
        columns += found
    return b" ".join(forms), columns


def _with(head: bytes, form: bytes) -> bytes:
    return head + b" " + form if form else head


def _literal(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _number(field: Field, values: Column, names: Names) -> Shown:
    if field.type == "symstr":
        return b"%b", [list(map(names.symbol, values.tolist()))]
    if field.declared in ("char *", "const char *"):
        return b"%b", [[_kernel_string(names, addr) for addr in values.tolist()]]
    size = field.size
    if field.count is not None:
        size = field.room
        if size not in _SIZES:
            return b"%b", [[each.tobytes().hex(",").encode() for each in values]]
        values = np.ascontiguousarray(values).view(f"<u{size}")[:, 0]
    pattern = values.astype(f"u{size}")
    if size == 8:
        return _pointers(pattern, names)
    if size == 1:
        return b"%b", [list(map(_BYTE_TEXTS.__getitem__, pattern.tolist()))]
    signed = pattern if size == 2 else pattern.astype("i4")
    return b"0x%x (%d)", [pattern, signed]


def _pointers(values: Column, names: Names) -> Shown:
    return b"%b (%d)", [list(map(names.symbol, values.tolist())), values.view("i8")]


def _texts(field: Field, values: Column) -> list[bytes]:
    rows = values if values.ndim > 1 else values[:, None]
    return [b",".join(_text(field, value) for value in row) for row in rows.tolist()]


def _text(field: Field, value: bytes | None) -> bytes:
    if value is None:
        return b""
    if field.type == "bytes":
        return value.hex(",").encode()
    if not value.translate(None, _PLAIN):
        return value
    # With the NUL at its end.
    whole = value + b"\0"
    return b"%b (%b)" % (whole.translate(_DOTS), whole.hex(":").encode())


def _kernel_string(names: Names, addr: int) -> bytes:
    text = names.text_at(addr)
    return b"(0x%016x)" % addr if text == b"%#x" % addr else b"(0x%016x:%b)" % (addr, text)


_TYPE = b"type: %d\n"
_STACK, _USER_STACK, _NEWER_USER_STACK = 4, 12, 13
"""TRACE_STACK and TRACE_USER_STACK of enum trace_type."""
_NEWER = (6, 13)
"""With TRACE_GRAPH_RETADDR_ENT in front of it: 21e92806d39c."""
_WHERE = np.dtype([("pid", "<u4"), ("cpu", "<u4"), ("ts", "<u8")])


def is_raw(options: TextOptions) -> bool:
    """Whether events are printed so."""
    return options.raw or options.hex or options.bin


def raw_lines(
    batch: Batch, options: TextOptions, version: tuple[int, int], *, is_terminal: bool
) -> list[bytes]:
    """Return the line of each event, and in it one more of each stack.

    Args:
        batch: any.
        options: of which ``bin`` comes before ``hex``, and that before ``raw``.
        version: of the kernel.
        is_terminal: whether bytes that it would act on are escapes.
    """
    # print_hex_fmt() ends the line once more.
    end = b"\n" if options.hex and not options.bin else b""
    event = _TYPE % batch.layout.event_id + end
    user_stack = _USER_STACK if version < _NEWER else _NEWER_USER_STACK
    stacks = {STACKTRACE: _STACK, USER_STACKTRACE: user_stack}
    heads = _heads(batch, options) if options.context_info else [b""] * len(batch)
    if options.bin and is_terminal:
        heads = [visible_line(head + b"\n")[:-1] for head in heads]
    lines = [head + event for head in heads]
    for field, values in zip(batch.layout.fields, batch.values, strict=True):
        if field.name in stacks:
            stack = _TYPE % stacks[field.name] + end
            each = zip(lines, heads, values.tolist(), strict=True)
            lines = [line + head + stack if found else line for line, head, found in each]
    return lines


def _heads(batch: Batch, options: TextOptions) -> list[bytes]:
    where = np.empty(len(batch), _WHERE)
    where["pid"], where["cpu"], where["ts"] = batch.pid, batch.cpu, batch.ts
    if options.bin:
        data, size = where.tobytes(), _WHERE.itemsize
        return [data[at : at + size] for at in range(0, len(data), size)]
    form = b"%08x %08x %016x " if options.hex else b"%d %d %d "
    return list(map(form.__mod__, where.tolist()))
