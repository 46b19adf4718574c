"""Speed of rings to columns and columns to text, beside ``trace-cmd report``.

The rings are made here, as a guest would fill them, in memory of this machine.
"""

import io
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bench.isa import Isa
from bench.table import Row, times, verdict_of
from bench.tracedat import write_trace_dat
from kprobes.model.events import Events
from kprobes.model.resolved import HEADER, RecordLayout
from kprobes.ring.chunk import Bytes, Decoded, Shapes
from kprobes.ring.merge import Merger, in_order
from kprobes.ring.reader import Geometry, RingReader
from kprobes.sinks import FORMATS
from kprobes.sinks.names import TraceSource
from tests.build.ring import make_layout

RING = 16 << 20
SLACK = 64 << 10


class _Clock:
    # Counts are nanoseconds; the second CPU's events lie between the first's.
    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        return counter + np.uint64(50) if cpu else counter


_CLOCK = _Clock()


TITLE = "decode: rings to columns, columns to text, on one core"

_GOAL = 50e6
"""Records per second from a ring to columns."""
_GOAL_OF_PEER = 0.5
"""The text sink's rate as a share of trace-cmd's."""


class Rate(Struct, frozen=True, kw_only=True):
    """One measurement: events per second, the best of several runs."""

    name: str
    events: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.events / self.seconds

    def __str__(self) -> str:
        return f"{self.rate / 1e6:.2f} M/s ({self.seconds / self.events * 1e9:.1f} ns)"


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Measure everything that needs no guest, and so no architecture."""
    del isa
    runs = 2 if quick else 5
    decoding, written = _decoding(runs), _writing(runs)
    peer = _trace_cmd(runs)
    return [
        _row(decoding[0], goal=_GOAL),
        *(_row(rate) for rate in (*decoding[1:], *_strings(runs))),
        _beside(written[0], peer),
        *(_row(rate) for rate in written[1:]),
    ]


def _row(rate: Rate, goal: float | None = None) -> Row:
    return Row(
        name=rate.name,
        figure=str(rate),
        goal="" if goal is None else f"{goal / 1e6:g} M/s",
        verdict=verdict_of(None if goal is None else rate.rate >= goal),
    )


def _beside(ours: Rate, peer: Rate | None) -> Row:
    if peer is None:
        return Row(name=ours.name, figure=str(ours), peer="trace-cmd is not installed")
    return Row(
        name=ours.name,
        figure=str(ours),
        goal=f"{_GOAL_OF_PEER:g}x",
        peer=f"{peer} {peer.name}",
        ratio=times(ours.rate / peer.rate),
        verdict=verdict_of(ours.rate >= _GOAL_OF_PEER * peer.rate),
    )


def _decoding(runs: int) -> list[Rate]:
    one = make_layout(1, ("u64",))
    four = [make_layout(i + 1, ("u64",) * n) for i, n in enumerate((0, 1, 2, 4))]
    bytes32 = make_layout(2, ("u64",) * 4)
    rows: list[Rate] = []
    for name, layouts in (
        ("ring to columns: 48-byte records", [one]),
        ("ring to columns: 72-byte records, 32 bytes of fields", [bytes32]),
        ("ring to columns: 4 events of 40 to 72 bytes in turn", four),
    ):
        memory, head = _ring(layouts)
        known = Shapes(layouts)
        rows.append(_best(name, runs, lambda m=memory, h=head, k=known: _count(_read(m, h, k))))
        rows.append(
            _best(
                "  and every column copied",
                runs,
                lambda m=memory, h=head, k=known: _copied(_read(m, h, k)),
            )
        )
    memory, head = _ring([one])
    known = Shapes([one])
    both = [*_read(memory, head, known), *_read(memory, head, known, cpu=1)]
    rows.append(
        _best("two CPUs' events merged by time, all interleaved", runs, lambda: _merge(both))
    )
    return rows


def _strings(runs: int) -> list[Rate]:
    memory, head, known = _string_ring()
    name = "ring to columns: one 20-byte string each"
    return [_best(name, runs, lambda: _count(_read(memory, head, known)))]


def _writing(runs: int) -> list[Rate]:
    layout = make_layout(1, ("x64", "u64"), event="read", names=("file", "count"))
    memory, head = _ring([layout], limit=250_000 * layout.size)
    numbers = _events(_read(memory, head, Shapes([layout])))
    memory, head, known = _string_ring()
    strings = _events(_read(memory, head, known))
    return [
        _best(f"{name} sink: {what}", runs, lambda n=name, e=events: _written(n, e))
        for name in FORMATS
        for what, events in (("two numbers", numbers), ("one 20-byte string", strings))
    ]


def _trace_cmd(runs: int) -> Rate | None:
    program = shutil.which("trace-cmd")
    if program is None:
        return None
    count = 300_000
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.dat"
        path.write_bytes(write_trace_dat(count))

        def report() -> int:
            command = [program, "report", "-i", str(path)]
            subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
            )
            return count

        return _best("trace-cmd report to /dev/null", min(runs, 3), report)


def _best(name: str, runs: int, work: Callable[[], int]) -> Rate:
    best, events = float("inf"), work()
    for _ in range(runs):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return Rate(name=name, events=events, seconds=best)


def _ring(layouts: Sequence[RecordLayout], *, limit: int = RING - 4096) -> tuple[Bytes, int]:
    # Records of the layouts in turn; one value in their fields, times 100 apart.
    memory = np.zeros(RING + SLACK, np.uint8)
    lap = sum(layout.size for layout in layouts)
    n = limit // lap * len(layouts)
    sizes = np.tile([layout.size for layout in layouts], n // len(layouts))
    ids = np.tile([layout.event_id for layout in layouts], n // len(layouts))
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    _headers(memory, starts, ids)
    return memory, int(starts[-1] + sizes[-1])


def _headers(memory: Bytes, starts: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
    words, at = memory.view(np.uint64), starts // 8
    words[at] = (starts << 16 | ids).astype(np.uint64)
    words[at + 1] = np.arange(len(at), dtype=np.uint64) * np.uint64(100)
    words[at + 2] = np.uint64(1 << 63 | 1 << 56) | np.uint64(1000) + np.uint64(1) * (
        np.arange(len(at), dtype=np.uint64) // np.uint64(500) % np.uint64(20)
    )
    words[at + 3] = np.frombuffer(b"bash\0\0\0\0", np.uint64)[0]


def _string_ring() -> tuple[Bytes, int, Shapes]:
    layout = make_layout(1, ("string",), event="open", names=("path",))
    memory = np.zeros(RING + SLACK, np.uint8)
    text = b"/usr/lib/libc.so.6.1\0"
    size = layout.size + 24
    starts = np.arange(150_000, dtype=np.int64) * size
    _headers(memory, starts, np.ones_like(starts))
    rows = memory[: len(starts) * size].reshape(-1, size)
    rows[:, HEADER : HEADER + 4] = np.frombuffer(size.to_bytes(4, "little"), np.uint8)
    located = (len(text) << 16 | layout.size).to_bytes(4, "little")
    offset = layout.fields[0].offset
    rows[:, offset : offset + 4] = np.frombuffer(located, np.uint8)
    rows[:, layout.size : layout.size + len(text)] = np.frombuffer(text, np.uint8)
    return memory, len(starts) * size, Shapes([layout])


def _read(memory: Bytes, head: int, known: Shapes, *, cpu: int = 0) -> list[Decoded]:
    # As a drain does: a copy for commit words, another for what they vouch for, then columns.
    reader = RingReader(
        Geometry(cpu=cpu, size=RING, slack=SLACK),
        lambda offset, size: memory[offset : offset + size].copy(),
    )
    return reader.read(head, known, _CLOCK)


def _count(decoded: list[Decoded]) -> int:
    return sum(map(len, decoded))


def _copied(decoded: list[Decoded]) -> int:
    for part in decoded:
        for batch in part.batches:
            for column in (batch.ts, batch.pid, batch.context, batch.comm, *batch.values):
                column.copy()
    return _count(decoded)


def _merge(decoded: list[Decoded]) -> int:
    merger = Merger()
    return len(merger.push(decoded)) + len(merger.finish())


def _events(decoded: list[Decoded]) -> Events:
    return in_order(batch for part in decoded for batch in part.batches)


def _written(name: str, events: Events) -> int:
    out = io.BytesIO()
    sink = FORMATS[name](out, TraceSource(version=(6, 1), cpus=2, entries=len(events)))
    sink.write(events)
    sink.close()
    return len(events)
