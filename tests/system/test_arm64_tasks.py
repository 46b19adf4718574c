"""A real arm64 guest: its tasks, its clock, and handlers at its functions."""

import re
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest

from kprobes.guest import clock, stacks
from kprobes.guest.guest import Guest
from kprobes.guest.kernel_abi import task_abi
from kprobes.guest.upcalls import ticks_per_s
from kprobes.handlers.probe import Instance, Kprobe, Kretprobe
from kprobes.handlers.registers import Registers
from kprobes.model.abi import TaskAbi
from kprobes.open import GuestSession, boot
from kprobes.ports import Text
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import Addr
from tests.build.waiting import wait_until

pytestmark = pytest.mark.guest
TRACE = "/sys/kernel/tracing"
OPEN = "do_sys_openat2"
THEIRS = f"""cd {TRACE}
echo 'p:theirs {OPEN} pc=%pc lr=%lr' > kprobe_events
echo 1 > events/kprobes/enable
cat /proc/uptime
echo 0 > events/kprobes/enable
cat trace
echo > kprobe_events"""
_STAMPED = re.compile(r"-(\d+) .* (\d+\.\d+): (\w+): \(.*\) pc=(\S+) lr=(\S+)")
_ROUNDING_US = 1
"""Between two stamps of one moment, as they are shown."""


class _Mark(NamedTuple):
    """A line of a trace, in the order of its task's."""

    pid: str
    us: int
    is_ours: bool
    regs: tuple[str, ...]


def _mark(line: Sequence[str]) -> _Mark:
    pid, stamp, event, *regs = line
    is_ours = event == "ours"
    us = int(stamp.replace(".", "")) + _ROUNDING_US * is_ours
    return _Mark(pid, us, is_ours, tuple(regs))


def _is_same(theirs: _Mark, then: _Mark) -> bool:
    return then.is_ours and (then.pid, then.regs) == (theirs.pid, theirs.regs)


@pytest.fixture(scope="module")
def arm64() -> Iterator[GuestSession]:
    with boot(MachineOptions(arch="arm64")) as found:
        yield found


def _range(found: GuestSession, name: str) -> Text:
    symbol = found.kernel.symbols.named(name)
    return symbol.addr, Addr(symbol.addr + symbol.size)


def _running(guest: Guest, abi: TaskAbi) -> tuple[set[bytes], set[bytes]] | None:
    """Return names and preempt counts of what runs, or None while that is in user space."""
    with guest.stub.paused():
        vcpus = [guest.stub.registers(cpu) for cpu in guest.stub.ids()]
        if any(found["pc"] < 1 << 63 for found in vcpus):
            return None
        tasks = [guest.stub.register(cpu, "SP_EL0") for cpu in guest.stub.ids()]
        names = {guest.memory.read(task + abi.comm, 16).rstrip(b"\0") for task in tasks}
        counts = {guest.memory.read(task + abi.preempt_count, 4) for task in tasks}
    return names, counts


def test_the_registers_have_the_running_tasks(arm64: GuestSession) -> None:
    guest, abi = arm64.driver.guest, task_abi(arm64.kernel)
    idle = {b"swapper/0", b"swapper/1"}, {bytes(4)}

    # Something may be going on just then, right after the boot above all.
    assert wait_until(lambda: _running(guest, abi) == idle) is not None


def test_who_idles_is_inside_what_it_returns_to_and_in_nothing_else(arm64: GuestSession) -> None:
    guest = arm64.driver.guest
    expected = {
        "cpu_do_idle": True,
        "do_idle": True,
        "cpu_startup_entry": True,
        "vfs_read": False,
        "schedule": False,
    }

    def inside() -> dict[str, bool]:
        # A look takes as long as much of what the guest may be doing.
        time.sleep(0.2)
        with guest.stub.paused():
            return {
                name: stacks.is_anyone_inside(guest, [_range(arm64, name)]) for name in expected
            }

    # Something may be going on just then.
    assert wait_until(lambda: inside() == expected) is not None


def test_its_counter_tells_the_local_clock(arm64: GuestSession) -> None:
    guest = arm64.driver.guest

    assert clock.open_clock(guest.memory, guest.kernel, ()).function is None
    with guest.stub.paused():
        rate = guest.stub.register(guest.stub.ids()[0], "CNTFRQ_EL0")
    assert ticks_per_s(guest) == rate


def test_hits_are_when_and_where_the_guests_own_probe_has_them(arm64: GuestSession) -> None:
    arm64.probe(f"p:ours {OPEN} pc=%pc lr=%lr")
    with arm64.record() as trace:
        told = arm64.run(THEIRS).output.decode()
    arm64.probe("-:ours")

    theirs = [found.groups() for found in _STAMPED.finditer(told)]
    ours = [found.groups() for found in _STAMPED.finditer(str(trace))]
    assert len(theirs) >= 2
    # Of every hit theirs is recorded first, then ours, and then the task goes on.
    found = sorted([*map(_mark, theirs), *map(_mark, ours)])
    assert [
        each for each, then in pairwise(found) if not each.is_ours and not _is_same(each, then)
    ] == []
    assert found[-1].is_ours


def test_a_function_that_the_guests_own_probe_is_on_already(arm64: GuestSession) -> None:
    theirs = f"cd {TRACE}; echo 'p:theirs {OPEN}' > kprobe_events; echo 1 > events/kprobes/enable"
    arm64.run(theirs)
    arm64.probe(f"p:ours {OPEN} pc=%pc")
    with arm64.record() as trace:
        arm64.run("cat /proc/uptime")
    arm64.probe("-:ours")

    told = arm64.run(f"cd {TRACE}; cat trace; echo 0 > events/kprobes/enable; echo > kprobe_events")
    assert str(trace).count(f"pc={arm64.address(OPEN):#x}") >= 2
    assert told.output.count(b" theirs: ") >= 2


def test_handlers_see_registers_arguments_and_what_is_returned(arm64: GuestSession) -> None:
    addr, seen = arm64.address(OPEN), list[tuple[object, ...]]()

    def before(_probe: Kprobe, regs: Registers) -> None:
        seen.append(("before", regs.pc, regs.args.filename.string(), arm64.symbol(regs.lr)[:18]))

    def after(_probe: Kprobe, regs: Registers, _flags: int) -> None:
        seen.append(("after", regs.pc))

    def returned(_instance: Instance, regs: Registers) -> None:
        seen.append(("returned", arm64.symbol(regs.pc)[:18], regs.retval >= 0))

    probe = Kprobe(symbol_name=OPEN, pre_handler=before, post_handler=after)
    arm64.register_kprobe(probe)
    back = arm64.register_kretprobe(Kretprobe(symbol_name=OPEN, handler=returned))
    arm64.run("cat /proc/uptime")
    arm64.unregister_kprobe(probe)
    arm64.unregister_kretprobe(back)

    assert ("before", addr, "/proc/uptime", "__arm64_sys_openat") in seen
    assert ("after", addr + 4) in seen
    assert ("returned", "__arm64_sys_openat", True) in seen
    assert (probe.nmissed, back.nmissed) == (0, 0)


def test_a_handler_changes_what_a_function_returns(arm64: GuestSession) -> None:
    def refuse(_instance: Instance, regs: Registers) -> None:
        if regs.task.comm.string() == "cat":
            regs.retval = -13

    back = arm64.register_kretprobe(Kretprobe(symbol_name=OPEN, handler=refuse))
    told = arm64.run("cat /proc/uptime")
    arm64.unregister_kretprobe(back)

    assert b"Permission denied" in told.output
    assert arm64.run("cat /proc/uptime").status == 0
