"""The events of a tracing instance of this machine's kernel, out of its rings into batches."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kprobes.drivers.host_collector import Collector
from kprobes.errors import TargetError
from kprobes.formats.event_format import PageFormat, parse_event, parse_page
from kprobes.model.batch import Events
from kprobes.model.host_event import EventFormat, HostEvent
from kprobes.model.host_pages import Pages
from kprobes.ring.host_context import Contexts
from kprobes.ring.host_decode import HostDecoded, HostShapes, decode_pages
from kprobes.ring.host_merge import HostMerger
from kprobes.ring.host_shapes import EventShape, naming_shape
from kprobes.ring.task_names import TaskNames
from kprobes.transport.task_comms import running_comms, saved_comms
from kprobes.transport.tracefs_pages import Rings, open_rings, read_text

NAMING_EVENTS = ("task/task_newtask", "task/task_rename")
"""Events that an instance must record too, if tasks are to be shown by their names at the hit.

Enable them before the reader is opened, and it before the probes.
"""

_MAPPED_SINCE = (6, 18)
"""Rings can be mapped since 6.10, but then readers of such rings could make the kernel warn in its
log: until "ring-buffer: Do not trigger WARN_ON() due to a commit_overrun" (6.16) and
"ring-buffer: Do not warn in ring_buffer_map_get_reader() when reader catches up" (6.18)."""

_NO_EVENTS = HostMerger().finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKernel:
    """What a reader must know of the kernel that it runs on.

    Attributes:
        version: major and minor of its release.
        symbol_at: an address to what ``%pS`` prints for it, as for a sink's ``Origin``.
    """

    version: tuple[int, int]
    symbol_at: Callable[[int], str]


class TracefsReader:
    """Implements ``model.host_event.HostReader``; ``open_reader`` makes it.

    One thread at a time drains; others may ask what was recorded, which is under ``_lock``.
    """

    def __init__(self, rings: Rings, shapes: HostShapes, names: TaskNames) -> None:
        self._rings = rings
        self._shapes = shapes
        self._names = names
        self._merger = HostMerger()
        self._lock = threading.Lock()
        self._recorded: Counter[int] = Counter()
        self._collector = Collector(rings)

    @property
    def recorded(self) -> Mapping[int, int]:
        """Events read so far, by their layouts' event ids."""
        with self._lock:
            return dict(self._recorded)

    @property
    def lost(self) -> int:
        """Events that the kernel dropped or overwrote before they were read.

        Those that only tell tasks' names are among them: the kernel does not say which.
        """
        return self._rings.lost

    def drain(self) -> Events:
        """Return what is safe to show of all that the kernel has recorded, oldest first.

        Raises:
            RingError: pages that no kernel wrote.
            TargetError: the instance is gone.
        """
        events = self._next()
        return _NO_EVENTS if events is None else events

    def rest(self) -> Iterator[Events]:
        """Yield everything that is left; the events are disabled.

        Raises:
            TargetError: the instance is gone; what was read before was yielded.
        """
        self._collector.stop()
        error = None
        try:
            while (events := self._next()) is not None:
                yield events
        except TargetError as e:
            error = e
        yield self._named(self._merger.finish())
        if error is not None:
            raise error

    def close(self) -> None:
        """Let go of the instance, which could not be removed before."""
        self._collector.stop()
        self._rings.close()

    def _next(self) -> Events | None:
        taken = self._collector.take()
        if taken is None:
            return None
        return self._named(self._merger.push([self._decoded(pages) for pages in taken]))

    def _decoded(self, pages: Pages) -> HostDecoded:
        decoded = decode_pages(pages, self._shapes)
        self._names.note(decoded.namings)
        with self._lock:
            for batch in decoded.batches:
                self._recorded[batch.layout.event_id] += len(batch)
        return decoded

    def _named(self, events: Events) -> Events:
        batches = tuple(replace(batch, comm=self._names.of(batch)) for batch in events.batches)
        self._names.settle(self._merger.horizon)
        return replace(events, batches=batches)


def open_reader(
    instance: Path,
    events: Sequence[HostEvent],
    kernel: HostKernel,
    *,
    is_mapped: bool | None = None,
) -> TracefsReader:
    """Open an instance's rings for reading; what is in them already is read too.

    Args:
        instance: ``instances/NAME`` of a tracefs.
        events: that it records; of others, records are passed over.
        kernel: that this machine runs.
        is_mapped: whether to map the rings where the kernel can; else by its release.

    Raises:
        UnreachableError: the rings cannot be opened.
        TargetError: a file of the instance cannot be read.
        FormatError: the kernel describes its events in a way that we do not know.
    """
    page = _page(instance)
    if is_mapped is None:
        is_mapped = kernel.version >= _MAPPED_SINCE
    rings = open_rings(instance, page, is_mapped=is_mapped)
    try:
        names = TaskNames(running_comms(), lambda: saved_comms(instance.parent.parent))
        return TracefsReader(rings, _shapes(instance, events, kernel, page), names)
    except BaseException:
        rings.close()
        raise


def read_format(instance: Path, event: str) -> EventFormat:
    """Read the format of an event, ``GROUP/EVENT``; TargetError when there is none."""
    return parse_event(read_text(instance / "events" / event / "format"))


def _shapes(
    instance: Path, events: Sequence[HostEvent], kernel: HostKernel, page: PageFormat
) -> HostShapes:
    ids = (layout.event_id for event in events for layout in event.layouts)
    fresh = itertools.count(max(ids, default=0) + 1)
    shapes = [EventShape(event, kernel.symbol_at, lambda: next(fresh)) for event in events]
    namings = [naming_shape(read_format(instance, event)) for event in _naming_events(instance)]
    return HostShapes(
        page=page,
        contexts=Contexts(kernel.version),
        events={shape.number: shape for shape in shapes},
        namings={shape.number: shape for shape in namings},
    )


def _naming_events(instance: Path) -> list[str]:
    return [event for event in NAMING_EVENTS if (instance / "events" / event).is_dir()]


def _page(instance: Path) -> PageFormat:
    page = parse_page(read_text(instance.parent.parent / "events" / "header_page"))
    # Since 6.8 an instance can have larger pages than the others.
    own = instance / "buffer_subbuf_size_kb"
    return replace(page, size=int(read_text(own)) * 1024) if own.exists() else page
