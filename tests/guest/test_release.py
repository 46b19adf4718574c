"""Everything goes back to the guest, in an order that cannot hurt it, whatever comes between."""

from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import cast

import pytest

from kprobes.arch.x86_64.inject import INJECT_OPS
from kprobes.guest import release
from kprobes.guest.allocations import Allocation, AllocationLog, Call, Kind
from kprobes.guest.guest import Guest
from kprobes.guest.inject import Task
from kprobes.guest.journal import Journal
from kprobes.guest.release import DeadCalls, free, reporting
from kprobes.units import Addr
from tests.build.kernel import TEXT, make_kernel, symbol

NAMES = (
    *("set_memory_nx", "set_memory_rw", "module_memfree", "vfree", "free_percpu"),
    *("unregister_die_notifier", "tracepoint_probe_unregister", "synchronize_rcu"),
)
ADDRS = {name: Addr(TEXT + 0x100 * n) for n, name in enumerate(NAMES)}
KERNEL = make_kernel([symbol(name, addr) for name, addr in ADDRS.items()])
CODE = 0x5000


class FakeTask:
    """A task whose calls come back, but for one that is interrupted on its way, or before."""

    def __init__(self, interrupted: int, *, is_made: bool = True) -> None:
        self.allocations = AllocationLog()
        self.trap = SimpleNamespace(info=INJECT_OPS)
        self.memory = None
        self.is_calling = False
        self.called: list[str] = []
        self._interrupted, self._is_made = interrupted, is_made
        for kind, addr in ((Kind.DATA, 0x1000), (Kind.CODE, CODE)):
            self._lend(Allocation(kind=kind, addr=0, size=4096), addr)
        self._lend(Allocation(kind=Kind.ROX, addr=CODE, size=4096), 0)
        self._lend(Allocation(kind=Kind.PER_CPU, addr=0, size=64), 0x40)
        # register_die_notifier() returns 0.
        self._lend(Allocation(kind=Kind.NOTIFIER, addr=0x1800, size=0), 0)

    def _lend(self, allocation: Allocation, result: int) -> None:
        self.allocations.begin(Call(frame=1, trap=2, allocates=allocation))
        self.allocations.end(result)

    def call(self, function: Addr, *args: int, returns: Allocation | None = None) -> int:
        del args
        assert not self.is_calling
        self.allocations.begin(Call(frame=1, trap=2, returns=returns))
        is_interrupted = len(self.called) == self._interrupted
        if is_interrupted and not self._is_made:
            self._interrupted = -1
            raise KeyboardInterrupt
        self.called.append(next(name for name, addr in ADDRS.items() if addr == function))
        self.is_calling = True
        if is_interrupted:
            raise KeyboardInterrupt
        return self.finish(1.0)

    def finish(self, timeout_s: float) -> int:
        assert timeout_s > 0
        self.is_calling = False
        self.allocations.end(0)
        return 0


def given_back(interrupted: int, *, is_made: bool = True) -> FakeTask:
    task = FakeTask(interrupted, is_made=is_made)
    is_whole = interrupted < 0
    with nullcontext() if is_whole else pytest.raises(KeyboardInterrupt):
        free(cast("Task", task), KERNEL)
    return task


def test_the_last_that_was_allocated_goes_back_first() -> None:
    task = given_back(-1)

    assert task.called == [
        "unregister_die_notifier",
        *("free_percpu", "set_memory_nx", "set_memory_rw", "module_memfree", "vfree"),
    ]
    assert task.allocations.is_empty


def test_tracepoints_are_let_go_all_at_once_before_any_memory_goes_back() -> None:
    task, names = FakeTask(-1), ("tracepoint_probe_unregister", "synchronize_rcu")
    for addr in (0x7000, 0x7100):
        point = Allocation(kind=Kind.TRACEPOINT, addr=addr, size=CODE + 0x100)
        task.allocations.begin(Call(frame=1, trap=2, allocates=point))
        task.allocations.end(0)

    free(cast("Task", task), KERNEL)

    assert task.called[:4] == [names[0], names[0], names[1], "unregister_die_notifier"]
    assert task.called.count(names[1]) == 1
    assert task.allocations.is_empty


@pytest.mark.parametrize("is_made", [True, False])
@pytest.mark.parametrize("interrupted", range(6))
def test_wherever_it_is_interrupted_all_goes_back_once(interrupted: int, is_made: bool) -> None:
    task = given_back(interrupted, is_made=is_made)

    freed = [name for name in task.called if "free" in name]
    assert freed == ["free_percpu", "module_memfree", "vfree"]
    assert task.allocations.is_empty


@pytest.mark.parametrize("interrupted", range(6))
def test_code_is_freed_only_when_its_pages_are_as_they_arrived(interrupted: int) -> None:
    task = given_back(interrupted)

    before = task.called[: task.called.index("module_memfree")]
    assert before[-2:] == ["set_memory_nx", "set_memory_rw"]


@pytest.mark.parametrize("interrupted", range(6))
def test_the_guest_s_callback_is_taken_back_once_before_any_memory_is(interrupted: int) -> None:
    task = given_back(interrupted)

    assert task.called[0] == "unregister_die_notifier"
    assert task.called.count("unregister_die_notifier") == 1


def test_who_waits_for_a_guest_that_hangs_is_told_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "_PATIENCE_S", 0)
    said = Queue[str]()

    with reporting(said.put, "waiting for a task"):
        told = said.get(timeout=20)

    assert told == "waiting for a task"


def test_who_does_not_wait_is_told_nothing() -> None:
    said: list[str] = []

    with reporting(said.append, "waiting for a task"):
        pass

    assert said == []


def test_calls_of_dead_tasks_are_looked_for_when_more_were_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[bool] = []
    stub = SimpleNamespace(paused=nullcontext)

    def no_code(*_: object) -> tuple[()]:
        return ()

    def look(*_: object) -> None:
        looked.append(True)

    monkeypatch.setattr(release, "code_in_use", no_code)
    monkeypatch.setattr(release, "free_dead_calls", look)
    journal = cast("Journal", SimpleNamespace(check=lambda: None, allocations=None))
    guest, calls = cast("Guest", SimpleNamespace(stub=stub)), DeadCalls(journal)

    for nmissed, times in ((0, 0), (3, 1), (3, 1), (4, 2)):
        calls.free(guest, (), nmissed)
        assert len(looked) == times


def test_dead_calls_are_not_looked_for_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(release, "time", SimpleNamespace(monotonic=lambda: now))
    calls = DeadCalls(cast("Journal", None))

    assert calls.is_due()
    assert not calls.is_due()
    now += 1
    assert calls.is_due()
