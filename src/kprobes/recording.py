"""Reader of recordings: of a file's frames what would have been made of the rings they are of.

The same columns in the same order as a trace has. A file may come from anybody: what no writer of
ours can have written is a FormatError, and what is damaged is passed over and counted.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from operator import add
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import FormatError, RingError
from kprobes.formats.ftrace import PageFormat
from kprobes.formats.kallsyms import SymbolTable
from kprobes.formats.recording import (
    CHUNK,
    CHUNK_IS_BLOCKED,
    FRAME_SIZE,
    HEADER_SIZE,
    MARKER,
    PAGES,
    FrameKind,
    check_file_header,
    parse_frame_header,
    unpack_frame,
)
from kprobes.image.symbols import ModuleSymbols, SymbolMap
from kprobes.model.clock import ClockValue, Unscaled, makes_sense
from kprobes.model.events import Counts, Events, Hits, HostEvent, Pages
from kprobes.model.kernel import place_of
from kprobes.model.recording import (
    RecordedClock,
    RecordedEvents,
    RecordedHostEvents,
    RecordedInstance,
    RecordedKernel,
    RecordedRound,
    RecordedSymbols,
    RecordingEnd,
    SymbolPart,
)
from kprobes.model.resolved import RecordLayout, Storage
from kprobes.ring.chunk import POSITION_MASK, Chunk, Decoded, Shapes
from kprobes.ring.ftrace import PID_LIMIT, HostDecoded, TaskNames
from kprobes.ring.ftrace_pages import PageDecoder, shapes_of
from kprobes.ring.merge import Merger, gathered
from kprobes.ring.reader import decode
from kprobes.sinks.names import TraceSource
from kprobes.timeline import Bounds

_NO_SYMBOLS = SymbolPart(module="", addrs=b"", types=b"", names=b"\0", ranges=())
_MAX_CPUS = 1 << 13
_MOST = 1 << 62
"""Of a count, and of a time in ns: what no machine comes to."""
_MAX_PAGE = 1 << 24
_PAGE_HEAD = 10
"""Bytes of a page's CPU and of what is skipped of it."""
_READ = 1 << 16
_MAX_ROUND = 1 << 28
"""Bytes of one look's chunks that are held at most: only in large rings one finds more."""
_AT_ONCE = 1 << 14
"""Events that are yielded together at least, of a file."""
_MAX_WASTED = 1 << 30
"""Bytes in damaged frames after which the rest is given up: each may be looked at many times."""
_T = TypeVar("_T")


def _symbol_map(found: RecordedSymbols) -> Callable[[int], str]:
    kernel, *modules = found.parts or (_NO_SYMBOLS,)
    owners = [
        ModuleSymbols(name=part.module, table=_table(part), ranges=part.ranges) for part in modules
    ]
    return partial(place_of, SymbolMap(_table(kernel), owners))


def _table(part: SymbolPart) -> SymbolTable:
    blob = np.frombuffer(part.names, np.uint8)
    starts = np.flatnonzero(blob == 0)[:-1] + 1
    if len(part.addrs) != 8 * len(starts) or len(part.types) != len(starts):
        raise FormatError("symbols of which some have no address")
    return SymbolTable(
        addrs=np.frombuffer(part.addrs, "<u8").astype(np.uint64),
        types=part.types,
        blob=part.names,
        starts=starts.astype(np.uint32),
    )


class _Frames:
    # The frames of a stream, one after the other, past what is damaged.

    def __init__(self, stream: BinaryIO) -> None:
        # What a pipe has is there at once, and not when there is more.
        self._read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
        # What was read; where the frame begins that is looked at, and what is taken next.
        self._held = bytearray()
        self._begin = self._at = 0
        self._wasted = 0
        self.damaged = 0
        self.is_cut = False
        check_file_header(self._take(HEADER_SIZE))

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        while True:
            self._begin = self._at
            head, stored = self._take(FRAME_SIZE), b""
            if len(head) < FRAME_SIZE:
                self.is_cut = self.is_cut or bool(head)
                return
            try:
                header = parse_frame_header(head)
                stored = self._take(header.stored)
                found = header.kind, unpack_frame(header, stored)
            except FormatError:
                self._wasted += FRAME_SIZE + len(stored)
                self._at = self._begin + 1
                if self._wasted > _MAX_WASTED or not self._find_marker():
                    # The last frame: whoever wrote it was stopped.
                    self.is_cut = True
                    return
                self.damaged += 1
                continue
            yield found

    def _take(self, size: int) -> bytes:
        # Fewer at the end.
        while (missing := size - (len(self._held) - self._at)) > 0 and self._fill(missing):
            pass
        taken = bytes(self._held[self._at : self._at + size])
        self._at += len(taken)
        return taken

    def _fill(self, missing: int) -> bool:
        # What stands before the frame that is being read is not needed again.
        if self._begin > _READ:
            del self._held[: self._begin]
            self._begin, self._at = 0, self._at - self._begin
        more = self._read(max(missing, _READ))
        self._held += more
        return bool(more)

    def _find_marker(self) -> bool:
        while (at := self._held.find(MARKER, self._at)) < 0:
            self._begin = self._at = max(len(self._held) - len(MARKER), self._at)
            if not self._fill(0):
                return False
        self._begin = self._at = at
        return True


class RecordedBoot(Struct, frozen=True, kw_only=True):
    """Events of one boot of a kernel.

    Attributes:
        kernel: that it is.
        source: what sinks need to know of it; names may become known while events are read.
        rounds: the events, oldest first, as they were drained.
        new_lost: CPUs, and how many of its events were lost since this was asked last: after what
            was read until then, and before what is read next.
    """

    kernel: RecordedKernel
    source: TraceSource
    rounds: Iterator[Events]
    new_lost: Callable[[], list[tuple[int, int]]]


class Recording:
    """A recording that is read once, from its beginning to its end.

    Attributes:
        damaged: frames, and places in the rings, that were passed over so far.
        is_cut: whether the file ended within a frame: its writer was stopped.
        end: what was counted in the boot that was read last; None where its writer was stopped.
        continued: in which file it goes on, "" where in none.
        layouts: of all events so far, by number, of that boot.
        bounds: of that boot's clock and real time.
        is_ours, left_out: as of ``open_recording.EventFile``.
    """

    is_ours = True
    left_out: Sequence[str] = ()

    def __init__(self, stream: BinaryIO) -> None:
        """Read the header of a file that begins here.

        Raises:
            FormatError: it is no recording, or one of another version.
        """
        # What comes through a pipe may go on for long.
        self._at_once = _AT_ONCE if stream.seekable() else 1
        self._frames = _Frames(stream)
        self._each = iter(self._frames)
        self._kernel: RecordedKernel | None = None
        self._begin()

    def _begin(self) -> None:
        self.bounds = Bounds()
        self.end: RecordingEnd | None = None
        self.continued = ""
        # Up to the events that were yielded; and after those that wait for the next round.
        self._lost: tuple[int, ...] = ()
        self._next_lost: tuple[int, ...] = ()
        self._reported_lost: tuple[int, ...] = ()
        self._damaged = self._real_ns = 0
        self._recorded: Counter[int] = Counter()
        self._shapes = Shapes()
        self._merger = Merger()
        self._clock: ClockValue = Unscaled()
        self._found: list[Decoded] = []
        # Of this machine's own kernel: what decodes the pages, and what those of a round are.
        self._pages: PageDecoder | None = None
        self._host_found: list[HostDecoded] = []
        self._host_layouts: dict[int, RecordLayout] = {}
        self._names: Callable[[int], str] = hex

    @property
    def damaged(self) -> int:
        """Frames that were passed over so far, and places in the rings."""
        return self._frames.damaged + self._damaged

    @property
    def lost(self) -> int:
        """Records that were dropped so far because a ring was full, in the boot that is read."""
        return sum(self._lost)

    @property
    def is_cut(self) -> bool:
        """Whether the file ended within a frame: its writer was stopped."""
        return self._frames.is_cut

    @property
    def counted(self) -> RecordingEnd:
        """What was counted in the boot that is read: what is there, if its writer was stopped."""
        if self.end is not None:
            return self.end
        hits = [
            Hits(
                event=layout.event,
                event_id=number,
                function=layout.where,
                recorded=self._recorded[number],
                missed=0,
            )
            for number, layout in sorted(self.layouts.items())
        ]
        counts = Counts(
            recorded=dict(self._recorded), missed={}, lost=self.lost, damaged=self._damaged
        )
        return RecordingEnd(real_ns=self._real_ns, counts=counts, hits=tuple(hits))

    @property
    def layouts(self) -> dict[int, RecordLayout]:
        """The events of the boot that is read, by number."""
        return {**self._shapes.layouts, **self._host_layouts}

    def boots(self) -> Iterator[RecordedBoot]:
        """Yield boot after boot; the rounds of one are to be read before the next one."""
        for kind, data in self._each:
            if kind == FrameKind.KERNEL:
                self._kernel = _decoded(data, RecordedKernel)
                break
        is_rebooted = False
        while self._kernel is not None:
            kernel, self._kernel = self._kernel, None
            self._begin()
            if not 0 < kernel.cpus <= _MAX_CPUS:
                raise FormatError(f"a recording of {kernel.cpus} CPUs")
            source = TraceSource(
                version=kernel.version,
                cpus=kernel.cpus,
                symbol_at=self.symbol_at,
                trampoline=kernel.trampoline,
                has_ns=kernel.has_ns,
                release=kernel.release,
                arch=kernel.arch,
                is_rebooted=is_rebooted,
            )
            is_rebooted = True
            yield RecordedBoot(
                kernel=kernel,
                source=source,
                rounds=self._gathered(self._rounds(kernel)),
                new_lost=self._new_lost,
            )

    def symbol_at(self, addr: int) -> str:
        """Return what ``%pS`` printed for an address, of the boot that is read."""
        return self._names(addr)

    def _gathered(self, rounds: Iterator[Events]) -> Iterator[Events]:
        # Of where there are few in each look, many at once; what was lost stays between them.
        held: list[Events] = []
        count, lost = 0, self.lost
        for events in rounds:
            if len(events):
                held.append(events)
                count += len(events)
            if count >= self._at_once or self.lost != lost:
                yield gathered(held or [events])
                held, count, lost = [], 0, self.lost
        if held:
            yield gathered(held)

    def _rounds(self, kernel: RecordedKernel) -> Iterator[Events]:
        held = 0
        for kind, data in self._each:
            match kind:
                case FrameKind.KERNEL:
                    self._kernel = _decoded(data, RecordedKernel)
                    break
                case FrameKind.CHUNK:
                    held += len(data)
                    self._found.append(self._chunk(data, kernel.cpus))
                    if held > _MAX_ROUND:
                        yield self._pushed()
                        held = 0
                case FrameKind.PAGES:
                    held += len(data)
                    self._host_found.append(self._decoded_pages(data))
                    if held > _MAX_ROUND:
                        yield self._pushed()
                        held = 0
                case FrameKind.ROUND:
                    held = 0
                    yield self._round(_decoded(data, RecordedRound))
                case _:
                    self._take(kind, data, kernel)
        # A round that its writer did not finish.
        self._lost = self._next_lost
        yield self._pushed()
        last = self._merger if self._pages is None else self._pages
        yield self._counted(last.finish())

    def _take(self, kind: int, data: bytes, kernel: RecordedKernel) -> None:
        match kind:
            case FrameKind.EVENTS:
                for layout in _decoded(data, RecordedEvents).layouts:
                    self._add(layout)
            case FrameKind.SYMBOLS:
                self._names = _symbol_map(_decoded(data, RecordedSymbols))
            case FrameKind.CLOCK:
                clock = _decoded(data, RecordedClock).clock
                if not makes_sense(clock, kernel.cpus):
                    raise FormatError("a recording whose clock makes no sense")
                self._clock = clock
            case FrameKind.END:
                self.end = _decoded(data, RecordingEnd)
            case FrameKind.CONTINUED:
                self.continued = data.decode(errors="surrogateescape")
            case _:
                # Or one of a later version.
                self._take_host(kind, data, kernel)

    def _take_host(self, kind: int, data: bytes, kernel: RecordedKernel) -> None:
        match kind:
            case FrameKind.INSTANCE:
                self._pages = self._page_decoder(_decoded(data, RecordedInstance), kernel)
            case FrameKind.HOST_EVENTS:
                self._add_host(_decoded(data, RecordedHostEvents).events)
            case _:
                pass

    def _add(self, layout: RecordLayout) -> None:
        _check_layout(layout)
        has_dynamic = any(e.storage in (Storage.STRING, Storage.STACK) for e in layout.fields)
        if has_dynamic and not layout.is_dynamic:
            raise FormatError("a recording with an event that cannot be")
        with _as_format_errors("a recording with an event that cannot be"):
            self._shapes.add(layout)

    def _page_decoder(self, instance: RecordedInstance, kernel: RecordedKernel) -> PageDecoder:
        page = PageFormat(
            size=instance.page_size, data=instance.page_data, commit=instance.page_commit
        )
        if not 0 <= page.commit < page.data < page.size <= _MAX_PAGE or page.size % 8:
            raise FormatError("a recording of pages that cannot be")
        comms = {pid: comm for pid, comm in instance.comms.items() if 0 <= pid < PID_LIMIT}
        with _as_format_errors("a recording of tasks that cannot be"):
            shapes = shapes_of(page, kernel.version, instance.namings)
            return PageDecoder(shapes, TaskNames(comms, dict), self.symbol_at)

    def _add_host(self, events: Sequence[HostEvent]) -> None:
        if self._pages is None:
            raise FormatError("a recording with events of no instance")
        for layout in (layout for event in events for layout in event.layouts):
            _check_layout(layout)
        with _as_format_errors("a recording with an event that cannot be"):
            self._pages.add(events)
        self._host_layouts |= {each.event_id: each for event in events for each in event.layouts}

    def _decoded_pages(self, data: bytes) -> HostDecoded:
        if self._pages is None or len(data) < PAGES.size:
            raise FormatError("a recording with pages of no instance")
        count, size = PAGES.unpack_from(data)
        if len(data) != PAGES.size + count * (_PAGE_HEAD + size) or not count:
            raise FormatError("a recording with pages that cannot be")
        cpu = np.frombuffer(data, "<u2", count, PAGES.size)
        skips = np.frombuffer(data, "<u8", count, PAGES.size + 2 * count)
        found = np.frombuffer(data, np.uint8, offset=PAGES.size + _PAGE_HEAD * count)
        if cpu.max() >= _MAX_CPUS or skips.max() > size:
            raise FormatError("a recording with pages that cannot be")
        pages = Pages(data=found.reshape(count, size), cpu=cpu, skips=skips.astype(np.int64))
        with _as_format_errors("a recording with pages that cannot be"):
            return self._pages.decode(pages)

    def _chunk(self, data: bytes, cpus: int) -> Decoded:
        if len(data) < CHUNK.size:
            raise FormatError("a recording with a chunk without a beginning")
        cpu, flags, _, limit, position = CHUNK.unpack_from(data)
        found = np.frombuffer(data, np.uint8)[CHUNK.size :]
        if cpu >= cpus or limit > len(found) or position > POSITION_MASK:
            raise FormatError("a recording with a chunk that cannot be")
        chunk = Chunk(cpu=cpu, position=position, limit=limit, data=found, commits=found)
        decoded = decode(chunk, self._shapes, self._clock)
        self._damaged += decoded.damaged
        return replace(decoded, is_blocked=bool(flags & CHUNK_IS_BLOCKED))

    def _round(self, end: RecordedRound) -> Events:
        before, lost = self._next_lost, end.lost if end.new_lost is None else end.new_lost
        is_sound = len(before) <= len(lost) <= _MAX_CPUS and all(0 <= n <= _MOST for n in lost)
        if not (is_sound and 0 <= end.since_ns <= _MOST and 0 <= end.real_ns <= _MOST):
            raise FormatError("a recording with a round that cannot be")
        before += (0,) * (len(lost) - len(before))
        self._note_times(end)
        joined = max if end.new_lost is None else add
        # The rings were full after what this look has found, which comes with the next one.
        self._lost, self._next_lost = before, tuple(map(joined, before, lost))
        self._real_ns = end.real_ns
        ignored = set(end.ignored)
        if ignored:
            self._found = [
                replace(
                    each,
                    batches=tuple(b for b in each.batches if b.layout.event_id not in ignored),
                )
                for each in self._found
            ]
        return self._pushed()

    def _note_times(self, end: RecordedRound) -> None:
        every = (*self._found, *self._host_found)
        times = [batch.ts for each in every for batch in each.batches]
        if times:
            first, last = min(ts.min() for ts in times), max(ts.max() for ts in times)
            self.bounds.add(int(first), int(last), end.since_ns, end.real_ns)

    def _new_lost(self) -> list[tuple[int, int]]:
        before, self._reported_lost = self._reported_lost, self._lost
        pairs = enumerate(zip_longest(self._lost, before, fillvalue=0))
        return [(cpu, now - then) for cpu, (now, then) in pairs if now > then]

    def _pushed(self) -> Events:
        if self._pages is not None:
            of_host, self._host_found = self._host_found, []
            return self._counted(self._pages.push(of_host))
        found, self._found = self._found, []
        with _as_format_errors("a recording with records that cannot be"):
            return self._counted(self._merger.push(found))

    def _counted(self, events: Events) -> Events:
        for batch in events.batches:
            self._recorded[batch.layout.event_id] += len(batch)
        return events


def _check_layout(layout: RecordLayout) -> None:
    if layout.print_fmt:
        raise FormatError("a recording with an event that is not of a probe")
    if "\0" in layout.event + layout.group:
        raise FormatError("a recording with an event that cannot be")


@contextmanager
def _as_format_errors(what: str) -> Generator[None]:
    # Numbers of a file that no writer of ours can have written.
    try:
        yield
    except (RingError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise FormatError(f"{what}: {error}") from error


def _decoded(data: bytes, of: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=of)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"a recording with a frame of another kind: {error}") from error
