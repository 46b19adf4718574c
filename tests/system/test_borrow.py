"""Tasks of real guests that call functions for us, and memory that they allocate."""

import time
from collections.abc import Generator

import pytest

from kprobes.arch.machine import Called
from kprobes.guest.allocations import Kind, Ledger, Loan
from kprobes.guest.arena import CATCHER_SIZE, ArenaSize, allocate
from kprobes.guest.attach import attach
from kprobes.guest.guest import Guest
from kprobes.guest.inject import Borrower, Task
from kprobes.guest.kernel_abi import first_of
from kprobes.guest.release import give_back
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
    return machine.run(f"dmesg | grep -E '{words}'", 20).output.splitlines()


def borrower_of(guest: Guest, ledger: Ledger) -> Borrower:
    return Borrower(guest.stub, guest.memory, guest.kernel, ledger)


def test_a_task_of_an_idle_guest_calls_a_function(reached: tuple[Machine, Guest]) -> None:
    machine, guest = reached
    ledger = Ledger()
    length = first_of(guest.kernel, "strlen")
    began = time.monotonic()

    with guest.stub.paused(), borrower_of(guest, ledger).task() as task:
        took = time.monotonic() - began
        loan = Loan(kind=Kind.DATA, addr=0, size=8192)
        data = task.call(first_of(guest.kernel, "vzalloc_noprof", "vzalloc"), 8192, lends=loan)
        task.memory.write(data, b"kprobes\0")
        found = [task.call(length, data + n) for n in (0, 3)]
        task.call(first_of(guest.kernel, "vfree"), data, returns=ledger.loans[0])

    assert found == [7, 4]
    assert took < IDLE_S
    assert ledger.is_settled
    assert complaints(machine) == []


def test_an_arena_is_allocated_within_reach_and_given_back(
    reached: tuple[Machine, Guest], arch: str
) -> None:
    machine, guest = reached
    ledger = Ledger()
    with guest.stub.paused():
        borrower = borrower_of(guest, ledger)
        size = ArenaSize(ring=64 * KIB)
        arena = allocate(borrower, guest.kernel, size, note=lambda _notes, _data: None)
        far = arena.module_code
        pieces = [(arena.catcher, arena.code.stop)] + (
            [] if far is None else [(far.addr, far.stop)]
        )
        runs = [guest.memory.tables.mapped_runs(*piece) for piece in pieces]
    lent = areas(machine)

    assert {(run.is_executable, run.is_writable) for found in runs for run in found} == {
        (True, False)
    }
    assert [sum(run.size for run in found) for found in runs] == [1 * MIB] * len(pieces)
    assert arena.code.size == 1 * MIB - CATCHER_SIZE
    start, stop = guest.kernel.text
    assert max(stop, arena.code.stop) - min(start, arena.catcher) < REACH[arch]
    # And its data.
    assert len(lent) == 1 + len(pieces) == {"amd64": 2, "arm64": 3}[arch]

    with guest.stub.paused(), borrower.task() as task:
        give_back(task, guest.kernel)

    assert ledger.is_settled
    assert areas(machine) == []
    assert complaints(machine) == []


def areas(machine: Machine) -> list[str]:
    """Return the memory that the guest has lent, by its own list; it is never asked for so."""
    listed = machine.run("cat /proc/vmallocinfo", 20).output.decode().splitlines()
    callers = (" unregister_die_notifier+", " iterate_supers_type+")
    return [area for area in listed if any(caller in area for caller in callers)]


def test_who_lets_go_in_the_middle_of_a_call_leaves_the_guest_well(
    reached: tuple[Machine, Guest],
) -> None:
    machine, guest = reached
    sleep = first_of(guest.kernel, "msleep")

    for number in range(ABANDONED):
        with guest.stub.paused(), borrower_of(guest, Ledger()).task() as task:
            abandon(task, Called(function=sleep, args=(10 * number,)))
        assert machine.run("echo well", 20).output == b"well\n"

    assert complaints(machine) == []


def abandon(task: Task, called: Called) -> None:
    """Send a task into a function, and do not wait."""
    landing = task.landing
    entered = landing.facts.enter(task.way, landing.frame, called)
    words = b"".join(word.to_bytes(8, "little") for word in entered.words)
    task.memory.write(landing.frame, words)
    landing.debugger.set_registers(task.thread, entered.registers)
