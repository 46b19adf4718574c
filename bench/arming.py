"""Time until probes are armed and disarmed, and for how long the guest stands still meanwhile.

Beside it: the guest's own kernel with the same definitions, through its tracefs.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from msgspec import Struct

from bench.elf_program import Loop
from bench.guest import TRACING, Rig, attached, machine
from bench.isa import Isa
from bench.table import Row, seconds, times, verdict_of
from kprobes.inspect.status import probeable
from kprobes.transport.qemu import Machine

TITLE = "arming: from text to armed and back"

_MANY = 1000
_AT_ONCE = 100
"""Definitions in one command: the guest's console has no room for more."""
_NATIVE_S = 300
_ONE = "p:one {} a=$arg1"
# Functions that an idle guest never runs: no hit disturbs the clock.
_QUIET = ("tcp_*", "udp_*", "inet_*", "ip6_*", "ipv6_*", "netdev_*", "pci_*", "acpi_*", "neigh_*")
_BUSY_STEPS, _BUSY_REPEATS = 1_000_000, 1000


class Timing(Struct, frozen=True, kw_only=True):
    """One arming and disarming, in seconds."""

    armed: float
    arm_pause: float
    longest_pause: float
    disarmed: float
    disarm_pause: float


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot a guest and measure everything in it."""
    busy = Loop(isa=isa, step=isa.programs.getppid, steps=_BUSY_STEPS, repeats=_BUSY_REPEATS)
    one, loops = _ONE.format(isa.getppid), {"busy": busy}
    with machine(isa, loops) as booted:
        rows = _attaching(booted, one, 1 if quick else 5)
        with attached(booted, loops) as rig:
            rows += _one(rig, one, 3 if quick else 15)
            rows += _many(rig, 1 if quick else 5)
        return [*rows, *_every(booted, one, loops, 1 if quick else 3)]


def _attaching(booted: Machine, one: str, rounds: int) -> list[Row]:
    target, rows = str(booted.stub_address), list[Row]()
    with tempfile.TemporaryDirectory() as cache:
        with _busy(booted):
            cold = [_attach_once(target, one, f"{cache}/{n}") for n in range(rounds)]
            warm = [_attach_once(target, one, f"{cache}/0") for _ in range(rounds)]
            printed = [_first_event(target, one, f"{cache}/0") for _ in range(rounds)]
        idle = [_attach_once(target, one, f"{cache}/0") for _ in range(rounds)]
    for name, goal, found in (
        ("empty cache, guest makes syscalls", 1.0, cold),
        ("warm cache, guest makes syscalls", 0.3, warm),
        ("warm cache, idle guest", 1.5, idle),
    ):
        rows.append(_row(f"attach to first armed: {name}", [f["armed"] for f in found], goal))
    name = "`kprobe trace` to its first event: warm cache, guest makes syscalls"
    rows.append(_row(name, printed, 1.0))
    rows.append(_row("  attached, nothing armed (warm)", [f["attach"] for f in warm]))
    rows.append(_row("  pause of the first arming, memory borrowed", [f["paused"] for f in warm]))
    return rows


@contextmanager
def _busy(booted: Machine) -> Generator[None]:
    running = booted.start("/bench/busy")
    try:
        yield
    finally:
        running.kill()
        running.wait(10)


def _attach_once(target: str, one: str, cache: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.attach_once", target, one],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)


def _first_event(target: str, one: str, cache: str) -> float:
    # Python's own start and all imports are in it.
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "kprobes", "trace", "-q", "-t", f"qemu:{target}", one],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as tracing:
        assert tracing.stdout is not None
        while tracing.stdout.readline().startswith(b"#"):
            pass
        took = time.perf_counter() - start
        tracing.send_signal(signal.SIGINT)
        tracing.communicate()
    return took


def _one(rig: Rig, one: str, rounds: int) -> list[Row]:
    found = [_timing(rig, one.replace(":one", f":one{n}")) for n in range(rounds)]
    native = [_native(rig, [one]) for _ in range(min(rounds, 5))]
    theirs = [defined + enabled for defined, enabled, _ in native]
    return [
        _row("1 probe, from text to armed", [t.armed for t in found], 0.02, theirs),
        _row("  pause", [t.arm_pause for t in found], 0.005),
        _row("  pause to disarm", [t.disarm_pause for t in found]),
    ]


def _many(rig: Rig, rounds: int) -> list[Row]:
    names = _quiet_functions(rig)
    # Names of their own in every round: what was resolved for the one before is of no use.
    found = [_timing(rig, "\n".join(_probes(f"many{n}_", names))) for n in range(rounds)]
    defined, enabled, disabled = _native(rig, _probes("native", names))
    theirs = [defined + enabled]
    return [
        _row(f"{_MANY} probes, from text to armed", [t.armed for t in found], 0.15, theirs),
        _row("  pause", [t.arm_pause for t in found], 0.02),
        _row("  disarmed", [t.disarmed for t in found], 0.1, [disabled]),
        _row("  pause to disarm", [t.disarm_pause for t in found]),
    ]


def _every(booted: Machine, one: str, loops: Mapping[str, Loop], rounds: int) -> list[Row]:
    # Beside it the guest's function tracer, which changes as many sites.
    found, more, tracer = list[Timing](), list[tuple[float, float]](), list[tuple[float, float]]()
    for _ in range(rounds):
        # Each in memory of its own: code is written without a pause where none has been.
        with attached(booted, loops) as rig:
            # What a session's first probe has read of the kernel is in the rows of attaching.
            _timing(rig, one)
            found.append(_timing(rig, "p:every *"))
            with rig.session.recording():
                more += [_more(rig, n) for n in range(5)]
            tracer.append(_function_tracer(rig))
    on, off = zip(*tracer, strict=True)
    return [
        _row("every function (p *), from text to armed", [t.armed for t in found], 2.0, on),
        _row("  pause", [t.arm_pause for t in found], 0.3),
        _row("  longest pause", [t.longest_pause for t in found], 0.05),
        _row("  disarmed", [t.disarmed for t in found], 1.0, off),
        _row("  pause to disarm", [t.disarm_pause for t in found]),
        _row("  one more probe beside them", [armed for armed, _ in more], 0.05),
        _row("    pause", [pause for _, pause in more], 0.005),
    ]


def _more(rig: Rig, number: int) -> tuple[float, float]:
    stub = rig.guest.stub
    start, pause = time.perf_counter(), stub.paused_s
    rig.session.probe(f"p:more{number} do_sys_openat2 a=$arg1")
    return time.perf_counter() - start, stub.paused_s - pause


def _function_tracer(rig: Rig) -> tuple[float, float]:
    # Switched on and off, without anything being recorded.
    rig.shell(f"echo 0 > {TRACING}/tracing_on")
    nothing = median(_shell_s(rig, "true") for _ in range(3))
    on = _shell_s(rig, f"echo function > {TRACING}/current_tracer")
    off = _shell_s(rig, f"echo nop > {TRACING}/current_tracer")
    rig.shell(f"echo 1 > {TRACING}/tracing_on")
    return max(on - nothing, 0.0), max(off - nothing, 0.0)


def _probes(prefix: str, names: Sequence[str]) -> list[str]:
    return [f"p:{prefix}{n} {name} a=$arg1" for n, name in enumerate(names)]


def _timing(rig: Rig, text: str) -> Timing:
    session, stub = rig.session, rig.guest.stub
    if session.definitions:
        session.select().delete()
    start, pause, stub.longest_s = time.perf_counter(), stub.paused_s, 0.0
    session.probe(text)
    with ExitStack() as recording:
        recording.enter_context(session.recording())
        armed, arm_pause = time.perf_counter() - start, stub.paused_s - pause
        longest = stub.longest_s
        start, pause = time.perf_counter(), stub.paused_s
    return Timing(
        armed=armed,
        arm_pause=arm_pause,
        longest_pause=longest,
        disarmed=time.perf_counter() - start,
        disarm_pause=stub.paused_s - pause,
    )


def _quiet_functions(rig: Rig) -> list[str]:
    guest = rig.guest
    found = [
        function.symbol.name
        for pattern in _QUIET
        for function in probeable(guest.memory, guest.kernel, guest.arch.site, pattern=pattern)
    ]
    names = [name for name in found if "." not in name][:_MANY]
    if len(names) < _MANY:
        raise RuntimeError(f"only {len(names)} functions to probe")
    return names


def _native(rig: Rig, definitions: Sequence[str]) -> tuple[float, float, float]:
    # Defined, enabled, disabled, by the guest's own kernel; less what an empty command takes.
    rig.shell("rm -f /tmp/definitions")
    for at in range(0, len(definitions), _AT_ONCE):
        some = "\n".join(definitions[at : at + _AT_ONCE])
        rig.shell(f"cat >> /tmp/definitions <<'END'\n{some}\nEND")
    nothing = median(_shell_s(rig, "true") for _ in range(3))
    commands = (
        f"cat /tmp/definitions > {TRACING}/kprobe_events",
        f"echo 1 > {TRACING}/events/kprobes/enable",
        f"echo 0 > {TRACING}/events/kprobes/enable",
    )
    defined, enabled, disabled = (max(_shell_s(rig, c) - nothing, 0.0) for c in commands)
    rig.shell(f"echo > {TRACING}/kprobe_events")
    return defined, enabled, disabled


def _shell_s(rig: Rig, command: str) -> float:
    start = time.perf_counter()
    rig.shell(command, _NATIVE_S)
    return time.perf_counter() - start


def _row(
    name: str,
    found: Sequence[float],
    goal: float | None = None,
    peer: Sequence[float] | None = None,
) -> Row:
    ours = median(found)
    return Row(
        name=name,
        figure=f"{seconds(ours)} [{seconds(min(found))} .. {seconds(max(found))}]",
        goal=seconds(goal) if goal is not None else "",
        peer=seconds(median(peer)) if peer else "",
        ratio=times(median(peer) / ours) if peer else "",
        verdict=verdict_of(ours <= goal if goal is not None else None),
    )
