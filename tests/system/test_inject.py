"""Tasks of real guests that call functions for us, and memory that they allocate."""

import time
from collections.abc import Generator

import pytest

from kprobes.arch.machine import FunctionCall
from kprobes.guest.allocations import Allocation, AllocationLog, Kind
from kprobes.guest.arena import HEAD_SIZE, ArenaSize, allocate
from kprobes.guest.attach import attach
from kprobes.guest.guest import Guest
from kprobes.guest.inject import CallInjector, Task
from kprobes.guest.kernel_abi import first_of
from kprobes.guest.release import free
from kprobes.transport.qemu import Machine
from kprobes.units import KIB, MIB
from tests.system.conftest import Boot

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

REACH = {"amd64": 1 << 31, "arm64": 1 << 27}
"""How far a jump goes."""
IDLE_S = 30.0
ABANDONED = 10


@pytest.fixture
def reached(boot: Boot) -> Generator[tuple[Machine, Guest]]:
    machine = boot()
    guest = attach(str(machine.stub_address))
    yield machine, guest
    guest.stub.detach()


def complaints(machine: Machine) -> list[bytes]:
    """Return what the kernel tells of what we had broken."""
    words = "BUG:|WARNING|Oops|Call trace|Unable to handle|lockup|rcu: INFO|segfault"
    return machine.run(f"dmesg | grep -E '{words}'", 180).output.splitlines()


def injector_of(guest: Guest, allocations: AllocationLog) -> CallInjector:
    return CallInjector(guest.stub, guest.memory, guest.kernel, allocations)


def test_a_task_of_an_idle_guest_calls_a_function(reached: tuple[Machine, Guest]) -> None:
    machine, guest = reached
    allocations = AllocationLog()
    length = first_of(guest.kernel, "strlen")
    began = time.monotonic()

    with guest.stub.paused(), injector_of(guest, allocations).task() as task:
        took = time.monotonic() - began
        allocation = Allocation(kind=Kind.DATA, addr=0, size=8192)
        data = task.call(
            first_of(guest.kernel, "vzalloc_noprof", "vzalloc"), 8192, allocates=allocation
        )
        task.memory.write(data, b"kprobes\0")
        found = [task.call(length, data + n) for n in (0, 3)]
        task.call(first_of(guest.kernel, "vfree"), data, returns=allocations.live[0])

    assert found == [7, 4]
    assert took < IDLE_S
    assert allocations.is_empty
    assert complaints(machine) == []


@pytest.mark.parametrize("ticks", ["highres=off", "highres=off nohz=off"])
def test_an_idle_guest_whose_timer_is_of_low_resolution_has_a_task_at_once(
    boot: Boot, ticks: str
) -> None:
    machine = boot(append=ticks)
    guest = attach(str(machine.stub_address))
    injector, began = injector_of(guest, AllocationLog()), time.monotonic()

    # Without its timer's handler nobody comes by before the time is over.
    with guest.stub.paused(), injector.task(timeout_s=2 * IDLE_S):
        took = time.monotonic() - began

    guest.stub.detach()
    assert took < IDLE_S


def test_an_arena_is_allocated_within_reach_and_given_back(
    reached: tuple[Machine, Guest], arch: str
) -> None:
    machine, guest = reached
    allocations = AllocationLog()
    with guest.stub.paused():
        injector = injector_of(guest, allocations)
        size = ArenaSize(ring=64 * KIB)
        arena = allocate(injector, guest.kernel, size, note=lambda _notes, _data: None)
        far = arena.module_code
        pieces = [(arena.lookup[0], arena.code.stop)] + (
            [] if far is None else [(far.addr, far.stop)]
        )
        runs = [guest.memory.tables.mapped_runs(*piece) for piece in pieces]
    allocated = areas(machine)

    assert {(run.is_executable, run.is_writable) for found in runs for run in found} == {
        (True, False)
    }
    assert [sum(run.size for run in found) for found in runs] == [1 * MIB] * len(pieces)
    assert arena.code.size == 1 * MIB - HEAD_SIZE
    start, stop = guest.kernel.text
    assert max(stop, arena.code.stop) - min(start, arena.lookup[0]) < REACH[arch]
    # And its data.
    assert len(allocated) == 1 + len(pieces) == {"amd64": 2, "arm64": 3}[arch]

    with guest.stub.paused(), injector.task() as task:
        free(task, guest.kernel)

    assert allocations.is_empty
    assert areas(machine) == []
    assert complaints(machine) == []


def areas(machine: Machine) -> list[str]:
    """Return the memory that the guest has allocated, by its own list; it is never asked for so."""
    listed = machine.run("cat /proc/vmallocinfo", 180).output.decode().splitlines()
    callers = (" unregister_die_notifier+", " iterate_supers_type+")
    # Of large memory the kernel keeps a list of pages, which is a small piece with the same caller.
    large = [area for area in listed if int(area.split()[1]) > 64 * KIB]
    return [area for area in large if any(caller in area for caller in callers)]


def test_who_lets_go_in_the_middle_of_a_call_leaves_the_guest_well(
    reached: tuple[Machine, Guest],
) -> None:
    machine, guest = reached
    sleep = first_of(guest.kernel, "msleep")

    for number in range(ABANDONED):
        with guest.stub.paused(), injector_of(guest, AllocationLog()).task() as task:
            abandon(task, FunctionCall(function=sleep, args=(10 * number,)))
        assert machine.run("echo well", 180).output == b"well\n"

    assert complaints(machine) == []


def abandon(task: Task, called: FunctionCall) -> None:
    """Send a task into a function, and do not wait."""
    trap = task.trap
    setup = trap.info.set_up_call(task.return_path, trap.frame, called)
    words = b"".join(word.to_bytes(8, "little") for word in setup.words)
    task.memory.write(trap.frame, words)
    trap.debugger.set_registers(task.thread, setup.registers)
