"""What a kernel's own event looks like in its ring, and which of our layouts it is shown by.

A driver of tracefs makes a ``HostEvent`` of every event that it has defined; a ``HostReader``
turns the kernel's pages into batches of those events' layouts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kprobes.model.batch import Events
from kprobes.model.layout import RecordLayout


class Locator(StrEnum):
    """Where a field's bytes are."""

    HERE = "here"
    DATA = "__data_loc"
    """A u32 ``length << 16 | offset`` from the record's start."""
    RELATIVE = "__rel_loc"
    """The same from the u32's own end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventField:
    """One ``field:`` line.

    Attributes:
        type: as C writes it, without the name: ``unsigned short``, ``__data_loc char[]``.
        offset, size: in the record, bytes.
    """

    name: str
    type: str
    offset: int
    size: int
    is_signed: bool
    locator: Locator = Locator.HERE

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFormat:
    """An event's ``format`` file.

    Attributes:
        number: its ID: what ``common_type`` of its records is.
        common: the fields that all events have.
        fields: its own, in the file's order.
    """

    name: str
    number: int
    common: tuple[EventField, ...]
    fields: tuple[EventField, ...]

    @property
    def size(self) -> int:
        """Bytes of a record's fixed part."""
        return max((field.end for field in (*self.common, *self.fields)), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEvent:
    """A kprobe event of this kernel.

    Attributes:
        format: as its file says.
        layouts: how its records are shown: one for each place of the probe, told apart by
            ``ip``, with event ids that are unique in the session. Their fields are those of
            the event in the same order; of each only name, type, storage, count, text and
            enumerators count, for ``format`` has the places. A record of another address is
            shown as the first of them, but for what its address makes of ``where``.
    """

    format: EventFormat
    layouts: tuple[RecordLayout, ...]

    def __post_init__(self) -> None:
        if not self.layouts:
            raise ValueError(f"event {self.format.name} is shown by no layout")


class HostReader(Protocol):
    """Takes a tracing instance's records out of its rings."""

    @property
    def recorded(self) -> Mapping[int, int]:
        """Events read so far, by their layouts' event ids."""
        ...

    @property
    def lost(self) -> int:
        """Events that the kernel dropped or overwrote before they were read."""
        ...

    def drain(self) -> Events:
        """Return what is safe to show of all that the kernel has recorded, oldest first.

        Raises:
            RingError: pages that no kernel wrote.
            TargetError: the instance is gone.
        """
        ...

    def rest(self) -> Iterator[Events]:
        """Yield everything that is left; the events are disabled."""
        ...

    def close(self) -> None:
        """Let go of the instance, which could not be removed before."""
        ...
