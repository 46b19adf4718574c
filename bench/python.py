"""Python at a hit: handlers of ours, and a Python breakpoint of gdb's on the same QEMU.

Both read a register and let the guest go on. Hits per second of the host's time, as the guest's
stands still while gdb has stopped it. Handlers of users' are beside it: one that does nothing, one
that reads a register, and ones with a function's arguments, of which the last reads a string of 20
bytes, too.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from bench.elf_program import Loop
from bench.guest import attached, machine
from bench.isa import Gdb, Isa
from bench.many import POLLED, WRITTEN, polling, writing
from bench.spread import Spread
from bench.table import Goal, Row, compared
from kprobes.guest.driver import GuestDriver
from kprobes.guest.places import places_of
from kprobes.handlers.probe import Handler, Kprobe
from kprobes.handlers.registers import Registers
from kprobes.model.upcall import Upcall, WaitingVcpu
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.units import Addr

TITLE = "python: hits per second that Python looks at"

_GOAL = Goal(10)
_REPEATS = 20
_GDB = """
import gdb
class Hit(gdb.Breakpoint):
    def stop(self):
        int(gdb.parse_and_eval("${register}"))
        return False
Hit("*{addr:#x}")
print("armed", flush=True)
"""


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot a guest and measure both in it."""
    rounds, loops = 6 if quick else 12, _loops(isa)
    with machine(isa, loops) as booted:
        with attached(booted, loops) as rig:
            site = places_of(rig.guest).locate(rig.guest.kernel.symbols.named(isa.getppid))
            driver = rig.session.driver
            with _ours(driver, isa, site):
                one = _spread(booted, "many", loops, rounds)
                two = _spread(booted, "both", loops, rounds)
            with _ours(driver, isa, site, is_return=True):
                back = _spread(booted, "many", loops, rounds)
            users = _users(rig.session, booted, isa, loops, rounds)
        gdb = _under_gdb(booted, isa, site, rounds)
    return [
        _beside_gdb(isa, one, gdb),
        Row(name="two vCPUs at once", figure=_rate(two)),
        Row(name="one vCPU, when the function returns", figure=_rate(back)),
        *users,
    ]


def _loops(isa: Isa) -> dict[str, Loop]:
    many = Loop(isa=isa, step=isa.programs.getppid, steps=5000)
    return {
        "many": many,
        "both": replace(many, steps=2500, cpus=2),
        "few": replace(many, steps=300),
        "poll": polling(isa, repeats=_REPEATS),
        "write": writing(isa, repeats=_REPEATS),
    }


def _nothing(_probe: Kprobe, _regs: Registers) -> None:
    pass


def _looks_at_nothing(_file: Any, _wait: Any) -> None:
    pass


def _reads_string(_file: Any, text: Any, _size: Any, _at: Any) -> None:
    text.string(20)


def _users(
    session: GuestSession, booted: Machine, isa: Isa, loops: Mapping[str, Loop], rounds: int
) -> list[Row]:
    def register(probe: Kprobe, regs: Registers) -> None:
        del probe
        _ = regs[isa.first]

    def plain(handler: Handler) -> Kprobe:
        return session.register_kprobe(Kprobe(symbol_name=POLLED, pre_handler=handler))

    # What is measured, with what program, and what registers it.
    cases: tuple[tuple[str, str, Callable[[], Kprobe]], ...] = (
        ("a handler that does nothing", "poll", lambda: plain(_nothing)),
        ("one that reads a register", "poll", lambda: plain(register)),
        ("one of two arguments", "poll", lambda: session.entry(POLLED)(_looks_at_nothing)),
        ("one of four that reads a string", "write", lambda: session.entry(WRITTEN)(_reads_string)),
    )
    rows: list[Row] = []
    for name, program, made in cases:
        with made() as probe:
            rows.append(Row(name=name, figure=_rate(_spread(booted, program, loops, rounds))))
            if probe.errors or probe.nmissed:
                raise RuntimeError(f"{name}: {probe!r}")
    return rows


def _under_gdb(booted: Machine, isa: Isa, site: Addr, rounds: int) -> Spread | None:
    if shutil.which(isa.gdb.program) is None:
        return None
    with _gdb(booted, isa.gdb, site):
        return _spread(booted, "few", _loops(isa), rounds)


def _beside_gdb(isa: Isa, ours: Spread, gdb: Spread | None) -> Row:
    name = "one vCPU: gdb's Python breakpoint"
    if gdb is None:
        return Row(name=name, figure=_rate(ours), peer=f"{isa.gdb.program} is not installed")
    return compared(name, ours, gdb, _GOAL, show=_rate)


@contextmanager
def _ours(driver: GuestDriver, isa: Isa, site: Addr, *, is_return: bool = False) -> Generator[None]:
    seen: list[int] = []

    def serve(waiting: WaitingVcpu) -> None:
        seen.append(waiting.registers[isa.first])

    upcall = Upcall(number=0, addr=site, is_after=False, serve=serve)
    upcalls, return_upcalls = ([], [upcall]) if is_return else ([upcall], [])
    driver.apply(lambda wanted: replace(wanted, upcalls=upcalls, return_upcalls=return_upcalls))
    try:
        yield
    finally:
        driver.disarm()
    if driver.missed_upcall(upcall.number):
        raise RuntimeError("hits went on without the handler")


@contextmanager
def _gdb(booted: Machine, gdb: Gdb, site: Addr) -> Generator[None]:
    commands = ["set pagination off", f"set architecture {gdb.architecture}"]
    script = f"exec({_GDB.format(addr=site, register=gdb.register)!r})"
    commands += [f"target remote {booted.stub_address}", f"python {script}", "continue"]
    words = [word for command in commands for word in ("-ex", command)]
    process = subprocess.Popen(
        [gdb.program, "-q", "-nx", "-batch", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        _await(process.stdout)
        yield
    finally:
        # The guest ends with it: a hit would stop it for ever.
        process.kill()
        process.wait()


def _await(lines: Iterator[str]) -> None:
    said: list[str] = []
    for line in lines:
        said.append(line)
        if line.strip() == "armed":
            return
    raise RuntimeError(f"gdb did not come so far: {''.join(said)}")


def _spread(booted: Machine, name: str, loops: Mapping[str, Loop], rounds: int) -> Spread:
    return Spread([_taken(booted, name, loops) for _ in range(rounds)])


def _taken(booted: Machine, name: str, loops: Mapping[str, Loop]) -> float:
    # Seconds per hit.
    start = time.perf_counter()
    finished = booted.run(f"/bench/{name}", timeout_s=120)
    took = time.perf_counter() - start
    if finished.status:
        raise RuntimeError(f"{name}: status {finished.status}")
    return took / loops[name].total


def _rate(taken: Spread) -> str:
    return f"{1 / taken.value:,.0f}/s [{1 / taken.high:,.0f} {1 / taken.low:,.0f}]"
