"""Python at a hit: a handler of ours, and a Python breakpoint of gdb's on the same QEMU.

Both read a register and let the guest go on. Hits per second of the host's time, as the guest's
stands still while gdb has stopped it.
"""

import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from statistics import quantiles

from bench.elf_program import GETPPID, Loop
from bench.guest import attached, machine
from bench.table import Row, times
from kprobes.drivers.guest.driver import GuestDriver
from kprobes.drivers.places import places_of
from kprobes.model.upcall import Upcall, Waiting
from kprobes.transport.qemu import Machine
from kprobes.units import Addr

TITLE = "python: hits per second that Python looks at"

_SITE = "__x64_sys_getppid"
_GOAL = 10
_LOOPS = {
    "many": Loop(step=GETPPID, steps=5000),
    "both": Loop(step=GETPPID, steps=2500, cpus=2),
    "few": Loop(step=GETPPID, steps=300),
}
_GDB = """
import gdb
class Hit(gdb.Breakpoint):
    def stop(self):
        int(gdb.parse_and_eval("$rdi"))
        return False
Hit("*{addr:#x}")
print("armed", flush=True)
"""


def run(*, quick: bool = False) -> list[Row]:
    """Boot a guest and measure both in it."""
    rounds = 3 if quick else 9
    with machine(_LOOPS) as booted:
        with attached(booted, _LOOPS) as rig:
            site = places_of(rig.guest).locate(rig.guest.kernel.symbols.named(_SITE))
            with _ours(rig.session.driver, site):
                one = [_rate(booted, "many") for _ in range(rounds)]
                two = [_rate(booted, "both") for _ in range(rounds)]
            with _ours(rig.session.driver, site, is_return=True):
                back = [_rate(booted, "many") for _ in range(rounds)]
        with _gdb(booted, site):
            gdb = [_rate(booted, "few") for _ in range(rounds)]
    ratio = _middle(one) / _middle(gdb)
    return [
        Row(
            name="one vCPU: gdb's Python breakpoint",
            figure=_shown(one),
            goal=f"{_GOAL}x",
            peer=_shown(gdb),
            ratio=times(ratio),
            is_met=ratio >= _GOAL,
        ),
        Row(name="two vCPUs at once", figure=_shown(two)),
        Row(name="one vCPU, when the function returns", figure=_shown(back)),
    ]


@contextmanager
def _ours(driver: GuestDriver, site: Addr, *, is_return: bool = False) -> Generator[None]:
    seen: list[int] = []

    def serve(waiting: Waiting) -> None:
        seen.append(waiting.registers["di"])

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
def _gdb(booted: Machine, site: Addr) -> Generator[None]:
    commands = ["set pagination off", "set architecture i386:x86-64"]
    commands += [f"target remote {booted.stub_address}", f"python {_script(site)}", "continue"]
    words = [word for command in commands for word in ("-ex", command)]
    process = subprocess.Popen(
        ["gdb", "-q", "-nx", "-batch", *words],
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


def _script(site: Addr) -> str:
    return f"exec({_GDB.format(addr=site)!r})"


def _await(lines: Iterator[str]) -> None:
    said: list[str] = []
    for line in lines:
        said.append(line)
        if line.strip() == "armed":
            return
    raise RuntimeError(f"gdb did not come so far: {''.join(said)}")


def _rate(booted: Machine, name: str) -> float:
    loop = _LOOPS[name]
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
