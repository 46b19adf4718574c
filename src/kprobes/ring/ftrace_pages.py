"""Pages of an instance's rings to events in order, with the names that tasks had."""

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from kprobes.formats.ftrace import PageFormat
from kprobes.model.events import EventFormat, Events, HostEvent, Pages
from kprobes.ring.ftrace import Contexts, HostDecoded, HostShapes, TaskNames, decode_pages
from kprobes.ring.ftrace_merge import HostMerger
from kprobes.ring.ftrace_shapes import EventShape, Place, naming_shape

_FRESH = 1 << 30
"""Numbers of what records show at other addresses than were defined."""


def shapes_of(
    page: PageFormat, version: tuple[int, int], namings: Sequence[EventFormat]
) -> HostShapes:
    """Return what may be in the pages of an instance, without any event of a probe so far.

    Args:
        page: how one lies in memory.
        version: major and minor of the kernel's release.
        namings: events that tell the names of tasks.

    Raises:
        FormatError: those are described in a way that we do not know.
    """
    shapes = [naming_shape(form) for form in namings]
    return HostShapes(
        page=page,
        contexts=Contexts(version),
        events={},
        namings={shape.number: shape for shape in shapes},
    )


class PageDecoder:
    """Decodes the pages of one instance, round by round. One thread at a time does."""

    def __init__(self, shapes: HostShapes, names: TaskNames, symbol_at: Place) -> None:
        """Begin with nothing.

        Args:
            shapes: what may be in the pages.
            names: of the tasks.
            symbol_at: an address to what ``%pS`` prints for it.
        """
        self._shapes = shapes
        self._names = names
        self._symbol_at = symbol_at
        self._fresh = itertools.count(_FRESH).__next__
        self._merger = HostMerger()

    def add(self, events: Sequence[HostEvent]) -> None:
        """Expect records of more events; another thread may decode meanwhile.

        Raises:
            FormatError: the kernel describes one in a way that we do not know.
        """
        for event in events:
            shape = EventShape(event, self._symbol_at, self._fresh)
            self._shapes.events[shape.number] = shape

    def decode(self, pages: Pages) -> HostDecoded:
        """Return what some pages have; tasks are not named yet.

        Raises:
            RingError: bytes that no kernel wrote.
        """
        decoded = decode_pages(pages, self._shapes)
        self._names.note(decoded.namings)
        return decoded

    def push(self, decoded: Sequence[HostDecoded], until: int | None = None) -> Events:
        """Take what a round has brought, and return what is safe to show, oldest first.

        Args:
            decoded: of it.
            until: up to which time nothing comes any more, where that is known.
        """
        return self._named(self._merger.push(decoded, until))

    def finish(self) -> Events:
        """Return everything that is still held."""
        return self._named(self._merger.finish())

    def _named(self, events: Events) -> Events:
        batches = tuple(replace(batch, comm=self._names.of(batch)) for batch in events.batches)
        self._names.forget_until(self._merger.horizon)
        return replace(events, batches=batches)
