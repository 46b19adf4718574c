"""Two CPUs' rings, what traces print of them, and the recording of the same."""

import errno
import io
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from kprobes.image.modules import table_of
from kprobes.image.symbols import ModuleSymbols, SymbolMap
from kprobes.model.clock import ClockValue, Line
from kprobes.model.events import Events
from kprobes.model.kernel import place_of
from kprobes.model.recording import RecordedKernel, RecordedRound
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.recording import Recording
from kprobes.recording_writer import FileWriter, RecordingWriter
from kprobes.ring.chunk import Committed, Decoded, Shapes
from kprobes.ring.merge import Merger
from kprobes.ring.reader import Geometry, RingReader
from kprobes.sinks.names import TraceSource
from kprobes.sinks.text import TextSink
from tests.build.kernel import TEXT
from tests.build.ring import GuestRing, Hit, One, Value, make_layout

CPUS, SIZE, SLACK = 2, 1 << 13, 1 << 12
NUMBERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "x8", "x16", "x32", "x64")
LAYOUTS = (
    make_layout(1, ("u64",), event="read"),
    make_layout(2, NUMBERS, can_fault=True),
    make_layout(3, ("s32", "ustring", "string", "comm")),
    make_layout(4, ("u8[3]", "string[2]", "text=hello", "x64[2]", "char"), can_fault=True),
    make_layout(5, ("s64", "duration", "symbol", "symstr"), has_caller=True, can_fault=True),
)
MODULE = 0xFFFF_FFFF_C000_0000
EVENTS = int(os.environ.get("KPROBES_EVENTS", "600"))
"""Of a recording that each exporter is given: two million take minutes."""


def _symbols() -> SymbolMap:
    rows = (
        (TEXT, b"_stext"),
        (TEXT, b"vfs_read"),
        (TEXT + 256, b"ext_read"),
        (TEXT + 320, b"_end"),
    )
    kernel = table_of([n for _, n in rows], np.array([a for a, _ in rows], np.uint64), b"TTTT")
    own = table_of([b"mod_open"], np.array([MODULE], np.uint64), b"t")
    module = ModuleSymbols(name="mod", table=own, ranges=((MODULE, MODULE + 256),))
    return SymbolMap(kernel, [module])


SYMBOLS = _symbols()
KERNEL = RecordedKernel(
    release="6.1.0",
    arch="x86_64",
    build_id=b"\1\2",
    version=(6, 1),
    target="qemu:here",
    cpus=CPUS,
    trampoline=None,
    has_ns=True,
    real_ns=5,
    writer="kprobe test",
)
CLOCK = Line(ns_at=7, cycles=0, mult=3, shift=1)


class Memory(io.BytesIO):
    """A file that can still be read when it was closed, and has no disk."""

    def close(self) -> None:
        """Keep the bytes."""

    def fileno(self) -> int:
        """Have none."""
        raise OSError


class Full(Memory):
    """A disk that is full after some bytes."""

    room = 2000

    def write(self, data: Any, /) -> int:
        size = min(len(data), self.room - len(self.getvalue()))
        if not size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(data[:size]))


@dataclass
class Recorded:
    """Rings that are looked at by a trace and by a recording, round by round."""

    clock: ClockValue = CLOCK
    since_ns: int = 0
    real_ns: int = 9
    layouts: Sequence[RecordLayout] = LAYOUTS
    file: Memory = field(default_factory=Memory)
    rings: list[GuestRing] = field(
        default_factory=lambda: [GuestRing(size=SIZE, slack=SLACK) for _ in range(CPUS)]
    )
    traced: list[Events] = field(default_factory=list[Events])

    def __post_init__(self) -> None:
        """Begin with empty rings."""
        self.writer: RecordingWriter = FileWriter(self.file)
        self.writer.begin(KERNEL, SYMBOLS)
        self._shapes = Shapes(self.layouts)
        self._merger = Merger()
        self._readers = [(self._reader(cpu), self._reader(cpu)) for cpu in range(CPUS)]
        self._new = self.layouts

    def _reader(self, cpu: int) -> RingReader:
        return RingReader(Geometry(cpu=cpu, size=SIZE, slack=SLACK), self.rings[cpu].copy)

    def look(self, *, is_whole: bool = True) -> None:
        """Have one round of both; what is kept is of the next one, too, unless it is whole."""
        decoded: list[Decoded] = []
        taken: list[Committed] = []
        for ring, (traced, kept) in zip(self.rings, self._readers, strict=True):
            decoded += traced.read(ring.head, self._shapes, self.clock)
            taken += kept.take(ring.head, self._shapes, 1 << 40)
            assert traced.tail == kept.tail
            ring.tail = kept.tail
        self.traced.append(self._merger.push(decoded))
        lost = tuple(ring.lost for ring in self.rings)
        end = RecordedRound(since_ns=self.since_ns, real_ns=self.real_ns, lost=lost)
        for each in taken:
            self.writer.write_chunk(self._new, self.clock, each)
            self._new = ()
        if is_whole:
            self.writer.write_round(self._new, end)
            self._new = ()

    def begin_anew(self) -> None:
        """Have empty rings again, of another boot."""
        self.rings = [GuestRing(size=SIZE, slack=SLACK) for _ in range(CPUS)]
        self._readers = [(self._reader(cpu), self._reader(cpu)) for cpu in range(CPUS)]
        self._merger, self._new = Merger(), self.layouts

    def end(self) -> bytes:
        """Return the file."""
        self.traced.append(self._merger.finish())
        self.writer.close()
        return self.file.getvalue()


class Pipe(io.BytesIO):
    """What can only be read on: of it events come as they were found, in many rounds."""

    def seekable(self) -> bool:
        """Return False."""
        return False


def read(data: bytes, *, is_file: bool = False) -> tuple[list[Events], Recording]:
    """Return what is read of a pipe, or of a file."""
    recording = Recording(io.BytesIO(data) if is_file else Pipe(data))
    return [events for boot in recording.boots() for events in boot.rounds], recording


def text_of(rounds: Sequence[Events], symbol_at: Callable[[int], str] | None = None) -> bytes:
    """Return what is printed of events, by the kernel's own names if no others are given."""
    out = io.BytesIO()
    source = TraceSource(
        version=KERNEL.version,
        cpus=CPUS,
        entries=sum(map(len, rounds)),
        symbol_at=symbol_at or partial(place_of, SYMBOLS),
    )
    sink = TextSink(out, source)
    for events in rounds:
        sink.write(events)
    sink.close()
    return out.getvalue()


def printed(data: bytes) -> bytes:
    """Return what is printed of a file by its own names."""
    rounds, recording = read(data)
    return text_of(rounds, recording.symbol_at)


def hits(count: int, seed: int = 1) -> Iterator[tuple[int, Hit]]:
    """Yield hits of all kinds, each with its CPU, as time goes by."""
    rng = random.Random(seed)
    now = 1000
    for _ in range(count):
        now += rng.randrange(1, 50)
        layout = rng.choice(LAYOUTS)
        hit = Hit(
            layout=layout,
            counter=now,
            pid=rng.randrange(1, 99),
            comm=rng.choice((b"cat", b"\xff\xfe", b"a name of fifte")),
            values=tuple(_value(rng, each, layout, now) for each in layout.fields),
            caller=rng.choice((TEXT, MODULE)) + rng.randrange(512),
        )
        yield rng.randrange(CPUS), hit


def recorded(count: int, *, every: int = 40, seed: int = 1, since: int = 7) -> bytes:
    """Return the recording of so many hits, with a look after some of them, from a time on."""
    return record(count, every=every, seed=seed, since=since).end()


def record(count: int, *, every: int = 40, seed: int = 1, since: int = 7) -> Recorded:
    """Record so many hits, with a look after some of them, from a time on."""
    found = Recorded(clock=replace(CLOCK, ns_at=since))
    for number, (cpu, hit) in enumerate(hits(count, seed)):
        found.rings[cpu].write(hit)
        if not number % every:
            found.look()
    found.look()
    return found


def _value(rng: random.Random, item: Field, layout: RecordLayout, now: int) -> Value:
    can_fault = layout.faults_offset is not None or item.storage is Storage.STRING
    if item.storage is Storage.DURATION:
        return now - rng.randrange(100)
    if can_fault and rng.random() < 0.2:
        return None if item.count is None or item.storage is Storage.NUMBER else (None, b"x")
    ones = tuple(_one(rng, item) for _ in range(item.count or 1))
    return ones if item.count else ones[0]


def _one(rng: random.Random, item: Field) -> One:
    if item.storage is Storage.STRING:
        return rng.choice((b"", b"/etc/passwd", b"\xc3\x28 no UTF-8", b'"quoted"\n'))
    return TEXT + rng.randrange(600) if item.type in ("symbol", "symstr") else rng.getrandbits(64)
