"""Ends of sessions while the guest's own probes hold calls that return to us.

Where both take a call over, the guest's own probe keeps our trampoline's address where only the
kernel looks: our code must stay until that call returns, or until there is no guest.
"""

import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.guest import journal, stacks
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.trace import Trace
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.defined import delete_all
from tests.build.victim import is_complaint
from tests.build.waiting import PATIENCE_S
from tests.system.oracle import TRACING

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_NATIVE = (
    f"cd {TRACING} && echo r:own do_nanosleep > kprobe_events && echo 1 > events/kprobes/enable"
)
_ASLEEP = """
sleep 1000 & echo $! > /tmp/asleep
until grep -q '(sleep) S' /proc/$!/stat; do :; done; sleep 0.01
"""
_HELD_S = 1.0


@pytest.fixture(autouse=True)
def _own_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def hold_a_call(machine: Machine, session: GuestSession) -> None:
    """Have a task asleep in a call that both took over, and ours disarmed."""
    assert machine.run(_NATIVE, PATIENCE_S).status == 0
    session.options = replace(session.options, return_method=ReturnMethod.RETHOOK)
    session.probe("p:in do_nanosleep\nr:out do_nanosleep")
    with session.record() as trace:
        machine.run(_ASLEEP, PATIENCE_S)
    assert counted(trace, "in") == counted(trace, "out") + 1 == 2


def counted(trace: Trace, event: str) -> int:
    batches = (batch for events in trace.events for batch in events.batches)
    return sum(len(batch) for batch in batches if batch.layout.event == event)


def test_a_guest_of_our_own_ends_with_a_call_that_its_own_probe_holds(arch: str) -> None:
    session = kprobes.boot(MachineOptions(arch=arch))
    assert session.machine is not None
    hold_a_call(session.machine, session)

    session.close()

    assert list(journal.entries()) == []


def test_other_probes_are_armed_and_recorded_while_a_task_sleeps_in_a_call_of_ours(
    arch: str,
) -> None:
    with kprobes.boot(MachineOptions(arch=arch)) as session:
        machine = session.machine
        assert machine is not None
        hold_a_call(machine, session)

        again = recorded(session, "p:in do_nanosleep\nr:out do_nanosleep", "sleep 0.01")
        # More than there was room for.
        many = recorded(session, "r:many vfs_*", "cat /proc/version")
        ended = recorded(
            session, "r:out do_nanosleep", "kill $(cat /tmp/asleep); sleep 0.01; cat /tmp/asleep"
        )
        # Again more: then what is between the first memory and the last is given back.
        recorded(session, "r4096:more vfs_*", "cat /proc/version")
        allocated = allocated_bytes()
        after = recorded(session, "r:out do_nanosleep", "sleep 0.01")

        assert (counted(again, "in"), counted(again, "out")) == (1, 1)
        assert counted(many, "many") > 0
        # It has returned, and not to what records now.
        assert counted(ended, "out") == counted(after, "out") == 1
        assert allocated_bytes() < allocated
        said = machine.run(
            "cat /proc/*/comm 2>/dev/null | grep -c sleep; dmesg", PATIENCE_S
        ).output.decode()
        assert said.startswith("0\n")
        assert [line for line in said.splitlines() if is_complaint(line)] == []


def test_a_call_that_sleeps_through_a_counting_is_in_no_later_one(arch: str) -> None:
    with kprobes.boot(MachineOptions(arch=arch)) as session:
        machine = session.machine
        assert machine is not None
        assert machine.run(_NATIVE, PATIENCE_S).status == 0
        session.options = replace(session.options, return_method=ReturnMethod.RETHOOK)
        session.probe("r:out do_nanosleep")
        counts: list[int] = []
        for command in (_ASLEEP, "sleep 0.01", "kill $(cat /tmp/asleep); sleep 0.01"):
            with session.counting("keys=common_cpu") as counted:
                assert machine.run(command, PATIENCE_S).status == 0
            counts.append(int(counted.read().hitcount.sum()))

        assert counts == [1, 1, 1]
        said = machine.run("dmesg", PATIENCE_S).output.decode().splitlines()
        assert [line for line in said if is_complaint(line)] == []


def allocated_bytes() -> int:
    """Return the bytes that a guest has allocated, by the only journal."""
    (found,) = journal.entries()
    return found.allocations.memory


def recorded(session: GuestSession, definitions: str, command: str) -> Trace:
    """Record some definitions alone while a command runs."""
    delete_all(session)
    session.probe(definitions)
    with session.record() as trace:
        session.run(["sh", "-c", command], PATIENCE_S)
    return trace


@pytest.mark.arches("amd64", "arm64", matrix="arm64")
def test_somebody_else_s_guest_is_waited_for_until_the_call_has_returned(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Machine.boot(MachineOptions(arch=arch)) as machine:
        session = kprobes.attach(str(machine.stub_address))
        hold_a_call(machine, session)
        monkeypatch.setattr(stacks, "_LEAVE_S", PATIENCE_S)
        wake = threading.Timer(_HELD_S, machine.run, ("kill $(cat /tmp/asleep)", PATIENCE_S))
        began = time.monotonic()
        wake.start()

        session.close()

        assert time.monotonic() - began > _HELD_S
        assert list(journal.entries()) == []
        said = machine.run("sleep 0.2; dmesg", PATIENCE_S).output.decode().splitlines()
        assert [line for line in said if is_complaint(line)] == []
