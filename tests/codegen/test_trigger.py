"""Triggers as machine code: what a hit does, when, how often, and what is recorded of it."""

from collections.abc import Sequence
from random import Random

import pytest

from kprobes.codegen import trigger
from kprobes.model.trigger import WORD_GONE_ON, WORD_PAUSED, WORD_PAUSES
from kprobes.units import U64
from tests.build.overridden import AMD64, ARM64, Isa
from tests.build.records import records
from tests.build.triggered import Event, Triggered, Words, make_event

ISAS = [pytest.param(AMD64, id="amd64"), pytest.param(ARM64, id="arm64")]
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)


def recorded(found: Triggered) -> list[tuple[int, int, bool]]:
    """Return events as the model has them."""
    made: list[tuple[int, int, bool]] = []
    for each in records(found.machine, 0):  # pyright: ignore[reportArgumentType] - either is read alike
        argument, *stack = each.values
        assert isinstance(argument, int)
        made.append((each.event_id, argument, bool(stack and stack[0])))
    return made


def check(found: Triggered) -> None:
    assert recorded(found) == found.model.recorded
    assert found.words() == found.model.words


def hit(
    isa: Isa, event: Event, arguments: Sequence[int], *, tracing: int = 1, reads: bool = False
) -> Triggered:
    found = Triggered(isa, [event], Words(tracing=tracing), reads=reads)
    for each in arguments:
        found.hit(event, each)
    check(found)
    return found


@EVERY_ISA
def test_traceoff_comes_after_its_event(isa: Isa) -> None:
    found = hit(isa, make_event(isa, 0, [("traceoff", 5)]), [1, 2, 7, 3, 9])

    assert [argument for _, argument, _ in recorded(found)] == [1, 2, 7]
    assert found.words().tracing == 0


@EVERY_ISA
def test_traceon_records_its_own_event_unless_it_looks_at_it(isa: Isa) -> None:
    plain = hit(isa, make_event(isa, 0, [("traceon", 0)]), [1, 2], tracing=0)
    looking = hit(isa, make_event(isa, 0, [("traceon", 2)]), [1, 2, 3], tracing=0)

    assert [argument for _, argument, _ in recorded(plain)] == [1, 2]
    assert [argument for _, argument, _ in recorded(looking)] == [3]


@EVERY_ISA
@pytest.mark.parametrize("text", ["traceoff", "traceoff:3", "stop", "snapshot", "stacktrace"])
def test_one_that_was_taken_away_does_nothing_where_its_code_still_is(isa: Isa, text: str) -> None:
    event = make_event(isa, 0, [(text, 0), ("snapshot:5", 3)])
    found = Triggered(isa, [event], Words(gone=frozenset([1])))

    for argument in (2, 3, 4):
        found.hit(event, argument)

    check(found)
    assert recorded(found) == [(1, argument, False) for argument in (2, 3, 4)]
    assert (found.words().tracing, found.words().stopped, found.words().snapshots) == (1, 0, 2)


@EVERY_ISA
def test_a_trigger_sees_what_the_events_filter_rejects(isa: Isa) -> None:
    found = hit(isa, make_event(isa, 0, [("traceoff", 0)], least=5), [1, 9])

    assert recorded(found) == []


@EVERY_ISA
def test_a_field_that_a_trigger_looks_at_is_read_for_the_record(isa: Isa) -> None:
    # Not by those hits alone at which the trigger's filter has read it.
    event = make_event(isa, 0, [("snapshot", 5), ("traceoff:0", 7)], text="p f a=+0($arg1):u16")

    found = hit(isa, event, [2, 9, 4], reads=True)

    assert [argument for _, argument, _ in recorded(found)] == [2, 9, 4]


@EVERY_ISA
def test_only_what_changes_something_counts(isa: Isa) -> None:
    off, on = make_event(isa, 0, [("traceoff:2", 0)]), make_event(isa, 1, [("traceon:3", 0)])
    found = Triggered(isa, [off, on], Words())

    for each in (on, off, off, on, on, off, off, on, off, on):
        found.hit(each, 1)

    check(found)
    assert found.words().left == {1: 0, 11: 1}


@EVERY_ISA
def test_a_stop_stays(isa: Isa) -> None:
    found = hit(isa, make_event(isa, 0, [("stop:1", 3)]), [1, 3, 1, 4])

    assert [argument for _, argument, _ in recorded(found)] == [1, 3]
    assert found.words().stopped == 1


@EVERY_ISA
def test_a_stack_is_there_where_it_is_asked_for(isa: Isa) -> None:
    found = hit(isa, make_event(isa, 0, [("stacktrace:2", 5)], least=2), [1, 9, 3, 1, 6, 7])

    assert recorded(found) == [(1, 9, True), (1, 3, False), (1, 6, True), (1, 7, False)]


@EVERY_ISA
def test_events_switch_others(isa: Isa) -> None:
    first = make_event(isa, 0, [("enable_event:g:e:1", 5)], targets={"g:e": 2}, soft_enable=1)
    second = make_event(isa, 1, [("disable_event:g:e", 0)], targets={"g:e": 2}, soft_enable=2)
    found = Triggered(isa, [first, second], Words(soft_enables={1: 1, 2: 0}))

    for event, argument in ((second, 1), (first, 1), (first, 5), (second, 2), (second, 3)):
        found.hit(event, argument)

    check(found)
    # What disables itself is not recorded: the soft_enable comes after the trigger.
    assert recorded(found) == [(1, 1, False), (1, 5, False)]


_ALL = (
    "traceon",
    "traceoff",
    "stop",
    "snapshot",
    "stacktrace",
    "enable_event:{}",
    "disable_event:{}",
)


def _random_events(isa: Isa, random: Random) -> list[Event]:
    targets = {"g:a": 1, "g:b": 2}
    events: list[Event] = []
    for number in range(3):
        chosen = random.sample(_ALL, random.randrange(4))
        texts = [each.format(random.choice([*targets])) for each in chosen]
        counted = [
            f"{each}:{random.randrange(4)}" if random.getrandbits(1) else each for each in texts
        ]
        triggers = [(each, random.choice([0, 0, 2, 6])) for each in counted]
        least, soft_enable = random.choice([0, 0, 3]), random.choice([0, 1, 2])
        events.append(
            make_event(isa, number, triggers, least=least, soft_enable=soft_enable, targets=targets)
        )
    return events


@EVERY_ISA
@pytest.mark.parametrize("seed", range(25))
def test_any_triggers_do_what_the_kernels_would(isa: Isa, seed: int) -> None:
    random = Random(seed)
    events = _random_events(isa, random)
    words = Words(tracing=random.choice([0, 1, 1]), soft_enables={1: random.getrandbits(1), 2: 1})
    found = Triggered(isa, events, words, seed=seed)

    for _ in range(40):
        found.hit(random.choice(events), random.randrange(9))

    check(found)


@EVERY_ISA
def test_a_cpu_waits_for_the_guest_to_go_on_and_gives_up_in_the_end(
    isa: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trigger, "_MOST_LOOKS", 20)
    monkeypatch.setattr(trigger, "_WAIT_NS", 20)
    event = make_event(isa, 0, [("pause", 3)])
    found = Triggered(isa, [event], Words())
    asked, by, gone_on = WORD_PAUSES, WORD_PAUSED, WORD_GONE_ON
    found.set_word(gone_on, 1)

    found.hit(event, 2)
    assert found.word(asked) == 0
    # As if it had been let go on.
    found.hit(event, 3)
    assert (found.word(asked), found.word(by) % (1 << 32), found.word(gone_on)) == (1, 1, 1)
    found.hit(event, 4)
    assert (found.word(asked), found.word(gone_on)) == (2, U64)
    # Nobody waits any more.
    found.hit(event, 5)

    assert (found.word(asked), found.word(gone_on)) == (3, U64)
    assert [argument for _, argument, _ in recorded(found)] == [2, 3, 4, 5]
