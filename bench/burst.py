"""A burst of two million hits on two vCPUs while all of it is written to a file: what is lost.

The guest's two CPUs, the thread that drains and the one that formats all want a CPU of this
machine at once. Then the same for a minute into a recording: as fast as the guest can, the loop
alone first.
"""

import tempfile
import threading
import time
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bench.elf_program import Loop
from bench.guest import Rig, attached, machine
from bench.isa import Isa
from bench.table import Row, verdict_of
from kprobes.guest.arena import ArenaSize
from kprobes.sinks import FORMATS
from kprobes.transport.qemu import Machine
from kprobes.units import MIB

TITLE = "burst: hits on 2 vCPUs at once, drained to a file"

_STEPS, _REPEATS, _QUICK_REPEATS = 10_000, 100, 20
_NAME, _LONG_NAME = "burst", "burst-long"
_LONG, _QUICK_LONG = 30, 10
"""Times as long as a burst."""
_LOST = {1: 0.0, 2: 0.01, 4: 1.0}
"""Probes at the function, each with a record of its own, and the share that may be lost."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What one burst brought, with rings of ``ring`` bytes: hits made, lines written, seconds."""

    ring: int
    hits: int
    written: int
    lost: int
    burst_s: float
    whole_s: float


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot a guest; let it burst with rings of several sizes."""
    repeats, rows = _QUICK_REPEATS if quick else _REPEATS, list[Row]()
    loop = Loop(isa=isa, step=isa.programs.getppid, steps=_STEPS, repeats=repeats, cpus=2)
    long = replace(loop, steps=_STEPS * (_QUICK_LONG if quick else _LONG))
    with machine(isa, {_NAME: loop, _LONG_NAME: long}) as booted:
        rows += [_recorded(booted, long, probes) for probes in _LOST]
        for ring in (None, 1 * MIB, 16 * MIB):
            forms = ("text", "json") if ring is None else ("text",)
            size = ArenaSize(ring=ring)
            rows += [_row(form, ring, _burst(booted, loop, size, form)) for form in forms]
    return rows


def _recorded(booted: Machine, loop: Loop, probes: int) -> Row:
    events = loop.total * probes
    with (
        attached(booted, {_LONG_NAME: loop}) as rig,
        tempfile.TemporaryDirectory() as folder,
    ):
        path = Path(folder) / "burst.rec"
        for number in range(probes):
            rig.session.probe(f"p:burst{number} {loop.isa.getppid} a=$arg1")
        with rig.session.record(path=path) as trace:
            start, used = time.perf_counter(), time.process_time()
            rig.run(_LONG_NAME)
            took_s, used_s = time.perf_counter() - start, time.process_time() - used
        lost, size = trace.counts.lost, path.stat().st_size
        recorded = sum(trace.counts.recorded.values())
    return Row(
        name=f"{events:,} events to a recording, {probes} for each call",
        figure=f"{events / took_s / 1e6:.2f} M/s for {took_s:.0f} s, {lost:,} lost "
        f"({lost / events:.2%}); {used_s / took_s:.0%} of a CPU, {size / recorded:.1f} bytes each",
        goal=f"{_LOST[probes]:.0%} lost at most",
        verdict=verdict_of(lost <= _LOST[probes] * events and recorded + lost >= events),
    )


def _burst(booted: Machine, loop: Loop, size: ArenaSize, form: str) -> Outcome:
    with (
        attached(booted, {_NAME: loop}, size) as rig,
        tempfile.TemporaryDirectory() as folder,
    ):
        path = Path(folder) / "out"
        rig.session.probe(f"p:burst {loop.isa.getppid} a=$arg1")
        start = time.perf_counter()
        lost, burst_s = _stream(rig, path, form)
        whole_s = time.perf_counter() - start
        # The guest's shell asks for its parent too: only the program's own hits are counted.
        written = path.read_bytes().count(b"burst-" if form == "text" else b'"comm":"burst"')
        ring = rig.by_hand.abi().ring_size
    return Outcome(
        ring=ring, hits=loop.total, written=written, lost=lost, burst_s=burst_s, whole_s=whole_s
    )


def _stream(rig: Rig, path: Path, form: str) -> tuple[int, float]:
    took: list[float] = []

    def burst() -> None:
        start = time.perf_counter()
        rig.run(_NAME)
        took.append(time.perf_counter() - start)

    program = threading.Thread(target=burst)
    with path.open("wb") as file:
        sink = FORMATS[form](file, rig.session.source)
        # Started only when everything is armed: the first look is from inside ``stream``.
        counts = rig.session.stream(sink, is_done=_Follow(program).is_done)
        sink.close()
    return counts.lost, took[0]


class _Follow:
    def __init__(self, program: threading.Thread) -> None:
        self._program = program
        self._is_started = False

    def is_done(self) -> bool:
        """Start the program at the first call; return whether it has ended."""
        if not self._is_started:
            self._is_started = True
            self._program.start()
        return not self._program.is_alive()


def _row(form: str, ring: int | None, found: Outcome) -> Row:
    missing = found.hits - found.written - found.lost
    # A lost record may be one of the shell's, so that only without losses the sum is exact.
    sums = f"{missing} MISSING" if missing and not found.lost else "nothing missing"
    kind = "default ring" if ring is None else "ring"
    return Row(
        name=f"{found.hits:,} hits to {form}, {kind} of {found.ring // MIB} MiB per CPU",
        figure=f"{found.lost:,} lost, {found.written:,} written, {sums}; "
        f"burst {found.burst_s:.1f} s, all written after {found.whole_s:.1f} s",
        goal="0 lost" if ring is None else "",
        verdict=verdict_of(found.lost == missing == 0 if ring is None else None),
    )
