"""Events by a field: exact, of all widths and signs, with what is kept bounded."""

import random

import pytest

from kprobes.errors import UsageError
from kprobes.model.events import Events, each_event
from kprobes.ordering import GreatestFirst
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout

U64 = make_layout(1, ("u64",), event="wide")
S64 = make_layout(2, ("s64",), event="signed")
U8 = make_layout(3, ("u8",), event="small")
OTHER = make_layout(4, (), event="other")


def some(count: int, seed: int = 1) -> list[Events]:
    """Return rounds of events of all kinds of numbers, with ties."""
    rng = random.Random(seed)
    rounds: list[Events] = []
    for start in range(0, count, 50):
        rows: dict[int, list[Row]] = {1: [], 2: [], 3: []}
        for at in range(start, min(start + 50, count)):
            kind = rng.choice((1, 2, 3))
            low, high = {1: (0, 2**64 - 1), 2: (-(2**63), 2**63 - 1), 3: (0, 255)}[kind]
            value = rng.choice((rng.randint(low, high), low, high, 7))
            rows[kind].append(Row(ts=at, values=(value,)))
        batches = [make_batch(each, rows[each.event_id]) for each in (U64, S64, U8)]
        rounds.append(make_events([batch for batch in batches if len(batch)]))
    return rounds


@pytest.mark.parametrize("most", [None, 1, 20, 10_000])
def test_the_order_is_that_of_the_numbers_and_then_of_time(most: int | None) -> None:
    rounds = some(9000)
    greatest = GreatestFirst("a0", most)
    for events in rounds:
        greatest.take(events)

    found = [(event.args["a0"], event.ts) for event in each_event(greatest.ordered())]

    every = [(event.args["a0"], event.ts) for events in rounds for event in each_event(events)]
    assert found == sorted(every, key=lambda each: (-each[0], each[1]))[:most]


def test_what_is_let_go_of_is_no_longer_held() -> None:
    greatest = GreatestFirst("a0", 5)
    sizes: list[int] = []
    for events in some(20_000):
        greatest.take(events)
        sizes.append(len(greatest))

    assert max(sizes) < 5000


def test_events_without_the_field_are_counted_and_left_out() -> None:
    greatest = GreatestFirst("a0")
    can_fault = make_layout(9, ("s64",), event="x", can_fault=True)
    numbers = make_batch(can_fault, [Row(values=(3,)), Row(values=(None,)), Row(values=(-3,))])
    greatest.take(make_events([numbers, make_batch(OTHER, [Row(), Row()])]))

    found = [event.args["a0"] for event in each_event(greatest.ordered())]

    assert found == [3, -3]
    assert greatest.left_out == 3


def test_a_field_that_no_event_has_is_refused_with_those_there_are() -> None:
    greatest = GreatestFirst("none")
    for events in some(100):
        greatest.take(events)

    with pytest.raises(UsageError, match="no event has a number 'none'; there are: a0, cpu, pid"):
        greatest.ordered()


def test_a_text_is_no_number() -> None:
    text = make_layout(4, ("string",), event="other")

    with pytest.raises(UsageError, match="a0 of other is no number"):
        GreatestFirst("a0").take(make_events([make_batch(text, [Row(values=(b"x",))])]))
