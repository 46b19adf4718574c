"""The records of an arena's rings as events in time order, and what was counted on the way.

The pump that suits a guest's memory.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.drain import ROOM, Drain, DrainThread, nothing
from kprobes.errors import GuestReplacedError
from kprobes.guest.arena import LOADS_SIZE, MISSED_SIZE, Arena
from kprobes.guest.clock import AnyClock
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.rings import MappedRange, open_rings
from kprobes.guest.triggers import TriggerWords
from kprobes.model.abi import LOAD_SIZE, SLACK
from kprobes.model.events import NO_EVENTS, Counts, Events
from kprobes.model.recording import RecordedRound
from kprobes.model.resolved import RecordLayout
from kprobes.recording_writer import RecordingWriter
from kprobes.ring.chunk import POSITION_MASK, Committed, Decoded, Shapes
from kprobes.ring.merge import Merger
from kprobes.ring.reader import Geometry, RingReader
from kprobes.transport.ram import StubRam
from kprobes.transport.stub import Stub
from kprobes.units import MIB

_STANDS = (
    "the guest's clock stands still between its ticks: its kernel uses no counter that is finer; "
    "time stamps are as coarse, and durations below a step are ? (null in JSON). On x86 "
    "`tsc=reliable` on the guest kernel's command line may help"
)
_LATE_SHARE = 8
"""Of the rings: where a look finds more than this part of them full, it is compressed in haste."""
_LOOKS = 16
"""At the rings, at most, one right after the other."""
_MOST_KEPT = 192 * MIB
"""Bytes that one look takes for a recording: a reader holds no more of one; see ``recording``."""
_PARTS = (
    "the counters of the guest's CPUs differ: time stamps of different CPUs cannot be compared. "
    "`--clock local` or `x86-tsc` shows each CPU's own time"
)


def _nothing() -> None:
    pass


def _ignore(words: str) -> None:
    del words


class Recorder:
    """Reads every ring of one arena, whether the guest runs or not.

    One thread at a time drains. Others may ``add``, ``ignore`` and count meanwhile: what is
    expected, and all that is counted, is under ``_lock``.

    Attributes:
        clock: of the time stamps.
        check: raises GuestReplacedError unless the rings are still ours.
        writer: takes the rings' bytes, of which nothing is decoded then; None where events are to
            be had.
        warn: is given, once, what is wrong with the guest's clock, for people.
        words: of triggers, or None.
        is_stopped: whether one has ended the recording; all that came before has been read.
    """

    def __init__(self, arena: Arena, memory: GuestMemory, clock: AnyClock) -> None:
        self._missed = MappedRange(memory, arena.missed, MISSED_SIZE)
        self._nmissed = MappedRange(memory, arena.nmissed, MISSED_SIZE)
        self._arena, self._memory = arena, memory
        self.clock = clock
        self._lock = threading.RLock()
        self.check: Callable[[], None] = _nothing
        self.writer: RecordingWriter | None = None
        self.warn: Callable[[str], None] = _ignore
        self.words: TriggerWords | None = None
        self._snapshots: int = 0
        self.is_stopped = False
        # Whether the last look has left some of what was there to be kept.
        self._is_cut = False
        # Raw counters do not stand; a guest's function may give the time of its last tick.
        self._may_stand, self._may_part = clock.function is not None, True
        self._shapes = Shapes()
        # Those that no writer has been given since the recording began.
        self._new: list[RecordLayout] = []
        self._merger = Merger()
        self._recorded: Counter[int] = Counter()
        # Events of this recording that are armed, and shown.
        self._taken: set[int] = set()
        # Those whose records are ours no more; and those that will be, with the heads up to which
        # their records still are.
        self._ignored: set[int] = set()
        self._ending: list[tuple[list[int], set[int]]] = []
        self._previous_ns = time.time_ns()
        self._rings = open_rings(arena, memory)
        self._readers = [
            RingReader(Geometry(cpu=ring.cpu, size=ring.size, slack=SLACK), ring.data.read)
            for ring in self._rings
        ]
        self.begin()

    def begin(self) -> None:
        """Start a recording: what the one before left in the rings is passed over.

        Counting begins at zero; nobody drains meanwhile.
        """
        if self._shapes.layouts:
            self._read()
        self._new = []
        self.is_stopped, self._snapshots = False, 0
        # The guest is never read under the lock: who drains may have it stopped, and wait for that.
        before = self._totals()
        self._lost_before = [reader.lost for reader in self._readers]
        with self._lock:
            self._merger = Merger()
            self._recorded.clear()
            self._taken.clear()
            self._before = before

    def add(self, layouts: Iterable[RecordLayout], *, are_shown: bool = True) -> None:
        """Expect records of more layouts, which nobody writes yet; another thread may drain.

        Args:
            layouts: of them.
            are_shown: else those that nobody wrote before, either, are not taken until ``show``.
        """
        new = {layout.event_id: layout for layout in layouts}
        with self._lock:
            self._ignored -= new.keys()
            if are_shown:
                self._taken |= new.keys()
            self._ignored |= new.keys() - self._taken
            for _, ending in self._ending:
                ending.difference_update(new)
            self._new += new.values()
            for number, layout in new.items():
                if self._shapes.layouts.get(number) != layout:
                    self._shapes.add(layout)

    def show(self, event_ids: Iterable[int]) -> None:
        """Take records of some events from now on."""
        found = set(event_ids)
        with self._lock:
            self._ignored -= found
            self._taken |= found

    def ignore(self, event_ids: Iterable[int]) -> None:
        """Take no more records of some events, which are armed no more.

        What has been reserved in the rings by now is still taken.
        """
        heads, ending = [ring.head for ring in self._rings], set(event_ids)
        with self._lock:
            self._taken -= ending
            self._ending.append((heads, ending))

    def drain(self) -> Events:
        """Return what is safe to show of all that the guest has recorded so far.

        Raises:
            KprobesError: the writer cannot write; what it has not got stays in the rings.
        """
        words, writer = self.words, self.writer
        is_stopped = words is not None and words.is_stopped
        snapshots = 0 if words is None else words.snapshots
        if writer is None:
            events = self._merger.push(self._read())
        else:
            events = NO_EVENTS
            # As often as the guest fills the rings meanwhile; but who ends it waits for this.
            for _ in range(_LOOKS):
                if not self._keep(writer):
                    break
            if snapshots != self._snapshots:
                writer.ask()
        self.is_stopped, self._snapshots = is_stopped, snapshots
        return events

    def checked_words(self) -> TriggerWords | None:
        """Return ``words``, of a guest that is still ours, or raise GuestReplacedError."""
        # Without triggers nothing is asked, which may stop the guest.
        if self.words is not None:
            self.check()
        return self.words

    def rest(self) -> Iterator[Events]:
        """Yield everything that is left; no probe is armed any more."""
        with suppress(GuestReplacedError):
            yield self.drain()
            while self._is_cut:
                yield self.drain()
        yield self._merger.finish()

    def counts(self) -> Counts:
        """Return what was counted since the recording began."""
        with self._lock:
            before, recorded = self._before, dict(self._recorded)
            ids = list(self._shapes.layouts)
        now = self._totals()
        missed, nmissed = now.missed - before.missed, now.nmissed - before.nmissed
        return Counts(
            recorded=recorded,
            missed={number: int(missed[number]) for number in ids},
            lost=now.lost - before.lost,
            damaged=now.damaged - before.damaged,
            nmissed={number: int(nmissed[number]) for number in ids},
        )

    def loads(self) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
        """Return what hits have taken so far: it is counted only while limits ask for it.

        Returns:
            New arrays of shape (n,), by event id: how many hits, and the seconds in the code of
            their probe.
        """
        with self._lock:
            size = LOAD_SIZE * (max(self._shapes.layouts, default=-1) + 1)
        found = self._mapped_loads.read(0, size).view(np.uint64).reshape(-1, 2)
        return found[:, 0], found[:, 1].astype(np.float64) * self.clock.tick_s

    @cached_property
    def _mapped_loads(self) -> MappedRange:
        # Few recordings have limits.
        return MappedRange(self._memory, self._arena.loads, LOADS_SIZE)

    @property
    def nmissed(self) -> int:
        """How many calls of all probes had no instance free for them, ever."""
        return int(_u64s(self._nmissed).sum())

    def _check_clock(self, found: Sequence[Decoded]) -> None:
        # Nothing is hit twice on one CPU at one time.
        if self._may_stand and any(
            np.any(batch.ts[1:] == batch.ts[:-1]) for decoded in found for batch in decoded.batches
        ):
            self._may_stand = False
            self.warn(_STANDS)
        self._check_parts()

    def _check_parts(self) -> None:
        if self._may_part and not self.clock.is_fit:
            self._may_part = False
            self.warn(_PARTS)

    def _totals(self) -> "_Totals":
        return _Totals(
            missed=_u64s(self._missed),
            nmissed=_u64s(self._nmissed),
            lost=sum(reader.lost for reader in self._readers),
            damaged=sum(reader.damaged for reader in self._readers),
        )

    def _read(self) -> list[Decoded]:
        self.check()
        self.clock.refresh()
        found: list[Decoded] = []
        for ring, reader in zip(self._rings, self._readers, strict=True):
            # Who is expected is added before the first record, so before this head.
            parts = reader.read(ring.head, self._shapes, self.clock)
            if parts:
                ring.free(reader.tail)
            reader.note_lost(ring.lost)
            found += parts
        self._check_clock(found)
        with self._lock:
            found = [self._without_ignored(decoded) for decoded in found]
            for decoded in found:
                for batch in decoded.batches:
                    self._recorded[batch.layout.event_id] += len(batch)
            self._end_events()
        return found

    def _keep(self, writer: RecordingWriter) -> bool:
        # Return whether there may soon be more than the rings hold.
        self.check()
        self.clock.refresh()
        since_ns, began_ns = self._previous_ns, time.time_ns()
        size, is_blocked = 0, False
        heads, most = [ring.head for ring in self._rings], _MOST_KEPT // len(self._rings)
        pairs = zip(heads, self._readers, strict=True)
        waiting = [(head - reader.tail) & POSITION_MASK for head, reader in pairs]
        is_late = sum(waiting) > len(self._rings) * self._arena.ring_size // _LATE_SHARE
        for ring, reader, head in zip(self._rings, self._readers, heads, strict=True):
            for each in reader.take(head, self._shapes, most):
                self._write_chunk(writer, each, is_late=is_late)
                ring.free(reader.tail)
                size += len(each.chunk.data)
                is_blocked = is_blocked or each.is_blocked
            ring.free(reader.tail)
            reader.note_lost(ring.lost)
        self._is_cut = max(waiting) > most and size > 0
        if not is_blocked:
            # Else what comes with the next look may be as old as what comes with this one.
            self._previous_ns = began_ns
        self._check_parts()
        layouts = self._take_new()
        with self._lock:
            ignored = tuple(sorted(self._ignored))
        if layouts or size:
            pairs = zip(self._readers, self._lost_before, strict=True)
            lost = tuple(reader.lost - before for reader, before in pairs)
            real_ns = time.time_ns()
            writer.write_round(
                layouts,
                RecordedRound(since_ns=since_ns, real_ns=real_ns, lost=lost, ignored=ignored),
            )
        with self._lock:
            self._end_events()
        return is_late or self._is_cut

    def _write_chunk(self, writer: RecordingWriter, each: Committed, *, is_late: bool) -> None:
        self._tell_clock(each)
        # Whose records were found was added before.
        writer.write_chunk(self._take_new(), self.clock.now, each, is_late=is_late)
        with self._lock:
            self._recorded.update(each.counts)

    def _take_new(self) -> list[RecordLayout]:
        with self._lock:
            layouts, self._new = self._new, []
        return layouts

    def _tell_clock(self, found: Committed) -> None:
        # It must not go back behind times that will be told of these.
        if found.latest is not None:
            self.clock.ns(np.array([found.latest], np.uint64), found.chunk.cpu)

    def _without_ignored(self, decoded: Decoded) -> Decoded:
        if not self._ignored:
            return decoded
        kept = (b for b in decoded.batches if b.layout.event_id not in self._ignored)
        return replace(decoded, batches=tuple(kept))

    def _end_events(self) -> None:
        tails = [reader.tail for reader in self._readers]
        for heads, ending in list(self._ending):
            passed = (
                (tail - head) & POSITION_MASK for tail, head in zip(tails, heads, strict=True)
            )
            if all(distance <= POSITION_MASK // 2 for distance in passed):
                self._ignored |= ending
                self._ending.remove((heads, ending))


class _Totals(Struct, frozen=True, kw_only=True, eq=False):
    # Per event id, uint64 (65536,), of hits and calls; and of all.
    missed: NDArray[np.uint64]
    nmissed: NDArray[np.uint64]
    lost: int
    damaged: int


def _u64s(counters: MappedRange) -> NDArray[np.uint64]:
    return counters.read(0, MISSED_SIZE).view(np.uint64)


_PAUSING_S = 0.25
"""Between pauses of a guest whose RAM is reached through the stub only."""


def open_drain(
    recorder: Recorder,
    guest: Guest,
    between: Sequence[Callable[[], None]] = (),
    at_end: Callable[[], None] = nothing,
    *,
    room: float = ROOM,
) -> Drain:
    """Start the pump that suits a guest's memory; ``stop`` ends it.

    Args:
        recorder: of the records.
        guest: that makes them.
        between: are called after each look, in the pump's thread.
        at_end: is called after the last look.
        room: bytes of events that may wait to be taken.
    """
    if isinstance(guest.memory.ram, StubRam):
        return PausingDrain(recorder, guest.stub, between, at_end)
    return DrainThread(recorder, between, at_end, room=room)


class PausingDrain:
    """Drains when it is asked, in one pause of the guest: its RAM is behind the stub only."""

    def __init__(
        self,
        recorder: Recorder,
        stub: Stub,
        between: Sequence[Callable[[], None]] = (),
        at_end: Callable[[], None] = nothing,
    ) -> None:
        self._recorder = recorder
        self._between, self._at_end = between, at_end
        self._stub = stub
        self._next = 0.0

    def take(self, timeout_s: float) -> Events | None:
        """Return the next events, or None when it is too early or there are none."""
        time.sleep(min(timeout_s, max(self._next - time.monotonic(), 0)))
        if timeout_s == 0 or time.monotonic() < self._next:
            return None
        with self._stub.paused():
            events = self._recorder.drain()
        for each in self._between:
            each()
        self._next = time.monotonic() + _PAUSING_S
        return events if len(events) else None

    def stop(self) -> None:
        """Drain no more, which is done only when it is asked for."""
        self._at_end()
