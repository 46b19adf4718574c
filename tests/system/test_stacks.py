"""Stacks of hits, beside those that the kernel itself records with its option ``stacktrace``."""

import re
from collections import defaultdict
from collections.abc import Generator, Sequence

import pytest

import kprobes
from kprobes.errors import DefinitionError
from kprobes.model.abi import WALK_USER_STACK
from kprobes.model.events import addresses
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.dialect import DIALECTS
from tests.build.programs import BASE, PAGE, framed
from tests.system.conftest import SUITES
from tests.system.oracle import Tracefs

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("7.x"),
]

_TASKS = ("vfs_read", "vfs_write", "do_sys_openat2", "wake_up_new_task", "try_to_wake_up", "mmput")
_INTERRUPTS = ("hrtimer_interrupt", "update_process_times", "run_timer_softirq", "rcu_core")
_WORKLOAD = """
i=1
while [ $i -le 100 ]; do
    dd if=/dev/zero of=/dev/null bs=77 count=40 2>/dev/null
    i=$((i + 1))
done
true
"""
_PROGRAM, _DEPTH = "/framed", 12
_CALL = "sched_get_priority_min"
"""A system call that nobody else in the guest makes."""
_HEAD = re.compile(r".{16}-(?P<pid>\d+) +\[(?P<cpu>\d+)\] \S+ +[\d.]+: (?P<what>.*)")
_EVENT = re.compile(r"(\w+): \(.*\)$")

Key = tuple[str, str, str]
Stack = tuple[str, ...]
Stacks = dict[Key, list[Stack]]
"""By event, task and, of idle ones, CPU the functions of each hit's stack, as time goes by."""


def stacks_of(text: str, what: str = "stack trace") -> Stacks:
    """Return the stacks of a trace, each of which comes after its event, with such a head."""
    found: dict[Key, list[list[str]]] = defaultdict(list)
    # An interrupt's may come between an event and its stack: the last one that has none is its.
    events: dict[tuple[str, str], list[str]] = defaultdict(list)
    frames: list[str] = []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if line.startswith(" => "):
            frames.append(line.removeprefix(" => "))
        elif head is not None:
            event, place = _EVENT.match(head["what"]), (head["pid"], head["cpu"])
            if event is not None:
                events[place].append(event[1])
            else:
                assert head["what"] == f"<{what}>", line
                frames = []
                # A task may move between the kernel's probe and ours; there are several idle ones.
                where = place if head["pid"] == "0" else (head["pid"], "")
                found[events[place].pop(), *where].append(frames)
    return {key: [tuple(stack) for stack in stacks] for key, stacks in found.items()}


def not_within(part: Sequence[Stack], whole: Sequence[Stack]) -> Stack | None:
    """Return the first of a part that is not in a whole, in that order."""
    left = iter(whole)
    return next((stack for stack in part if stack not in left), None)


@pytest.fixture(scope="module", params=["6.1", "7.x"])
def guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    files = {_PROGRAM: framed(_CALL, _DEPTH, arch=arch)}
    options = MachineOptions(suite=SUITES[request.param], arch=arch, files=files)
    with kprobes.boot(options) as session:
        assert session.run(f"chmod 755 {_PROGRAM}").status == 0
        yield session


@pytest.fixture(scope="module")
def stacks(guest: GuestSession) -> tuple[Stacks, Stacks]:
    """Return ours, and the kernel's of the same hits, but for those that it missed."""
    names = [f"p:{name} {name}" for name in (*_TASKS, *_INTERRUPTS)]
    guest.probe("\n".join(names), stacktrace=True)
    tracefs = Tracefs(guest)
    tracefs.arm([name.replace(":", ":theirs/", 1) for name in names], buffer_kib=65536)
    tracefs.run("echo 0 > tracing_on; echo 1 > options/stacktrace; : > trace")
    with guest.record() as trace:
        tracefs.start()
        assert guest.run(_WORKLOAD).status == 0
        tracefs.stop()
    native = tracefs.read()
    tracefs.disarm()
    assert native.overwritten == 0
    assert not any(hits.all_missed for hits in trace.hits)
    assert trace.counts.lost == 0
    return stacks_of(trace.to_text()), stacks_of(native.text)


def test_stacks_of_programs_are_those_of_the_kernel(guest: GuestSession, arch: str) -> None:
    texts = [f"{each} {DIALECTS[arch].syscall}{each}" for each in ("read", _CALL)]
    if guest.kernel.symbols.find(WALK_USER_STACK) is None:
        # Of arm64 since 6.8.
        with pytest.raises(DefinitionError, match="CONFIG_USER_STACKTRACE_SUPPORT"):
            guest.probe(f"p:{texts[0]}", userstacktrace=True)
        return
    probe = guest.probe("\n".join(f"p:{text}" for text in texts), userstacktrace=True)
    tracefs = Tracefs(guest)
    tracefs.arm([f"p:theirs/{text}" for text in texts], buffer_kib=4096)
    tracefs.run("echo 0 > tracing_on; echo 1 > options/userstacktrace; : > trace")
    with guest.record(probe) as trace:
        tracefs.start()
        assert guest.run(f"{_PROGRAM}; dd if=/dev/zero of=/dev/null bs=77 count=9").status == 0
        tracefs.stop()
    probe.delete()
    native = tracefs.read()
    tracefs.run("echo 0 > options/userstacktrace")
    tracefs.disarm()

    ours, theirs = (stacks_of(t, "user stack trace") for t in (trace.to_text(), native.text))
    # The kernel keeps 8 addresses.
    cut = {key: [stack[:8] for stack in found] for key, found in ours.items()}
    missing = {key: not_within(found, cut.get(key, ())) for key, found in theirs.items()}
    assert {key: stack for key, stack in missing.items() if stack is not None} == {}
    asked = [stack for key, found in theirs.items() for stack in found if key[0] == _CALL]
    (whole,) = [stack for key, found in ours.items() for stack in found if key[0] == _CALL]
    assert (len(asked), len(whole)) == (1, _DEPTH + 1)
    assert all(BASE < _address(each) < BASE + PAGE for each in whole)
    # One program's, from anywhere in the kernel, as a key.
    keys = trace[_CALL].count("ustack").keys[0].tolist()
    assert [*map(addresses, keys)] == [tuple(map(_address, whole))]


def _address(frame: str) -> int:
    # As a program's is printed.
    return int(frame.strip(" <>"), 16)


def test_stacks_are_those_of_the_kernel(stacks: tuple[Stacks, Stacks], arch: str) -> None:
    ours, theirs = stacks
    if arch == "arm64":
        # Its unwinder does not find the caller that x30 has: ours has one more.
        ours = {key: [(s[0], *s[2:]) for s in found] for key, found in ours.items()}
    assert sum(map(len, theirs.values())) > 10_000
    assert {key[0] for key in theirs} == {*_TASKS, *_INTERRUPTS}
    missing = {key: not_within(found, ours.get(key, ())) for key, found in theirs.items()}
    assert {key: stack for key, stack in missing.items() if stack is not None} == {}


def test_stacks_of_returns_are_those_of_the_kernel(guest: GuestSession) -> None:
    # One after the other: the kernel's own takes the return address over.
    tracefs, workload = Tracefs(guest), "dd if=/dev/zero of=/dev/null bs=77 count=40"
    tracefs.arm(["r:theirs/back vfs_write"], buffer_kib=4096)
    tracefs.run("echo 1 > options/stacktrace; : > trace")
    assert guest.run(workload).status == 0
    native = tracefs.read()
    tracefs.disarm()
    probe = guest.probe("r:back vfs_write", stacktrace=True)
    with guest.record(probe) as trace:
        assert guest.run(workload).status == 0

    (ours, theirs) = (
        {stack for found in stacks_of(text).values() for stack in found}
        for text in (trace.to_text(), native.text)
    )
    assert ours == theirs
    assert all(stack[0] == "ksys_write" for stack in ours)


def test_the_caller_of_a_function_is_the_second(stacks: tuple[Stacks, Stacks]) -> None:
    ours, _ = stacks
    read = {stack[:2] for key, found in ours.items() for stack in found if key[0] == "vfs_read"}
    assert ("vfs_read", "ksys_read") in read
