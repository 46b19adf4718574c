"""Triggers of a session's events: whose they are, what is armed for them, and what is refused."""

import pytest
from msgspec.structs import replace

from kprobes.errors import DefinitionError, RefusedError, UsageError
from kprobes.event_table import EventTable, TraceProbe
from kprobes.event_triggers import with_stack
from kprobes.lang.parser import parse_statements
from kprobes.model.codes import TriggerCode
from kprobes.model.definition import SyntheticFields, with_synthetic_fields
from kprobes.model.trigger import MOST
from tests.build.definitions import REGISTERS
from tests.test_event_table import Armer


def define(
    table: EventTable, text: str, *triggers: str, is_enabled: bool = True, stack: bool = False
) -> TraceProbe:
    fields = with_stack(SyntheticFields(stacktrace=stack), triggers)
    statements = with_synthetic_fields(parse_statements(text, registers=REGISTERS), fields)
    return table.define(statements, is_enabled=is_enabled, triggers=triggers)


@pytest.fixture
def armer() -> Armer:
    return Armer()


@pytest.fixture
def table(armer: Armer) -> EventTable:
    return EventTable(armer)


def test_an_event_with_triggers_is_armed_while_it_is_disabled(
    armer: Armer, table: EventTable
) -> None:
    probe = define(table, "p:a f", "traceoff", is_enabled=False)
    define(table, "p:b f %di", is_enabled=False)

    table.begin()

    assert (armer.armed, dict(armer.wanted.soft_enables)) == (["a"], {1: (False, 0)})
    assert not probe.is_enabled
    assert armer.wanted.checks_tracing_on
    probe.enable()
    assert dict(armer.wanted.soft_enables) == {1: (True, 1)}
    probe.disable()
    probe.trigger("!traceoff")
    assert armer.armed == []
    assert probe.triggers == ()


def test_what_a_trigger_names_is_armed_and_has_a_switch(armer: Armer, table: EventTable) -> None:
    define(table, "p:a f", is_enabled=False)
    second = define(table, "p:b g", "enable_event:kprobes:a:2")

    table.begin()

    (a, b) = armer.wanted.definitions
    ((trigger,), soft_enables) = b.triggers, armer.wanted.soft_enables
    assert (a.event, soft_enables[a.soft_enable][0], soft_enables[b.soft_enable][0]) == (
        "a",
        False,
        True,
    )
    assert (trigger.soft_enable, trigger.count) == (a.soft_enable, 2)
    assert not armer.wanted.checks_tracing_on
    # What is left of the count, as whoever arms tells.
    assert second.triggers == ("enable_event:kprobes:a:count=3",)


def test_triggers_are_added_and_taken_away_while_it_is_recorded(
    armer: Armer, table: EventTable
) -> None:
    probe, other = define(table, "p:a f\np:a g"), define(table, "p:b f")
    table.begin()

    probe.trigger("traceoff:1 if common_pid == 1")

    assert [len(each.triggers) for each in armer.wanted.definitions] == [1, 1, 0]
    first, second, _ = armer.wanted.definitions
    assert first.triggers == second.triggers
    # Of each event one.
    table.select("*").trigger("stop")
    assert [len(each.triggers) for each in armer.wanted.definitions] == [2, 2, 1]
    numbers = {each.number for d in armer.wanted.definitions for each in d.triggers}
    assert len(numbers) == 3
    other.trigger("!stop if common_pid == 7")
    assert [len(each.triggers) for each in armer.wanted.definitions] == [2, 2, 0]


def test_what_joins_an_event_has_its_triggers(table: EventTable) -> None:
    define(table, "p:a f", "traceoff")

    define(table, "p:a g", "stop")

    assert [len(each.triggers) for each in table.definitions] == [2, 2]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("traceon", TriggerCode.EXISTS),
        ("traceoff:3 if a > 1", TriggerCode.EXISTS),
        ("disable_event:kprobes:a", TriggerCode.EXISTS),
        ("enable_event:kprobes:c", TriggerCode.NO_EVENT),
        ("enable_event:others:a", TriggerCode.NO_EVENT),
        ("!enable_event:kprobes:c", TriggerCode.NO_EVENT),
        ("stacktrace", TriggerCode.NO_STACK),
        ("traceof", TriggerCode.UNKNOWN_COMMAND),
    ],
)
@pytest.mark.parametrize("is_recording", [False, True])
def test_what_is_wrong_leaves_all_as_it_was(
    armer: Armer, table: EventTable, text: str, code: TriggerCode, *, is_recording: bool
) -> None:
    probe = define(table, "p:a f", "traceoff", "enable_event:kprobes:a")
    if is_recording:
        table.begin()
    before, wanted = table.definitions, armer.wanted

    with pytest.raises(DefinitionError) as caught:
        probe.trigger(text)

    assert caught.value.code == code.name
    assert table.definitions == before
    assert armer.wanted is wanted
    assert len(probe.triggers) == 2


def test_what_cannot_be_armed_leaves_all_as_it_was(armer: Armer, table: EventTable) -> None:
    define(table, "p:a f")
    define(table, "p:b g", "enable_event:kprobes:a")
    table.begin()
    before = [replace(each) for each in table.definitions]
    armer.refused = {"nowhere"}

    with pytest.raises(RefusedError):
        define(table, "p:c nowhere", "disable_event:kprobes:b")

    assert table.definitions == before
    # Nothing of it is kept: b has no soft_enable that c would have had.
    define(table, "p:d f %di", "traceoff")
    assert [each.event for each in armer.wanted.definitions] == ["a", "b", "d"]


def test_an_event_that_a_trigger_names_stays(table: EventTable) -> None:
    target = define(table, "p:a f", is_enabled=False)
    owner = define(table, "p:b g", "enable_event:kprobes:a")

    with pytest.raises(RefusedError, match="Device or resource busy"):
        target.delete()

    owner.trigger("!enable_event:kprobes:a")
    target.delete()
    assert [each.event for each in table.definitions] == ["b"]


def test_what_names_each_other_goes_together(table: EventTable) -> None:
    define(table, "p:a f")
    define(table, "p:b g", "enable_event:kprobes:a")
    define(table, "p:c f %di", "disable_event:kprobes:a")

    with pytest.raises(RefusedError, match="a trigger enables or disables a"):
        table.select("[ab]").delete()

    table.select("*").delete()
    assert len(table) == 0


def test_triggers_go_with_their_event(table: EventTable) -> None:
    define(table, "p:a f", "traceoff").delete()

    again = define(table, "p:a f")

    assert again.triggers == ()


def test_stacks_of_all_hits_are_not_made_fewer_by_a_trigger(table: EventTable) -> None:
    with pytest.raises(DefinitionError, match="have their stacks already"):
        define(table, "p:a f", "stacktrace:1", stack=True)


def test_a_stack_by_a_trigger_is_told_from_one_for_all(table: EventTable) -> None:
    asked = define(table, "p:a f", "stacktrace:1")
    every = define(table, "p:b f", stack=True)

    with pytest.raises(DefinitionError, match="have their stacks already"):
        every.trigger("stacktrace")

    fields = [each.synthetic_fields for each in table.definitions]
    assert [(each.stacktrace, each.is_stack_triggered) for each in fields] == [
        (True, True),
        (True, False),
    ]
    assert asked.triggers == ("stacktrace:count=3",)


def test_a_snapshot_is_for_what_keeps_the_end(table: EventTable) -> None:
    probe = define(table, "p:a f")

    with pytest.raises(UsageError, match="--snapshot"):
        probe.trigger("snapshot")

    assert probe.triggers == ()
    table.options = replace(table.options, keeps_end=True)
    probe.trigger("snapshot")
    assert probe.triggers == ("snapshot:unlimited",)


def test_there_is_an_end_to_numbers(table: EventTable) -> None:
    text = "\n".join(f"p:e{n} f a{n}=%di" for n in range(MOST))

    with pytest.raises(DefinitionError) as caught:
        define(table, text, "traceoff")

    assert caught.value.code == TriggerCode.TOO_MANY.name
    assert table.definitions == []
