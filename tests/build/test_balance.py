"""Entries and returns held against each other: what adds up, and what is told when it does not."""

from tests.build.balance import Balance, balance
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout

PAIRS = {"f": ("in", "out"), "g": ("into", "from")}
EVENTS = [event for pair in PAIRS.values() for event in pair]


def judged(*hits: tuple[str, int]) -> Balance:
    """Judge hits in the order of time: an event's name and a pid each."""
    batches = [
        make_batch(
            make_layout(n, event=event), [Row(pid=pid) for name, pid in hits if name == event]
        )
        for n, event in enumerate(EVENTS, 1)
    ]
    seen = [0] * len(EVENTS)
    order: list[tuple[int, int]] = []
    for name, _ in hits:
        n = EVENTS.index(name)
        order.append((n, seen[n]))
        seen[n] += 1
    return balance([make_events(batches, order)], PAIRS)


def test_calls_that_return_add_up_by_task_and_function() -> None:
    found = judged(("in", 1), ("in", 2), ("into", 1), ("out", 2), ("from", 1), ("out", 1))

    assert (found.entries, found.returns, found.begun_before, found.inside) == (3, 3, 0, 0)
    assert found.reached == {"f", "g"}
    assert found.wrong == ()


def test_who_is_inside_at_the_beginning_and_at_the_end_is_counted() -> None:
    found = judged(("out", 1), ("in", 1), ("out", 1), ("in", 2))

    assert (found.begun_before, found.inside, found.wrong) == (1, 1, ())


def test_recursion_adds_up() -> None:
    assert judged(("in", 1), ("in", 1), ("out", 1), ("out", 1)).wrong == ()


def test_a_return_that_is_not_there_is_told() -> None:
    found = judged(("in", 1), ("in", 1), ("out", 1))

    assert found.wrong == ("f, task 1: 1 entries without a return among 3 records",)


def test_a_return_too_many_is_told() -> None:
    found = judged(("in", 1), ("out", 1), ("out", 1))

    assert found.wrong == ("f, task 1: 1 returns without an entry among 3 records",)
