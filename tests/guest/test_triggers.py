"""Words of triggers in a guest: what they say at first, and what changes them."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kprobes.drain import nothing
from kprobes.errors import GuestReplacedError
from kprobes.guest.guest import GuestMemory
from kprobes.guest.triggers import TriggerPause, TriggerWords
from kprobes.lang.trigger import parse_trigger
from kprobes.model.options import Wanted
from kprobes.model.trigger import (
    WORD_GONE_ON,
    WORD_PAUSED,
    WORD_PAUSES,
    SoftEnable,
    Trigger,
)
from kprobes.units import U64, Addr
from tests.build.definitions import read
from tests.build.guest import DATA, make_memory

_TRACING, _STOPPED, _SNAPSHOTS, _SOFT_ENABLES, _LEFT = 0, 8, 16, 64, 64 + 8 * 252
_IS_THERE = _LEFT + 8 * 252


@pytest.fixture
def memory() -> GuestMemory:
    memory = make_memory()
    memory.write(DATA, bytes(8192))
    return memory


@pytest.fixture
def words(memory: GuestMemory) -> TriggerWords:
    found = TriggerWords(memory, Addr(DATA))
    found.begin(tracing_on=True)
    return found


def word(memory: GuestMemory, offset: int) -> int:
    return int.from_bytes(memory.read(DATA + offset, 8), "little")


def trigger(text: str, number: int) -> Trigger:
    return replace(parse_trigger(text).trigger, number=number)


def wanted(*triggers: Trigger, **soft_enables: bool) -> Wanted:
    definition = replace(read("p f"), triggers=triggers)
    numbers = {int(name.removeprefix("s")): (is_on, 0) for name, is_on in soft_enables.items()}
    return Wanted(definitions=[definition, definition], soft_enables=numbers)


def switched(soft_enables: dict[int, SoftEnable]) -> Wanted:
    return Wanted(soft_enables=soft_enables)


@pytest.mark.parametrize("tracing_on", [True, False])
def test_a_recording_begins_with_everything_as_it_was_asked_for(
    memory: GuestMemory, words: TriggerWords, *, tracing_on: bool
) -> None:
    words.add(wanted(trigger("traceoff:5", 3), s2=True))
    memory.write(DATA + _STOPPED, bytes([1]))
    memory.write(DATA + _SNAPSHOTS, bytes([7]))
    assert (words.is_stopped, words.snapshots) == (True, 7)

    words.begin(tracing_on=tracing_on)

    assert (words.is_stopped, words.snapshots) == (False, 0)
    assert word(memory, _TRACING) == tracing_on
    assert word(memory, _SOFT_ENABLES + 16) == word(memory, _LEFT + 24) == 0


def test_tracing_is_on_again_when_nothing_can_turn_it_off(
    memory: GuestMemory, words: TriggerWords
) -> None:
    words.add(wanted(trigger("traceoff", 1)))
    memory.write(DATA + _TRACING, bytes(8))
    words.add(wanted(trigger("traceoff", 1), trigger("stop", 2)))
    assert word(memory, _TRACING) == 0

    words.soft_enable(wanted(trigger("traceoff", 1), trigger("stop", 2)))
    without, again = wanted(trigger("snapshot", 3)), wanted(trigger("traceon", 1))
    words.add(without)
    words.soft_enable(without)
    words.add(again)

    assert word(memory, _TRACING) == 1


def test_a_change_that_is_refused_leaves_tracing_off_and_counts_used_up(
    memory: GuestMemory, words: TriggerWords
) -> None:
    first = wanted(trigger("traceoff:1", 1))
    words.add(first)
    words.soft_enable(first)
    # It has done what it may.
    memory.write(DATA + _TRACING, bytes(8))
    memory.write(DATA + _LEFT + 8, bytes(8))

    # Without the second half nothing has changed.
    words.add(wanted())
    words.add(first)
    words.soft_enable(first)

    assert word(memory, _TRACING) == 0
    assert words.left(first.triggers) == {1: 0}


def test_what_is_taken_away_does_nothing_any_more(memory: GuestMemory, words: TriggerWords) -> None:
    stop, off = trigger("stop", 2), trigger("traceoff:5", 3)
    hist = replace(trigger("hist:keys=a", 4), soft_enable=7)
    first = wanted(stop, off, hist, s7=True)
    words.add(first)
    words.soft_enable(first)
    places = [_IS_THERE + 16, _IS_THERE + 24, _SOFT_ENABLES + 56]
    assert [word(memory, place) for place in places] == [1, 1, 1]

    # Not before the change: it may be refused.
    words.add(wanted(off))
    assert [word(memory, place) for place in places] == [1, 1, 1]
    words.soft_enable(wanted(off))

    assert [word(memory, place) for place in places] == [0, 1, 0]
    instead = replace(hist, number=5)
    words.add(wanted(hist, s7=True))
    words.soft_enable(wanted(hist, s7=True))
    words.add(wanted(instead, s7=True))
    words.soft_enable(wanted(instead, s7=True))
    assert word(memory, places[2]) == 1
    words.add(first)
    words.soft_enable(first)
    assert [word(memory, place) for place in places] == [1, 1, 1]
    words.begin(tracing_on=True)
    assert [word(memory, place) for place in places] == [0, 0, 0]


def test_counts_are_whole_once(memory: GuestMemory, words: TriggerWords) -> None:
    first = trigger("traceoff:5", 1)
    words.add(wanted(first, trigger("stop", 2)))
    words.soft_enable(wanted(first, trigger("stop", 2)))
    memory.write(DATA + _LEFT + 8, bytes([3]))

    second, fourth, ninth = trigger("stop", 2), trigger("traceon:7", 4), trigger("stop", 9)
    words.add(wanted(first, second, fourth))

    assert words.left([first, second, fourth, ninth]) == {1: 3, 2: 0, 4: 7}
    # What is left is known when the recording has ended, until the next one begins.
    words.add(wanted())
    words.soft_enable(wanted())
    assert words.left([first, fourth]) == {1: 3, 4: 7}
    # A number that was given again, long afterwards.
    words.add(wanted(trigger("traceoff:9", 1)))
    assert words.left([first]) == {1: 9}
    words.begin(tracing_on=True)
    words.add(wanted(first))
    assert words.left([first, fourth]) == {1: 5}


def test_a_hist_trigger_counts_or_not_as_its_word_says(
    memory: GuestMemory, words: TriggerWords
) -> None:
    counting, paused = (
        replace(trigger("hist:keys=comm", number), soft_enable=number + 1) for number in (1, 2)
    )
    words.add(wanted(counting, paused, s2=True, s3=False))
    assert words.left([counting, paused]) == {1: 1, 2: 0}

    # As another trigger does.
    memory.write(DATA + _SOFT_ENABLES + 8 * 3, bytes([1]))

    assert words.left([paused]) == {2: 1}


def test_a_switch_is_set_where_the_event_has_changed(
    memory: GuestMemory, words: TriggerWords
) -> None:
    words.add(wanted(s1=True, s2=False))
    assert [word(memory, _SOFT_ENABLES + 8 * n) for n in (1, 2)] == [1, 0]
    # Triggers have changed both.
    memory.write(DATA + _SOFT_ENABLES + 8, bytes(8))
    memory.write(DATA + _SOFT_ENABLES + 16, bytes([1]))

    words.add(wanted(s1=True, s2=False))
    words.soft_enable(switched({1: (True, 0), 2: (False, 0)}))
    assert [word(memory, _SOFT_ENABLES + 8 * n) for n in (1, 2)] == [0, 1]

    words.soft_enable(switched({1: (True, 0), 2: (True, 1)}))
    words.soft_enable(switched({1: (True, 0), 2: (False, 2)}))
    assert [word(memory, _SOFT_ENABLES + 8 * n) for n in (1, 2)] == [0, 0]
    # It was enabled once more, which undoes what the trigger did.
    words.soft_enable(switched({1: (True, 1), 2: (False, 2)}))
    assert [word(memory, _SOFT_ENABLES + 8 * n) for n in (1, 2)] == [1, 0]


def test_cpus_that_wait_go_on_together(memory: GuestMemory, words: TriggerWords) -> None:
    first = wanted(trigger("pause if a == 1", 5))
    words.add(first)
    words.soft_enable(first)
    # Two have asked, the second on CPU 3.
    memory.write(DATA + WORD_PAUSES, bytes([2]))
    memory.write(DATA + WORD_PAUSED, (3 << 32 | 5).to_bytes(8, "little"))

    found, cpu = words.paused
    assert (words.pauses, found, cpu) == (2, first.triggers[0], 3)
    assert words.go_on()
    assert word(memory, WORD_GONE_ON) == 2
    # One that has waited in vain.
    memory.write(DATA + WORD_PAUSES, bytes([3]))
    memory.write(DATA + WORD_GONE_ON, b"\xff" * 8)
    assert not words.go_on()
    assert word(memory, WORD_GONE_ON) == 3
    words.soft_enable(wanted())
    assert words.paused == (None, 3)


def test_a_guest_that_is_another_is_neither_written_to_nor_stopped(
    memory: GuestMemory, words: TriggerWords
) -> None:
    def replaced() -> TriggerWords:
        raise GuestReplacedError("it was rebooted")

    told = list[str]()
    guest: Any = SimpleNamespace(readable=nullcontext, stub=None)
    ours = TriggerPause(lambda: words, guest, nothing, 1, told.append)
    theirs = TriggerPause(replaced, guest, nothing, 1, told.append)
    memory.write(DATA + WORD_PAUSES, bytes([1]))

    theirs.end()
    with pytest.raises(GuestReplacedError):
        theirs.check()
    assert word(memory, WORD_GONE_ON) == 0
    assert told == []

    guest.stub = SimpleNamespace(turn=nullcontext(), is_debugged=False)
    ours.end()
    ours.end()
    assert word(memory, WORD_GONE_ON) == U64
    assert told == [
        "a trigger has asked for the guest to be stopped when nobody looked; it was not"
    ]
