"""Commands that are followed: what they and their children do, and nothing of anybody else."""

import pytest

import kprobes
from kprobes.model.events import Event, each_event
from kprobes.trace import Trace
from kprobes.transport.qemu import Machine

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

_OPEN = "p:open do_sys_openat2 path=+0($arg2):ustring tgid=$current->tgid"
_OTHERS = "while :; do cat /etc/group; done"
_COMMAND = """
: 3</etc/passwd
(cat /etc/passwd; sh -c 'exec cat /etc/passwd') >/dev/null
setsid sh -c 'cat /etc/passwd >/dev/null; echo $$' &
wait
"""


def test_a_command_and_all_its_children_are_recorded_and_nobody_else(guest: Machine) -> None:
    others = guest.start(_OTHERS)
    try:
        with kprobes.attach(str(guest.stub_address)) as kernel:
            kernel.machine = guest
            kernel.probe(_OPEN)
            kernel.probe("r:read vfs_read $retval")
            kernel.choose_tasks(follow=True)
            with kernel.record() as trace:
                unheld = guest.run("cat /etc/hosts /etc/group")
                first, second = kernel.run(_COMMAND), kernel.run("exec cat /etc/passwd /no")
    finally:
        others.kill()

    found = _events(trace)
    opened = [event for event in found if event.name == "open"]
    assert [event["path"] for event in opened].count("/etc/passwd") == 5
    assert not {"/etc/group", "/etc/hosts"} & {event["path"] for event in opened}
    assert {event["tgid"] for event in opened} == {event.pid for event in opened}
    # The agent's last step before a command begins is a read.
    assert min(event.pid for event in found) == first.pid
    assert unheld.pid not in {event.pid for event in found}
    assert (second.status, second.pid in {event.pid for event in opened}) == (1, True)


def test_a_process_is_a_field_of_filters_and_a_choice(guest: Machine) -> None:
    with kprobes.attach(str(guest.stub_address)) as kernel:
        kernel.machine = guest
        running = guest.start("read -r go; cat /etc/passwd", is_held=True)
        kernel.choose_tasks(tgids=[running.pid])
        kernel.probe(_OPEN, filter="tgid > 1 && tgid != 0x7fffffff")
        with kernel.record() as trace:
            running.go()
            running.wait(180)

    assert {event.pid for event in _events(trace)} == {running.pid}


def _events(trace: Trace) -> list[Event]:
    return [event for events in trace.events for event in each_event(events)]
