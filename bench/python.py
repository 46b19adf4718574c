"""Python at a hit: a handler of ours, and a Python breakpoint of gdb's on the same QEMU.

Both read a register and let the guest go on. Hits per second of the host's time, as the guest's
stands still while gdb has stopped it.
"""

import shutil
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import quantiles

from bench.elf_program import Loop
from bench.guest import attached, machine
from bench.isa import Gdb, Isa
from bench.table import Row, times
from kprobes.drivers.guest.driver import GuestDriver
from kprobes.drivers.places import places_of
from kprobes.model.upcall import Upcall, Waiting
from kprobes.transport.qemu import Machine
from kprobes.units import Addr

TITLE = "python: hits per second that Python looks at"

_GOAL = 10
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
    rounds, loops = 3 if quick else 9, _loops(isa)
    with machine(isa, loops) as booted:
        with attached(booted, loops) as rig:
            site = places_of(rig.guest).locate(rig.guest.kernel.symbols.named(isa.getppid))
            driver = rig.session.driver
            with _ours(driver, isa, site):
                one = [_rate(booted, "many", loops) for _ in range(rounds)]
                two = [_rate(booted, "both", loops) for _ in range(rounds)]
            with _ours(driver, isa, site, is_return=True):
                back = [_rate(booted, "many", loops) for _ in range(rounds)]
        gdb = _gdb_rates(booted, isa, site, rounds)
    return [
        _beside_gdb(isa, one, gdb),
        Row(name="two vCPUs at once", figure=_shown(two)),
        Row(name="one vCPU, when the function returns", figure=_shown(back)),
    ]


def _loops(isa: Isa) -> dict[str, Loop]:
    many = Loop(isa=isa, step=isa.programs.getppid, steps=5000)
    return {
        "many": many,
        "both": replace(many, steps=2500, cpus=2),
        "few": replace(many, steps=300),
    }


def _gdb_rates(booted: Machine, isa: Isa, site: Addr, rounds: int) -> list[float]:
    if shutil.which(isa.gdb.program) is None:
        return []
    with _gdb(booted, isa.gdb, site):
        return [_rate(booted, "few", _loops(isa)) for _ in range(rounds)]


def _beside_gdb(isa: Isa, ours: list[float], gdb: list[float]) -> Row:
    name = "one vCPU: gdb's Python breakpoint"
    if not gdb:
        return Row(name=name, figure=_shown(ours), peer=f"{isa.gdb.program} is not installed")
    ratio = _middle(ours) / _middle(gdb)
    return Row(
        name=name,
        figure=_shown(ours),
        goal=f"{_GOAL}x",
        peer=_shown(gdb),
        ratio=times(ratio),
        is_met=ratio >= _GOAL,
    )


@contextmanager
def _ours(driver: GuestDriver, isa: Isa, site: Addr, *, is_return: bool = False) -> Generator[None]:
    seen: list[int] = []

    def serve(waiting: Waiting) -> None:
        seen.append(waiting.registers[isa.first])

    upcall = Upcall(number=0, addr=site, is_after=False, serve=serve)
    driver.upcalls, driver.return_upcalls = ([], [upcall]) if is_return else ([upcall], [])
    driver.prepare([])
    driver.arm()
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


def _rate(booted: Machine, name: str, loops: Mapping[str, Loop]) -> float:
    loop = loops[name]
    start = time.perf_counter()
    finished = booted.run(f"/bench/{name}", timeout_s=120)
    took = time.perf_counter() - start
    if finished.status:
        raise RuntimeError(f"{name}: status {finished.status}")
    return loop.steps * loop.repeats * loop.cpus / took


def _middle(rates: list[float]) -> float:
    return quantiles(rates, n=4, method="inclusive")[1]


def _shown(rates: list[float]) -> str:
    low, middle, high = quantiles(rates, n=4, method="inclusive")
    return f"{middle:,.0f}/s [{low:,.0f} {high:,.0f}]"
