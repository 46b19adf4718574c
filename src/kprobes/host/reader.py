"""Reader of a tracing instance of this machine's kernel: out of its rings into batches.

Pages are taken out of the rings by a thread of its own: no ring waits until they are decoded.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import KprobesError, TargetError
from kprobes.formats.ftrace import PageFormat, parse_event, parse_page
from kprobes.host.events import HostFiles
from kprobes.host.machine import HostMachine
from kprobes.host.prepare import HostProbe
from kprobes.model.events import (
    NO_EVENTS,
    EventFormat,
    Events,
    HostEvent,
    Pages,
)
from kprobes.model.kernel import place_of
from kprobes.model.recording import RecordedInstance, RecordedRound
from kprobes.recording_writer import RecordingWriter
from kprobes.ring.ftrace import HostDecoded, HostShapes, TaskNames, count_pages
from kprobes.ring.ftrace_pages import PageDecoder, shapes_of
from kprobes.transport.tracefs import has_kernels_pids, running_comms, saved_comms
from kprobes.transport.tracefs_rings import Rings, open_rings, read_text

_LATE_SHARE = 4
"""Of the room that pages have: there is no time to compress what is more."""
_LOST_S = 0.1
_BUSY_S = 0.001
_IDLE_S = 0.02
_ROOM = 64 << 20
"""Bytes of pages that may wait to be decoded. Beyond, the rings fill, and the kernel counts."""


class Taken(Struct, frozen=True, kw_only=True, eq=False):
    """What whole rounds have brought.

    Attributes:
        pages: each CPU's in the ring's order.
        since_ns: when the last round before began, by CLOCK_REALTIME: records are of later.
    """

    pages: list[Pages]
    since_ns: int


class Collector:
    """A thread that empties rings, all of them in every round, from the first ``take`` on.

    That thread alone reads the rings, until ``stop`` has joined it; what it found, and how it
    ended, is under ``_lock``.
    """

    def __init__(self, rings: Rings, *, room: int = _ROOM) -> None:
        """Empty rings, until ``room`` bytes of pages wait to be taken."""
        self._rings = rings
        self._room = room
        self._lock = threading.Lock()
        self._held: list[Pages] = []
        # Whether a round was done since pages were taken, and when the last one began; and the
        # last one of those before.
        self._has_read = False
        self._began_ns = self._before_ns = time.time_ns()
        self._error: KprobesError | None = None
        self._is_broken = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kprobes-pages", daemon=True)

    def take(self) -> Taken | None:
        """Return what whole rounds have brought, None when none was done since the last time.

        Raises:
            TargetError: the rings are gone; all that was read before was taken.
        """
        if self._thread.ident is None and not self._stopping.is_set():
            self._thread.start()
        with self._lock:
            if self._has_read:
                taken = Taken(pages=self._held, since_ns=self._before_ns)
                self._held, self._has_read, self._before_ns = [], False, self._began_ns
                return taken
            if self._error is not None:
                raise self._error
            if self._is_broken:
                raise KprobesError("reading the rings ended by an error of our own")
            return None

    def stop(self) -> None:
        """End the thread and look once more; ``take`` gives the rest."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._poll()

    def _run(self) -> None:
        pause = _BUSY_S
        try:
            while not self._stopping.wait(pause):
                if self._has_room():
                    pause = _BUSY_S if self._poll() else min(2 * pause, _IDLE_S)
        except BaseException:
            self._is_broken = True
            raise

    def _has_room(self) -> bool:
        with self._lock:
            return sum(pages.data.nbytes for pages in self._held) < self._room

    def _poll(self) -> bool:
        found: list[Pages] = []
        began_ns, error = time.time_ns(), None
        try:
            found.extend(self._rings.read())
        except KprobesError as e:
            error = e
            self._stopping.set()
        with self._lock:
            self._held += found
            self._began_ns = began_ns if error is None else self._began_ns
            self._has_read = self._has_read or error is None or bool(found)
            self._error = error
        return bool(found)


NAMING_EVENTS = ("task/task_newtask", "task/task_rename")
"""Events that an instance must record too, if tasks are to be shown by their names at the hit.

Enable them before the reader is opened, and it before the probes.
"""

_MAPPED_SINCE = (6, 18)
"""Rings can be mapped since 6.10, but then readers of such rings could make the kernel warn in its
log: until "ring-buffer: Do not trigger WARN_ON() due to a commit_overrun" (6.16) and
"ring-buffer: Do not warn in ring_buffer_map_get_reader() when reader catches up" (6.18)."""


class HostKernel(Struct, frozen=True, kw_only=True):
    """What a reader must know of the kernel that it runs on.

    Attributes:
        version: major and minor of its release.
        symbol_at: an address to what ``%pS`` prints for it, as for a sink's ``TraceSource``.
    """

    version: tuple[int, int]
    symbol_at: Callable[[int], str]


class TracefsReader:
    """Implements ``driver.HostReader``; ``open_reader`` makes it.

    One thread at a time drains; others may ask what was recorded, which is under ``_lock``.
    """

    def __init__(
        self, rings: Rings, shapes: HostShapes, decoder: PageDecoder, instance: RecordedInstance
    ) -> None:
        self._rings = rings
        self._shapes = shapes
        self._decoder = decoder
        self._instance = instance
        self._writer: RecordingWriter | None = None
        self._lost: tuple[int, ...] = ()
        self._next_lost_s = 0.0
        self._lock = threading.Lock()
        # Those that no writer has been given.
        self._new: list[HostEvent] = []
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
            KprobesError: the writer cannot write.
        """
        if self._writer is not None:
            self._keep(self._writer)
            return NO_EVENTS
        events = self._next()
        return NO_EVENTS if events is None else events

    def rest(self) -> Iterator[Events]:
        """Yield everything that is left; the events are disabled.

        Raises:
            TargetError: the instance is gone; what was read before was yielded.
        """
        self._collector.stop()
        error = None
        try:
            if self._writer is not None:
                self._keep(self._writer, is_last=True)
            while (events := self._next()) is not None:
                yield events
        except TargetError as e:
            error = e
        yield self._decoder.finish()
        if error is not None:
            raise error

    def add(self, events: Sequence[HostEvent]) -> None:
        """Expect records of more events, which are not recorded yet; another thread may drain."""
        self._decoder.add(events)
        with self._lock:
            self._new += events

    def write_to(self, writer: RecordingWriter) -> None:
        """Have a writer get the pages from now on, before any was drained; there are no events.

        Raises:
            KprobesError: it cannot write.
        """
        writer.write_instance(self._instance)
        self._writer = writer

    def close(self) -> None:
        """Let go of the instance, which could not be removed before."""
        self._collector.stop()
        self._rings.close()

    def _next(self) -> Events | None:
        taken = self._collector.take()
        if taken is None:
            return None
        return self._decoder.push([self._decoded(pages) for pages in taken.pages])

    def _decoded(self, pages: Pages) -> HostDecoded:
        decoded = self._decoder.decode(pages)
        with self._lock:
            for batch in decoded.batches:
                self._recorded[batch.layout.event_id] += len(batch)
        return decoded

    def _keep(self, writer: RecordingWriter, *, is_last: bool = False) -> None:
        taken = self._collector.take()
        if taken is None or not (taken.pages or is_last):
            return
        if is_last or time.monotonic() > self._next_lost_s:
            # The kernel tells it in files, one for each CPU.
            self._next_lost_s = time.monotonic() + _LOST_S
            self._lost = self._rings.lost_by_cpu
        with self._lock:
            # Whose records were found was added before.
            events, self._new = self._new, []
        end = RecordedRound(since_ns=taken.since_ns, real_ns=time.time_ns(), lost=self._lost)
        size = sum(pages.data.nbytes for pages in taken.pages)
        writer.write_pages(events, taken.pages, end, is_late=size > _ROOM // _LATE_SHARE)
        for pages in taken.pages:
            counts = count_pages(pages, self._shapes)
            with self._lock:
                self._recorded.update(counts)


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
        comms = running_comms() if has_kernels_pids() else {}
        names = TaskNames(comms, lambda: saved_comms(instance.parent.parent))
        namings = [read_format(instance, event) for event in _naming_events(instance)]
        shapes = shapes_of(page, kernel.version, namings)
        decoder = PageDecoder(shapes, names, kernel.symbol_at)
        reader = TracefsReader(rings, shapes, decoder, _recorded(page, namings, comms))
        reader.add(events)
    except BaseException:
        rings.close()
        raise
    return reader


def _recorded(
    page: PageFormat, namings: Sequence[EventFormat], comms: dict[int, bytes]
) -> RecordedInstance:
    return RecordedInstance(
        page_size=page.size,
        page_data=page.data,
        page_commit=page.commit,
        namings=tuple(namings),
        comms=comms,
    )


def read_format(instance: Path, event: str) -> EventFormat:
    """Read the format of an event, ``GROUP/EVENT``; TargetError when there is none."""
    return parse_event(read_text(instance / "events" / event / "format"))


def _naming_events(instance: Path) -> list[str]:
    return [event for event in NAMING_EVENTS if (instance / "events" / event).is_dir()]


def _page(instance: Path) -> PageFormat:
    page = parse_page(read_text(instance.parent.parent / "events" / "header_page"))
    # Since 6.8 an instance can have larger pages than the others.
    own = instance / "buffer_subbuf_size_kb"
    return replace(page, size=int(read_text(own)) * 1024) if own.exists() else page


def open_instance_reader(
    machine: HostMachine, files: HostFiles, probes: Sequence[HostProbe]
) -> TracefsReader:
    """Open the rings of an instance whose probes are defined; tasks are named from then on.

    Args:
        machine: this machine's kernel.
        files: of the instance.
        probes: all that are defined in it.

    Raises:
        UnreachableError: the rings cannot be opened.
        TargetError: a file of the instance cannot be read.
    """
    files.name_tasks(NAMING_EVENTS)
    kernel = HostKernel(
        version=machine.kernel.version, symbol_at=partial(place_of, machine.kernel.symbols)
    )
    instance = machine.tracefs.path(files.instance)
    return open_reader(instance, read_events(machine, files, probes), kernel)


def read_events(
    machine: HostMachine, files: HostFiles, probes: Sequence[HostProbe]
) -> list[HostEvent]:
    """Read what records of some probes look like, which are defined.

    Args:
        machine: this machine's kernel.
        files: of the instance.
        probes: some that are defined in it.

    Raises:
        TargetError: a file of the instance cannot be read.
    """
    instance = machine.tracefs.path(files.instance)
    return [
        HostEvent(
            format=read_format(instance, files.name_of(probe)),
            layouts=(probe.resolved.layout,),
        )
        for probe in probes
    ]
