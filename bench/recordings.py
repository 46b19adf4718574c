"""Recordings: their size, and the speed and memory of ``kprobe report`` and ``kprobe convert``.

A recording is made here, as a session writes it, of rings that are filled as a guest would fill
them; trace-cmd reads the trace.dat that it is converted to, and perf what it has recorded. Every
command is a process of its own, as a user's is, and takes its turn with the others. Its time is
that of the CPUs, its start included: other work on this machine hardly touches it. From rings to
columns, and from columns to lines: ``bench.decode``.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bench.isa import Isa
from bench.spread import Spread
from bench.table import Goal, Row, compared, times, verdict_of
from kprobes.errors import UsageError
from kprobes.export import SUFFIXES, exporter
from kprobes.model.clock import Unscaled
from kprobes.model.recording import RecordedRound
from kprobes.model.resolved import RecordLayout
from kprobes.recording_writer import open_recording
from kprobes.ring.chunk import Chunk, Committed
from tests.build.kernel import TEXT
from tests.build.recorded import CPUS, KERNEL, SYMBOLS
from tests.build.ring import Hit, make_layout, record

TITLE = "recordings: their size; report and convert, in seconds of CPU"

_EVENTS, _QUICK_EVENTS, _MORE = 1_000_000, 100_000, 10
_ROUNDS, _QUICK_ROUNDS = 6, 2
_TEXT, _JSON, _PEER = "report, text", "report, JSON lines", "trace-cmd report"
_DAT_TEXT, _DAT_COLUMNS = "report of a trace.dat, text", "columns of a trace.dat"
_AGAIN = "columns of a trace.dat, its second reading"
_GOALS = {_TEXT: 0.5, _DAT_TEXT: 5, _DAT_COLUMNS: 60, _AGAIN: 60}
"""Rates, as times of trace-cmd's."""
_PERF, _SYSTEM_CALLS = "perf script", 200_000
_KPROBE = sys.executable, "-m", "kprobes"
_COUNT = """\
import sys, time
from pathlib import Path
from kprobes.open_recording import read_events
for _ in range(int(sys.argv[2])):
    start = time.process_time()
    sum(map(len, read_events(Path(sys.argv[1]))))
print(time.process_time() - start)
"""
_FLAT = 1.25
"""Of the memory that a recording takes: what one of ten times as many events may take."""

Command = Sequence[str | Path]


class Built(Struct, frozen=True, kw_only=True):
    """A recording that was made.

    Attributes:
        path: of it.
        events: that it has.
        ring_bytes: that they took in their rings.
    """

    path: Path
    events: int
    ring_bytes: int


class Used(Struct, frozen=True, kw_only=True):
    """What a process took."""

    cpu_s: float
    peak_bytes: int


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Make recordings, and measure what is made of them."""
    del isa
    events, rounds = (_QUICK_EVENTS, _QUICK_ROUNDS) if quick else (_EVENTS, _ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = build(folder / "small.rec", events)
        commands = _commands(small, folder) | _peer(folder)
        perf = _perf_data(folder)
        commands |= {} if perf is None else {_PERF: ("perf", "script", "-i", perf.path)}
        used = _in_turn(commands, rounds)
        again = [_second_reading(folder / "out.dat") for _ in range(rounds)]
        sizes = _sizes(small, folder)
        large = build(folder / "large.rec", _MORE * events)
        larger = {each: _measured_once(each, large) for each in _commands(large, folder)}
    numbers = {} if perf is None else {_PERF: perf.events}
    rates = {
        name: Spread([each.cpu_s / numbers.get(name, small.events) * 1e9 for each in every])
        for name, every in used.items()
    }
    rates[_AGAIN] = Spread([each / small.events * 1e9 for each in again])
    return [
        *sizes,
        *(_speed(name, rates) for name in (_TEXT, _JSON, *_suffixes())),
        *(_beside_perf(rates) if perf is not None else ()),
        *(_speed(name, rates) for name in (_DAT_TEXT, _DAT_COLUMNS, _AGAIN) if _PEER in rates),
        *(_memory(name, used[name], each, small) for name, each in larger.items()),
    ]


def build(path: Path, events: int) -> Built:
    """Write a recording of at least so many events: whole looks at the rings of some CPUs."""
    rings = [_Ring(cpu) for cpu in range(CPUS)]
    looks = -(-events // (CPUS * _LAPS * _LAP))
    layouts, end = _LAYOUTS, RecordedRound(since_ns=0, real_ns=1, lost=(0,) * CPUS)
    ring_bytes = 0
    with open_recording(path) as writer:
        writer.begin(KERNEL, SYMBOLS)
        for _ in range(looks):
            found = [ring.look() for ring in rings]
            for each in found:
                writer.write_chunk(layouts, Unscaled(), each)
                layouts = ()
            writer.write_round((), end)
            ring_bytes += sum(len(each.chunk.data) for each in found)
    return Built(path=path, events=looks * CPUS * _LAPS * _LAP, ring_bytes=ring_bytes)


# To a process that is begun by a larger one Linux counts that one's memory, too: see
# setmax_mm_hiwater_rss in fs/exec.c. So a small one begins it.
_MEASURE = """\
import os, sys
to_null = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
number = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=to_null)
_, status, used = os.wait4(number, 0)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
sys.exit(bool(status))
"""


def measured(command: Command) -> Used:
    """Run a command, its output to /dev/null.

    Raises:
        RuntimeError: it failed.
    """
    words = [sys.executable, "-I", "-S", "-c", _MEASURE, *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr}")
    cpu_s, peak_kib = done.stdout.split()
    return Used(cpu_s=float(cpu_s), peak_bytes=int(peak_kib) << 10)


def _commands(built: Built, folder: Path) -> dict[str, Command]:
    converts: dict[str, Command] = {
        suffix: (*_KPROBE, "convert", built.path, folder / f"out{suffix}") for suffix in _suffixes()
    }
    return converts | {
        _JSON: (*_KPROBE, "report", built.path, "--format", "json"),
        _TEXT: (*_KPROBE, "report", built.path),
    }


def _suffixes() -> list[str]:
    # One of each exporter that has here what it needs.
    found: dict[str, str] = {}
    for suffix, place in SUFFIXES.items():
        try:
            exporter(Path(suffix).with_name(f"out{suffix}"))
        except UsageError:
            continue
        found.setdefault(place, suffix)
    return list(found.values())


def _peer(folder: Path) -> dict[str, Command]:
    # It reads what was converted before its turn.
    program = shutil.which("trace-cmd")
    if program is None:
        return {}
    file = folder / "out.dat"
    return {
        _PEER: (program, "report", "-i", file),
        _DAT_TEXT: (*_KPROBE, "report", file),
        _DAT_COLUMNS: (sys.executable, "-c", _COUNT, file, "1"),
    }


def _second_reading(file: Path) -> float:
    # Without Python's start, and our C is compiled then.
    command = [sys.executable, "-c", _COUNT, str(file), "2"]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _perf_data(folder: Path) -> Built | None:
    # Of system calls of this machine, which have seven numbers; None where that is not to be had.
    program, path = shutil.which("perf"), folder / "perf.data"
    if program is None:
        return None
    dd = "dd", "if=/dev/zero", "of=/dev/null", "bs=1", f"count={_SYSTEM_CALLS}"
    record = program, "record", "-q", "-e", "raw_syscalls:sys_enter", "-c", "1", "-o", path
    if subprocess.run([*record, "--", *dd], capture_output=True, check=False).returncode:
        return None
    script = [program, "script", "-i", path]
    lines = subprocess.run(script, capture_output=True, check=True).stdout.count(b"\n")
    return Built(path=path, events=lines, ring_bytes=0)


def _beside_perf(rates: Mapping[str, Spread]) -> Iterator[Row]:
    name = f"{_TEXT}, beside {_PERF} of system calls"
    yield compared(name, rates[_TEXT], rates[_PERF], None, show=_rate)


def _in_turn(commands: Mapping[str, Command], rounds: int) -> dict[str, list[Used]]:
    found: dict[str, list[Used]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            found[name].append(measured(command))
    return found


def _measured_once(name: str, built: Built) -> Used:
    # Nothing of what is written stays: it may be gigabytes.
    with tempfile.TemporaryDirectory(dir=built.path.parent) as folder:
        return measured(_commands(built, Path(folder))[name])


def _sizes(built: Built, folder: Path) -> list[Row]:
    ours = built.path.stat().st_size / built.events
    others = {
        "in a trace.dat, zstd": (folder / "out.dat").stat().st_size / built.events,
        "in the rings": built.ring_bytes / built.events,
    }
    return [
        Row(
            name=f"an event of {built.events:,}",
            figure=f"{ours:.1f} bytes",
            peer=f"{size:.1f} bytes {what}",
            ratio=times(size / ours),
        )
        for what, size in others.items()
    ]


def _speed(name: str, rates: Mapping[str, Spread]) -> Row:
    if name in _GOALS and _PEER in rates:
        return compared(name, rates[name], rates[_PEER], Goal(_GOALS[name]), show=_rate)
    title = f"convert to {name}" if name.startswith(".") else name
    return Row(name=title, figure=_rate(rates[name]))


def _rate(ns: Spread) -> str:
    return f"{1e3 / ns.value:.2f} M/s [{1e3 / ns.high:.2f} {1e3 / ns.low:.2f}]"


def _memory(name: str, used: Sequence[Used], larger: Used, built: Built) -> Row:
    peak = max(each.peak_bytes for each in used)
    return Row(
        name=f"memory at {built.events / 1e6:.1f} M events: {name}",
        figure=f"{peak / 1e6:,.0f} MB",
        goal=f"{_FLAT:g}x",
        peer=f"{larger.peak_bytes / 1e6:,.0f} MB at {_MORE} times as many",
        ratio=times(larger.peak_bytes / peak),
        verdict=verdict_of(larger.peak_bytes <= _FLAT * peak),
    )


_READ = make_layout(1, ("x64", "u64"), event="read", names=("file", "count"))
_DONE = make_layout(
    2, ("s64", "duration"), event="done", names=("ret", "took"), has_caller=True, can_fault=True
)
_OPEN = make_layout(
    3, ("s64", "string"), event="open", names=("dfd", "path"), where="do_sys_openat2+0x0/0x170"
)
_LAYOUTS = (_READ, _DONE, _OPEN)
_PATHS = (b"/etc/passwd", b"/usr/lib/libc.so.6.1", b"/proc/self/status", b"/tmp/a-file-of-ours.txt")
_LAP = 64
"""Events of a CPU until their kinds and texts are the same again."""
_LAPS = 256
"""Of a CPU in one look at its ring: a megabyte."""
_TASKS = 20
_FIRST_TASK = 1 << 63 | 1 << 56 | 1000
"""Its pid and context in one word: interrupts are on, and no preemption is wanted."""
_FIRST_COMM = int.from_bytes(b"task-a\0\0", "little")

Words = NDArray[np.uint64]
Places = NDArray[np.int64]


class _Ring:
    # The ring of a CPU; its times go their own way. A lap is one task's.
    def __init__(self, cpu: int) -> None:
        self._cpu, self._position, self._now = cpu, 0, 1_000_000_000
        self._random = np.random.default_rng(cpu)
        hits = [_hit(number) for number in range(cpu, cpu + _LAP)]
        records = [record(hit, 0) for hit in hits]
        self._lap = np.frombuffer(b"".join(records), np.uint64)
        ends = np.cumsum([len(each) // 8 for each in records])
        self._starts = np.append(0, ends[:-1])
        self._ids = np.array([hit.layout.event_id for hit in hits])

    def look(self) -> Committed:
        """Fill it, and return what one look at it finds."""
        words = np.tile(self._lap, (_LAPS, 1))
        places = np.arange(words.size, dtype=np.uint64).reshape(words.shape) * np.uint64(8)
        positions = places[:, self._starts] + np.uint64(self._position)
        words[:, self._starts] |= positions << np.uint64(16)
        tasks = self._random.integers(0, _TASKS, (_LAPS, 1), np.uint64)
        words[:, self._starts + 2] = np.uint64(_FIRST_TASK) + tasks
        # Its sixth byte is the letter.
        words[:, self._starts + 3] = np.uint64(_FIRST_COMM) + (tasks << np.uint64(40))
        self._fill(words)
        data = words.reshape(-1).view(np.uint8)
        chunk = Chunk(
            cpu=self._cpu, position=self._position, limit=len(data), data=data, commits=data
        )
        self._position += len(data)
        ids, counts = np.unique(self._ids, return_counts=True)
        return Committed(
            chunk=chunk,
            counts=dict(zip(ids.tolist(), (_LAPS * counts).tolist(), strict=True)),
            latest=self._now,
            is_blocked=False,
            is_lost=False,
            damaged=0,
        )

    def _fill(self, words: Words) -> None:
        # Times, and what the fields have.
        steps = self._random.integers(200, 2000, (_LAPS, _LAP), np.uint64)
        ts = np.uint64(self._now) + np.cumsum(steps).reshape(steps.shape)
        self._now = int(ts[-1, -1])
        words[:, self._starts + 1] = ts
        words[:, self._places(_READ, 0)] = self._some(_READ, 300) * np.uint64(256) + np.uint64(TEXT)
        words[:, self._places(_READ, 1)] = self._some(_READ, 64) * np.uint64(512)
        words[:, self._places(_DONE, 0)] = self._some(_DONE, 4096)
        took = self._some(_DONE, 30_000)
        words[:, self._places(_DONE, 1)] = ts[:, self._ids == _DONE.event_id] - took

    def _places(self, layout: RecordLayout, field: int) -> Places:
        own = self._starts[self._ids == layout.event_id]
        return own + layout.fields[field].offset // 8

    def _some(self, layout: RecordLayout, stop: int) -> Words:
        count = np.count_nonzero(self._ids == layout.event_id)
        return self._random.integers(0, stop, (_LAPS, count), np.uint64)


def _hit(number: int) -> Hit:
    layout = _LAYOUTS[number % len(_LAYOUTS)]
    path = _PATHS[number // len(_LAYOUTS) % len(_PATHS)]
    values = (-100 & (1 << 64) - 1, path) if layout is _OPEN else (0, 0)
    return Hit(layout=layout, values=values, caller=TEXT + number % 8)
