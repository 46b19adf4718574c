r"""Events as the records that the kernel's own ring would have of them, and their ``format``.

    struct {            // packed; see resolve/explain.py, which writes the format's text
        u16 common_type; u8 common_flags, common_preempt_count; s32 common_pid;
        u64 __probe_ip;                      // or __probe_func, __probe_ret_ip
        ...                                  // arguments
    };
    char strings[];     // each with its NUL; an argument is length << 16 | offset

What could not be read is ``(fault)``, as kernels since 6.2 store it, or the number 0. Strings are
cut where a page of the ring would be too small for all of them.
"""

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats.ftrace import parse_event
from kprobes.formats.ring_page import LONGEST, WORD, Index, Words
from kprobes.model.events import Batch, Column, EventFormat
from kprobes.model.resolved import (
    CONTEXT_HARDIRQ,
    CONTEXT_IRQS_ON,
    CONTEXT_MIGRATE_SHIFT,
    CONTEXT_NEED_RESCHED,
    CONTEXT_NEED_RESCHED_LAZY,
    CONTEXT_NMI,
    CONTEXT_NO_PREEMPT_RESCHED,
    CONTEXT_PREEMPT,
    CONTEXT_SERVING_SOFTIRQ,
    CONTEXT_SOFTIRQ,
    MIGRATE_SINCE,
    Field,
    RecordLayout,
    Storage,
)
from kprobes.resolve.explain import format_text
from kprobes.sinks.names import BH_SINCE, LAZY_SINCE, Names

_IRQS_OFF, _LAZY, _PREEMPT_RESCHED, _BH_OFF = 0x01, 0x02, 0x20, 0x80
_FLAGS = {
    0x04: CONTEXT_NEED_RESCHED,
    0x08: CONTEXT_HARDIRQ,
    0x10: CONTEXT_SERVING_SOFTIRQ,
    0x40: CONTEXT_NMI,
}
"""enum trace_flag_type of include/linux/trace_events.h."""
_DEPTH = 0xF
_MIGRATE_SHIFT = 4


def common_flags(
    context: NDArray[np.uint32], version: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return new ``common_flags`` and ``common_preempt_count`` as a kernel has them, shape (n,).

    It is what tracing_gen_ctx_irq_test of kernel/trace/trace.c makes of a context.
    """
    flags = np.where(context & np.uint32(CONTEXT_IRQS_ON), 0, _IRQS_OFF)
    for flag, bits in _FLAGS.items():
        flags |= np.where(context & np.uint32(bits), flag, 0)
    flags |= np.where(context & np.uint32(CONTEXT_NO_PREEMPT_RESCHED), 0, _PREEMPT_RESCHED)
    if version >= LAZY_SINCE:
        flags |= np.where(context & np.uint32(CONTEXT_NEED_RESCHED_LAZY), _LAZY, 0)
    if version >= BH_SINCE:
        is_off = context & np.uint32(CONTEXT_SOFTIRQ & ~CONTEXT_SERVING_SOFTIRQ)
        flags |= np.where(is_off, _BH_OFF, 0)
    counts = context & np.uint32(CONTEXT_PREEMPT)
    if version >= MIGRATE_SINCE:
        migrate = context >> np.uint32(CONTEXT_MIGRATE_SHIFT) & np.uint32(_DEPTH)
        counts = np.minimum(counts, np.uint32(_DEPTH)) | migrate << np.uint32(_MIGRATE_SHIFT)
    return flags.astype(np.uint8), counts.astype(np.uint8)


class KernelRecords(Struct, frozen=True, kw_only=True, eq=False):
    """Records of some events.

    Attributes:
        words: uint32 (m,), all of them, one after the other.
        sizes: int64 (n,), how many words each one has.
    """

    words: Words
    sizes: Index


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOCATION = 4
_FAULT = b"(fault)"


class KernelEvent:
    """One event: its ``format``, and what makes records of it.

    Attributes:
        text: of its ``format`` file, but for arrays, of which libtraceevent understands little:
            those of numbers have their count, and strings are fields of their own, ``NAME_0`` ...
    """

    def __init__(
        self, layout: RecordLayout, *, number: int, names: Names, version: tuple[int, int]
    ) -> None:
        """Lay out the record.

        Args:
            layout: of our own records.
            number: the event's, which its records begin with.
            names: of the kernel's symbols.
            version: of the kernel's release.

        Raises:
            FormatError: no definition makes an event of such names, or so large.
        """
        names_of = layout.group.replace("-", "_"), layout.event, *(f.name for f in layout.fields)
        for name in names_of:
            if not _NAME.fullmatch(name):
                raise FormatError(f"an event with the name {name!r}")
        self._number, self._names, self._version = number, names, version
        text = format_text(layout, number=number)
        form = parse_event(text)
        self.text = _with_known_arrays(text, layout.fields)
        self._size = -(-form.size // WORD) * WORD
        self._texts = [i for i, field in enumerate(layout.fields) if _is_text(field)]
        strings = sum(layout.fields[i].count or 1 for i in self._texts)
        self._room = LONGEST * WORD - self._size
        if self._room < strings:
            raise FormatError(f"event {layout.event} has {form.size} bytes in the kernel's ring")
        self._dtype = _dtype(layout, form, self._size)

    def records(self, batch: Batch) -> KernelRecords:
        """Return n events as records, in their order."""
        rows = np.zeros(len(batch), self._dtype)
        rows["type"], rows["pid"] = self._number, batch.pid
        rows["flags"], rows["count"] = common_flags(batch.context, self._version)
        rows["ip"] = batch.layout.ip
        if batch.caller is not None:
            rows["caller"] = batch.caller
        fields = zip(batch.layout.fields, batch.values, batch.faulted, strict=True)
        for i, (field, values, faulted) in enumerate(fields):
            if not _is_text(field):
                rows[f"f{i}"] = _zeroed(values, faulted)
        if self._texts:
            return self._with_strings(rows, batch)
        size = self._size // WORD
        return KernelRecords(words=rows.view("<u4"), sizes=np.full(len(rows), size))

    def _with_strings(self, rows: NDArray[np.void], batch: Batch) -> KernelRecords:
        columns = [self._bytes(batch, i).reshape(len(rows), -1) for i in self._texts]
        # By row, each with its NUL.
        texts: list[bytes] = np.concatenate(columns, axis=1).ravel().tolist()
        lengths = np.fromiter(map(len, texts), np.int64, len(texts)).reshape(len(rows), -1) + 1
        kept = _cut(lengths, self._room)
        for at in np.flatnonzero(kept != lengths).tolist():
            texts[at] = texts[at][: int(kept.flat[at]) - 1]
        ends = self._size + np.cumsum(kept, axis=1)
        located = (kept << 16 | ends - kept).astype(np.uint32)
        first = 0
        for i, column in zip(self._texts, columns, strict=True):
            after = first + column.shape[1]
            rows[f"f{i}"] = located[:, first:after].reshape(rows[f"f{i}"].shape)
            first = after
        return _joined(rows, b"\0".join([*texts, b""]), ends[:, -1])

    def _bytes(self, batch: Batch, i: int) -> Column:
        field, values, faulted = batch.layout.fields[i], batch.values[i], batch.faulted[i]
        found = values.astype(object)
        if field.storage is Storage.NUMBER:
            found = self._symbols(values)
        elif field.storage is Storage.STACK:
            found[:] = list(map(self._names.stack_text, values.tolist()))
        if faulted is not None:
            found[faulted] = _FAULT
        return found

    def _symbols(self, addrs: Column) -> Column:
        unique, which = np.unique(addrs, return_inverse=True)
        found = np.empty(len(unique), object)
        found[:] = list(map(self._names.symbol, unique.tolist()))
        return found[which].reshape(addrs.shape)


def _with_known_arrays(text: str, fields: Iterable[Field]) -> str:
    for field in fields:
        if field.count is None:
            continue
        name = field.name
        if _is_text(field):
            # A name of its own for each string of the row.
            line = re.compile(rf"\tfield:__data_loc char\[\]\[\d+\] {name};\toffset:(\d+);.*\n")
            text = line.sub(partial(_each_string, name, field.count), text)
            text = re.sub(rf"__get_str\({name}\[(\d+)\]\)", rf"__get_str({name}_\1)", text)
        else:
            text = text.replace(f" {name}[];", f" {name}[{field.count}];")
    return text


def _each_string(name: str, count: int, line: re.Match[str]) -> str:
    offsets = (int(line[1]) + _LOCATION * i for i in range(count))
    return "".join(
        f"\tfield:__data_loc char[] {name}_{i};\toffset:{at};\tsize:{_LOCATION};\tsigned:1;\n"
        for i, at in enumerate(offsets)
    )


def _is_text(field: Field) -> bool:
    return field.storage not in (Storage.NUMBER, Storage.DURATION) or field.type == "symstr"


def _column(field: Field) -> str:
    size = _LOCATION if _is_text(field) else field.size
    number = f"<{'i' if field.is_signed else 'u'}{size}"
    return number if field.count is None else f"({field.count},){number}"


def _dtype(layout: RecordLayout, form: EventFormat, size: int) -> np.dtype[np.void]:
    parts = {"type": ("<u2", 0), "flags": ("<u1", 2), "count": ("<u1", 3), "pid": ("<i4", 4)}
    heads = ("ip",) if layout.caller_offset is None else ("ip", "caller")
    parts |= {name: ("<u8", field.offset) for name, field in zip(heads, form.fields, strict=False)}
    own = zip(layout.fields, form.fields[len(heads) :], strict=True)
    parts |= {f"f{i}": (_column(field), where.offset) for i, (field, where) in enumerate(own)}
    return np.dtype(
        {
            "names": list(parts),
            "formats": [column for column, _ in parts.values()],
            "offsets": [offset for _, offset in parts.values()],
            "itemsize": size,
        }
    )


def _zeroed(values: Column, faulted: Any) -> Column:
    if faulted is None or not faulted.any():
        return values
    return np.where(faulted if values.ndim == 1 else faulted[:, None], values.dtype.type(0), values)


def _cut(lengths: Index, room: int) -> Index:
    # The first strings of a record have what they need; of the others a NUL is left.
    strings: int = lengths.shape[1]
    after = np.arange(strings)[::-1]
    return np.diff(np.minimum(np.cumsum(lengths, axis=1), room - after), prepend=0, axis=1)


def _joined(rows: NDArray[np.void], strings: bytes, sizes: Index) -> KernelRecords:
    # Each row with its own strings behind it; ``sizes`` are the bytes of both.
    words = -(-sizes // WORD)
    starts = (np.cumsum(words) - words) * WORD
    found = np.zeros(int(words.sum()) * WORD, np.uint8)
    size = rows.dtype.itemsize
    every = np.ndarray(((len(found) - size) // WORD + 1,), f"V{size}", found, strides=(WORD,))
    every[starts // WORD] = rows.view(f"V{size}")
    lengths = sizes - size
    begins = starts + size - (np.cumsum(lengths) - lengths)
    text = np.frombuffer(strings, np.uint8)
    found[np.repeat(begins, lengths) + np.arange(len(text))] = text
    return KernelRecords(words=found.view("<u4"), sizes=words)
