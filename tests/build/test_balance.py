"""Entries and returns held against each other: what adds up, and what is told when it does not."""

import pytest

from kprobes.model.resolved import CONTEXT_IRQS_ON, CONTEXT_SERVING_SOFTIRQ
from tests.build.balance import Balance, balance
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout

PAIRS = {"f": ("in", "out"), "g": ("into", "from")}
_INTERRUPTS = 1 << 14
"""Stacks from here on are interrupts'."""
_MORE = [("into", 1, 50), ("from", 1, 50)]
EVENTS = [event for pair in PAIRS.values() for event in pair]


def judged(*hits: tuple[str, int, int]) -> Balance:
    """Judge hits in the order of time: an event's name, a pid, and an address in its stack."""
    batches = [
        make_batch(
            make_layout(n, ["u64"], event=event, names=["stack"]),
            [
                Row(
                    pid=pid,
                    values=(stack,),
                    context=CONTEXT_IRQS_ON if stack < _INTERRUPTS else CONTEXT_SERVING_SOFTIRQ,
                )
                for name, pid, stack in hits
                if name == event
            ],
        )
        for n, event in enumerate(EVENTS, 1)
    ]
    seen = [0] * len(EVENTS)
    order: list[tuple[int, int]] = []
    for name, _, _ in hits:
        n = EVENTS.index(name)
        order.append((n, seen[n]))
        seen[n] += 1
    return balance([make_events(batches, order)], PAIRS)


def test_calls_that_return_add_up_by_task_and_function() -> None:
    found = judged(
        ("in", 1, 90),
        ("in", 2, 90),
        ("into", 1, 70),
        ("out", 2, 90),
        ("from", 1, 70),
        ("out", 1, 90),
    )

    assert (found.entries, found.returns, found.begun_before, found.inside) == (3, 3, 0, 0)
    assert found.reached == {"f", "g"}
    assert found.wrong == ()


def test_who_is_inside_at_the_beginning_and_at_the_end_is_counted() -> None:
    found = judged(("out", 1, 90), ("in", 1, 90), ("out", 1, 90), ("in", 2, 90))

    assert (found.begun_before, found.inside, found.wrong) == (1, 1, ())


def test_recursion_adds_up() -> None:
    assert judged(("in", 1, 90), ("in", 1, 70), ("out", 1, 70), ("out", 1, 90)).wrong == ()


def test_calls_of_interrupts_come_on_top_of_one_that_had_begun_or_goes_on() -> None:
    interrupt = [("in", 1, _INTERRUPTS + 95), ("out", 1, _INTERRUPTS + 95)]

    begun = judged(*interrupt, ("out", 1, 90))
    goes_on = judged(("in", 1, 90), *interrupt)

    assert (begun.begun_before, begun.wrong) == (1, ())
    assert (goes_on.inside, goes_on.wrong) == (1, ())


def test_a_call_that_ends_in_a_jump_returns_with_the_other() -> None:
    assert judged(("into", 1, 90), ("from", 1, 90), ("out", 1, 90)).wrong == ()


def test_what_is_on_its_way_when_it_ends_comes_after_what_interrupted_it() -> None:
    interrupt = ("in", 1, _INTERRUPTS + 95)

    found = judged(("into", 1, 90), interrupt, ("from", 1, 90))

    assert (found.inside, found.wrong) == (1, ())


@pytest.mark.parametrize("stack", [90, 70])
def test_a_return_that_is_not_there_is_told(stack: int) -> None:
    found = judged(("in", 1, stack), ("in", 1, 90), ("out", 1, 90), *_MORE)

    assert found.wrong == ("f, task 1: an entry without a return",)


@pytest.mark.parametrize("stack", [90, 70])
def test_a_return_too_many_is_told(stack: int) -> None:
    found = judged(("in", 1, 90), ("out", 1, 90), ("out", 1, stack))

    assert found.wrong == ("f, task 1: a return without an entry",)


def test_an_entry_that_is_not_there_is_told_by_what_another_function_did() -> None:
    found = judged(("into", 1, 90), ("from", 1, 90), ("out", 1, 70))

    assert found.wrong == ("f, task 1: a return without an entry",)
