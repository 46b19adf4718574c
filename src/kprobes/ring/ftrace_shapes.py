"""The kernel's events as lookup tables: what decoding needs to know of each, made once."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import FormatError
from kprobes.model.events import EventField, EventFormat, HostEvent, Locator
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.units import Addr

ENTRY, RETURN, CALLER = "__probe_ip", "__probe_func", "__probe_ret_ip"
COMMON_SIZE = 8
"""Bytes that every record has at least: ``struct trace_entry``."""

Place = Callable[[int], str]
"""An address to what ``%pS`` prints for it, as ``TraceSource.symbol_at``."""


class EventShape:
    """One event.

    Attributes:
        number: of the event, which its records begin with.
        dtype: of the fixed part; ``pid``, ``flags``, ``preempt``, ``ip``, ``caller``, ``f<i>``.
        fields: as they are shown.
        wheres: of each field, where its bytes are.
        has_ip: whether it is of a probe, so that records tell the address.
    """

    def __init__(self, event: HostEvent, place: Place, fresh_id: Callable[[], int]) -> None:
        self._place = place
        self._fresh_id = fresh_id
        form, layout = event.format, event.layouts[0]
        own = {field.name: field for field in form.fields}
        self.number = form.number
        self.has_ip = ENTRY in own or RETURN in own
        self._caller = own[CALLER].offset if CALLER in own else None
        self.wheres = tuple(_named(own, field.name, form) for field in layout.fields)
        pairs = list(zip(layout.fields, self.wheres, strict=True))
        self.fields = tuple(_shown(field, where) for field, where in pairs)
        self.dtype = _dtype(form, own, pairs)
        self._layouts = {shown.ip: self._as_shown(shown) for shown in event.layouts}
        self._first = self._as_shown(layout)
        # One probe of ours, until a record says where it is.
        self._is_unseen = layout.ip != 0 and len(event.layouts) == 1

    @property
    def is_return(self) -> bool:
        """Whether records have a ``caller``."""
        return self._caller is not None

    def layout(self, ip: int) -> RecordLayout:
        """Return how records of one address are shown; the same one each time.

        The kernel may have put a probe of ours after an endbr64, and one at a tracepoint is in a
        function of its own: the first record says where, and is the event that we know.
        """
        found = self._layouts.get(Addr(ip))
        if found is None:
            if self._is_unseen:
                self._layouts.clear()
            where = self._place(ip)
            function = where.partition("+")[0]
            found = replace(
                self._first,
                event_id=self._first.event_id if self._is_unseen else self._fresh_id(),
                ip=Addr(ip),
                where=where,
                function=function,
            )
            self._layouts[Addr(ip)] = found
        self._is_unseen = False
        return found

    def _as_shown(self, layout: RecordLayout) -> RecordLayout:
        return replace(layout, fields=self.fields, caller_offset=self._caller)


class NamingShape(Struct, frozen=True, kw_only=True):
    """One event of those that tell a task's name: see ``task_names``.

    Attributes:
        old: column of the name before; None in an event about new tasks.
        new: column of the name.
    """

    number: int
    dtype: np.dtype[np.void]
    old: str | None
    new: str


def naming_shape(form: EventFormat) -> NamingShape:
    """Return what ``task:task_newtask`` or ``task:task_rename`` of this kernel says where.

    Raises:
        FormatError: it is no such event.
    """
    own = {field.name: field for field in form.fields}
    is_new = "comm" in own
    names = ("comm",) if is_new else ("oldcomm", "newcomm")
    parts = {
        "pid": ("<i4", _named(_all(form), "pid" if "pid" in own else "common_pid", form).offset)
    }
    for name in names:
        field = _named(own, name, form)
        if field.locator is not Locator.HERE:
            raise FormatError(f"event {form.name} has its {name} elsewhere")
        parts[name] = (f"S{field.size}", field.offset)
    return NamingShape(
        number=form.number,
        dtype=_struct(parts, form.size),
        old=None if is_new else names[0],
        new=names[-1],
    )


def _all(form: EventFormat) -> dict[str, EventField]:
    return {field.name: field for field in (*form.common, *form.fields)}


def _named(fields: dict[str, EventField], name: str, form: EventFormat) -> EventField:
    if name not in fields:
        raise FormatError(f"event {form.name} has no field {name}")
    return fields[name]


def is_cut_out(field: Field, where: EventField) -> bool:
    """Whether a field is bytes that stand at its own place in the record: ``char comm[16]``."""
    return where.locator is Locator.HERE and field.storage is Storage.STRING


def _shown(field: Field, where: EventField) -> Field:
    # The kernel stores some things as strings that we store as something else.
    if where.locator is Locator.HERE or field.storage is Storage.TEXT:
        return field
    return replace(field, storage=Storage.STRING)


def _dtype(
    form: EventFormat, own: dict[str, EventField], pairs: Sequence[tuple[Field, EventField]]
) -> np.dtype[np.void]:
    every = _all(form)
    parts = {
        "pid": ("<i4", _named(every, "common_pid", form).offset),
        "flags": ("<u1", _named(every, "common_flags", form).offset),
        "preempt": ("<u1", _named(every, "common_preempt_count", form).offset),
    }
    for name in (ENTRY, RETURN):
        if name in own:
            parts["ip"] = ("<u8", own[name].offset)
    if CALLER in own:
        parts["caller"] = ("<u8", _named(own, CALLER, form).offset)
    for i, (field, where) in enumerate(pairs):
        is_text = field.storage is Storage.COMM or (is_cut_out(field, where) and field.count)
        if is_text and where.locator is Locator.HERE:
            raise FormatError(f"event {form.name} has no text at the place of {field.name}")
        if not is_cut_out(field, where):
            parts[f"f{i}"] = (_column(field, where, form), where.offset)
    return _struct(parts, form.size)


def _column(field: Field, where: EventField, form: EventFormat) -> str:
    count = field.count or 1
    size, rest = divmod(where.size, count)
    is_here = where.locator is Locator.HERE
    if rest or size not in ((1, 2, 4, 8) if is_here else (4,)):
        raise FormatError(f"event {form.name} has {where.size} bytes for {count} of {field.name}")
    number = f"<{'i' if is_here and field.is_signed else 'u'}{size}"
    return number if field.count is None else f"({count},){number}"


def _struct(parts: dict[str, tuple[str, int]], size: int) -> np.dtype[np.void]:
    return np.dtype(
        {
            "names": list(parts),
            "formats": [form for form, _ in parts.values()],
            "offsets": [offset for _, offset in parts.values()],
            "itemsize": size,
        }
    )
