"""Comparison of two records of returns: it must be able to say no."""

from collections import Counter
from collections.abc import Sequence

import pytest

from kprobes.model.events import Counts
from tests.system.oracle import Hit, Native
from tests.system.return_oracle import Recorded, compare

_OLD, _NEW = 7, 20
"""A task from before ours was armed, and a later one."""
_END_US = 1000
_COUNTS = Counts(recorded={}, missed={}, lost=0, damaged=0)


def hit(value: int, ts_us: int, pid: int = _NEW) -> Hit:
    return Hit(
        comm="cat",
        pid=pid,
        cpu=0,
        flags=".....",
        ts_us=ts_us,
        event="e",
        where="ksys_read+0x6b/0xf0 <- vfs_read",
        values=(str(value),),
    )


def recorded(ours: Sequence[Hit], native: Sequence[Hit], misses: int = 0) -> Recorded:
    return Recorded(
        compared=compare(ours, native, _END_US),
        counts=_COUNTS,
        native=Native(text="", misses={}),
        misses=Counter(e=misses),
        newest=_OLD,
        end_us=_END_US,
    )


def test_returns_of_one_microsecond_are_told_apart_by_their_order() -> None:
    ours, native = [hit(n, 10) for n in (1, 2, 2, 3)], [hit(n, 10) for n in (1, 2, 2, 3)]

    found = recorded(ours, native)

    assert found.compared.pairs == list(zip(ours, native, strict=True))
    assert (found.begun_after(), found.unexplained()) == ([], [])


def test_what_the_kernel_missed_is_explained_once() -> None:
    ours, native = [hit(n, 10 * n) for n in (1, 2, 3)], [hit(n, 10 * n + 2) for n in (1, 3)]

    assert recorded(ours, native, misses=1).unexplained() == []
    assert recorded(ours, native).unexplained() == [ours[1]]


def test_a_call_that_had_begun_before_is_let_pass_of_an_old_task_only() -> None:
    for pid, after in ((_OLD, 0), (_NEW, 1)):
        ours, native = [hit(2, 20, pid)], [hit(1, 15, pid), hit(2, 20, pid)]

        first = hit(0, 1, pid=99)
        found = recorded([first, *ours], [first, *native])

        assert len(found.begun_after()) == after


def test_what_the_kernel_sees_when_ours_is_disarmed_is_not_expected_of_us() -> None:
    late = _END_US + 10
    ours = [hit(1, 10), hit(2, late + 5)]

    found = recorded(ours, [hit(1, 10), hit(3, late), hit(2, late + 5)])

    assert (found.compared.native_only, found.unexplained()) == ([], [])


@pytest.mark.parametrize(
    "values", [(1, 3, 4, 5), (1, 2, 4, 3, 5), (1, 2, 3, 7, 5)], ids=["lost", "turned", "wrong"]
)
def test_a_return_of_ours_that_is_lost_turned_or_wrong_is_seen(values: Sequence[int]) -> None:
    ours = [hit(value, 10 * n) for n, value in enumerate(values, 1)]

    found = recorded(ours, [hit(n, 10 * n + 2) for n in range(1, 6)], misses=5)

    assert found.begun_after() or found.wrong_values()
