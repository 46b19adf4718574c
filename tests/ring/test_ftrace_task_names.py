from collections.abc import Mapping

from kprobes.ring.ftrace import Naming, TaskNames
from tests.build.events import Row, make_batch
from tests.build.ring import make_layout

LAYOUT = make_layout(1, ("u64",))


def names_of(names: TaskNames, *hits: tuple[int, int], cpu: int = 0) -> list[bytes]:
    """Names at hits of (pid, time)."""
    rows = [Row(pid=pid, ts=ts, cpu=cpu, values=(0,)) for pid, ts in hits]
    return names.of(make_batch(LAYOUT, rows)).tolist()


def nobody() -> Mapping[int, bytes]:
    return {}


def test_a_name_counts_from_its_time_on() -> None:
    names = TaskNames({5: b"sh", 6: b"bash"}, nobody)
    names.note([Naming(pid=5, ts=20, old=b"sh", new=b"ls")])

    assert names_of(names, (5, 19), (6, 25), (5, 20), (5, 30)) == [b"sh", b"bash", b"ls", b"ls"]


def test_what_a_task_was_called_before_is_told_with_its_new_name() -> None:
    names = TaskNames({}, nobody)
    names.note([Naming(pid=5, ts=20, old=b"sh", new=b"ls")])

    assert names_of(names, (5, 1)) == [b"sh"]


def test_a_pid_can_be_another_tasks_later() -> None:
    names = TaskNames({5: b"first"}, nobody)
    names.note([Naming(pid=5, ts=40, old=b"sh", new=b"cat")])
    names.note([Naming(pid=5, ts=30, old=None, new=b"sh")])

    assert names_of(names, (5, 50), (5, 35), (5, 10)) == [b"cat", b"sh", b"first"]


def test_settled_names_stay_and_their_times_go() -> None:
    names = TaskNames({}, nobody)
    names.note(
        [Naming(pid=5, ts=20, old=None, new=b"sh"), Naming(pid=5, ts=60, old=b"sh", new=b"x")]
    )

    names.forget_until(50)

    assert names_of(names, (5, 10), (5, 70)) == [b"sh", b"x"]
    names.forget_until(60)
    assert names_of(names, (5, 10)) == [b"x"]


def test_the_kernel_is_asked_for_a_task_that_nobody_told_of() -> None:
    asked: list[None] = []

    def ask() -> Mapping[int, bytes]:
        asked.append(None)
        return {7: b"saved"}

    names = TaskNames({5: b"sh"}, ask)

    assert names_of(names, (5, 1)) == [b"sh"]
    assert asked == []
    assert names_of(names, (7, 1), (8, 1), (5, 1)) == [b"saved", b"<...>", b"sh"]
    assert names_of(names, (7, 2), (8, 2)) == [b"saved", b"<...>"]
    assert len(asked) == 1


def test_a_new_task_is_not_asked_for() -> None:
    def ask() -> Mapping[int, bytes]:
        raise AssertionError("asked")

    names = TaskNames({}, ask)
    names.note([Naming(pid=5, ts=2, old=None, new=b"sh")])

    assert names_of(names, (5, 1), (5, 2)) == [b"<...>", b"sh"]


def test_an_idle_cpu_is_its_swapper() -> None:
    assert names_of(TaskNames({}, nobody), (0, 1), cpu=3) == [b"swapper/3"]
