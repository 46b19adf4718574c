"""Triggers of a session's events: whose they are, what is armed for them, and what is refused."""

import pytest
from msgspec.structs import replace

from kprobes.errors import DefinitionError, RefusedError, UsageError
from kprobes.event_table import EventTable, TraceProbe
from kprobes.event_triggers import with_synthetic_fields
from kprobes.lang.parser import parse_statements
from kprobes.model.codes import TriggerCode
from kprobes.model.definition import Definition, SyntheticFields
from kprobes.model.trigger import MOST
from tests.build.definitions import REGISTERS
from tests.build.ring import make_layout
from tests.test_column_hist import counted
from tests.test_event_table import Armer


def define(
    table: EventTable, text: str, *triggers: str, is_enabled: bool = True, stack: bool = False
) -> TraceProbe:
    fields = SyntheticFields(stacktrace=stack)
    parsed = parse_statements(text, registers=REGISTERS)
    statements = with_synthetic_fields(parsed, fields, triggers)
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


def test_who_names_another_event_and_stays_in_part_keeps_it(table: EventTable) -> None:
    some = define(table, "p:a f\np:b g", is_enabled=False)
    more = define(table, "p:a h", "traceoff:1", is_enabled=False)
    more.trigger("enable_event:kprobes:b")

    # Of a there is still the second one, whose trigger is about b.
    with pytest.raises(RefusedError, match="enables or disables b"):
        some.delete()

    assert [each.event for each in table.definitions] == ["a", "b", "a"]
    assert [each.partition(":")[0] for each in more.triggers] == ["enable_event", "traceoff"]


def test_tables_come_in_the_order_of_their_events_with_their_names(
    armer: Armer, table: EventTable
) -> None:
    names = ["d", "b", "c", "a"]
    armer.histograms = {number: counted("keys=count") for number in range(1, 5)}
    for name in names:
        define(table, f"p:{name} f", "hist:keys=common_pid")
    table.begin()

    assert [each.event for each in table.select("*").histograms] == [f"kprobes:{n}" for n in names]


def test_a_number_is_not_given_again_soon(table: EventTable) -> None:
    probe = define(table, "p:a f", "traceoff:3")

    numbers: list[int] = []
    for _ in range(5):
        definition = table.definition(probe.numbers[0])
        assert definition is not None
        numbers += [each.number for each in definition.triggers]
        probe.trigger("!traceoff")
        probe.trigger("traceoff:3")

    assert len(set(numbers)) == 5


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


def hists(table: EventTable) -> list[tuple[str, int]]:
    """Return each hist trigger's text and the number of its table, by event."""
    found = [each for definition in table.definitions for each in definition.triggers]
    return [(each.text, each.table) for each in found if each.hist is not None]


def test_an_event_has_several_hist_triggers_each_with_a_table(
    armer: Armer, table: EventTable
) -> None:
    probe = define(table, "p:a f", "hist:keys=count", "hist:keys=count if got > 0")
    table.begin()

    probe.trigger("hist:keys=pid,cpu:vals=got:sort=got.descending:size=300:pause")

    assert probe.triggers == (
        "hist:keys=count:vals=hitcount:sort=hitcount:size=2048 [active]",
        "hist:keys=count:vals=hitcount:sort=hitcount:size=2048 if got > 0 [active]",
        "hist:keys=common_pid,common_cpu:vals=hitcount,got:sort=got.descending:size=512 [paused]",
    )
    (definition,) = armer.wanted.definitions
    assert len({each.table for each in definition.triggers}) == 3
    words = [each.soft_enable for each in definition.triggers]
    assert [armer.wanted.soft_enables[word] for word in words] == [
        (True, 0),
        (True, 0),
        (False, 0),
    ]
    assert definition.soft_enable not in words


@pytest.mark.parametrize(
    "text",
    ["hist:keys=common_pid:vals=hitcount:sort=hitcount:size=4096", "hist:keys=pid", "hist:key=pid"],
)
def test_a_hist_trigger_is_known_again_however_it_is_written(table: EventTable, text: str) -> None:
    probe = define(table, "p:a f", "hist:keys=common_pid")

    with pytest.raises(DefinitionError, match="Hist trigger already exists"):
        probe.trigger(text)
    probe.trigger(f"!{text} if got > 1")
    assert len(probe.triggers) == 1
    probe.trigger(f"!{text}")

    assert probe.triggers == ()


def test_an_events_variables_have_different_names(table: EventTable) -> None:
    probe = define(table, "p:a f", "hist:keys=count:x=got")
    other = define(table, "p:b f", "hist:keys=count:x=got")

    with pytest.raises(DefinitionError, match="Variable already defined"):
        probe.trigger("hist:keys=got:y=count,x=count")
    probe.trigger("hist:keys=count:x=got:pause")
    probe.trigger("hist:keys=got:y=count-got")

    assert [each.partition(":vals=hitcount:")[2].partition(":")[0] for each in probe.triggers] == [
        "x=got",
        "y=count-got",
    ]
    assert len(other.triggers) == 1


def test_what_pauses_continues_and_clears_says_so_of_one_that_is_there(
    armer: Armer, table: EventTable
) -> None:
    probe = define(table, "p:a f", "hist:keys=count")
    table.begin()
    ((_, first),) = hists(table)
    armed = armer.wanted.definitions

    probe.trigger("hist:keys=count:pause")
    assert probe.triggers[0].endswith("[paused]")
    assert (False, 1) in armer.wanted.soft_enables.values()
    probe.trigger("hist:keys=count:cont")
    assert probe.triggers[0].endswith("[active]")
    # Only a word has changed.
    assert all(a is b for a, b in zip(armed, armer.wanted.definitions, strict=True))
    probe.trigger("hist:keys=count:clear")

    ((_, second),) = hists(table)
    assert second != first
    with pytest.raises(DefinitionError, match="nonexistent hist trigger"):
        probe.trigger("hist:keys=got:cont")
    assert len(probe.triggers) == 1


def test_after_a_recording_a_hist_trigger_is_as_it_was_said_last(
    armer: Armer, table: EventTable
) -> None:
    probe = define(table, "p:a f", "hist:keys=count")
    table.begin()
    # As another trigger has paused it.
    armer.lives = {1: 0}
    assert probe.triggers[0].endswith("[paused]")

    table.end()

    assert probe.triggers[0].endswith("[active]")


def test_a_table_that_was_given_up_is_nobody_elses(table: EventTable) -> None:
    probe = define(table, "p:a f", "hist:keys=count")
    table.begin()
    used = {number for _, number in hists(table)}

    probe.trigger("!hist:keys=count")
    with pytest.raises(DefinitionError):
        probe.trigger("hist:keys=nothing")
    probe.trigger("hist:keys=count")

    assert not used & {number for _, number in hists(table)}


def test_hist_triggers_of_one_name_share_a_table(table: EventTable) -> None:
    define(table, "p:a f", "hist:name=n:keys=count if got > 1")
    other = define(table, "p:b g", "hist:keys=count:name=n", "hist:keys=count")

    (_, first), (_, second), (_, own) = hists(table)
    assert first == second != own
    # Whatever size it asks for: the table is there.
    third = define(table, "p:c h", "hist:keys=count:name=n:size=4096")
    assert third.triggers == (
        "hist:name=n:keys=count:vals=hitcount:sort=hitcount:size=2048 [active]",
    )
    third.delete()
    with pytest.raises(DefinitionError, match="doesn't match existing named trigger"):
        other.trigger("hist:keys=got:name=n")
    other.trigger("hist:keys=count:name=n:clear")
    (_, first), (_, second), (_, own) = hists(table)
    assert first == second != own


def test_a_name_is_shared_wherever_records_have_the_field(armer: Armer, table: EventTable) -> None:
    define(table, "p:a f", "hist:name=n:keys=count")
    first = armer.layout
    # One field more in front of it.
    armer.layout = make_layout(2, ("u8", first.fields[0].type), names=("more", "count"))
    define(table, "p:b g", "hist:name=n:keys=count")
    armer.layout = make_layout(2, ("u8",), names=("count",))

    with pytest.raises(DefinitionError, match="doesn't match existing named trigger"):
        define(table, "p:c h", "hist:name=n:keys=count.log2")

    (_, one), (_, other) = hists(table)
    assert one == other


def test_events_have_the_hist_triggers_of_others_paused(armer: Armer, table: EventTable) -> None:
    target = define(table, "p:a f", "hist:keys=count:pause")
    owner = define(table, "p:b g", "enable_hist:kprobes:a:2")
    table.begin()

    (a, b) = armer.wanted.definitions
    assert b.triggers[0].hists == (a.triggers[0].soft_enable,)
    target.trigger("hist:keys=got")
    (a, b) = armer.wanted.definitions
    assert {*b.triggers[0].hists} == {each.soft_enable for each in a.triggers}
    with pytest.raises(DefinitionError, match="such a trigger already"):
        owner.trigger("disable_hist:kprobes:a")
    table.end()
    with pytest.raises(RefusedError, match="Device or resource busy"):
        target.delete()
    assert owner.triggers == ("enable_hist:kprobes:a:count=3",)


def test_what_hist_triggers_have_counted_is_shown_by_trigger(
    armer: Armer, table: EventTable
) -> None:
    probe = define(table, "p:a f", "hist:keys=count", "hist:keys=count:pause if got > 1")
    assert probe.histograms == ()
    table.begin()
    tables = [number for _, number in hists(table)]
    armer.histograms = {number: counted("keys=count") for number in tables}

    shown = [str(each).splitlines()[2] for each in probe.histograms]

    assert shown == [f"# trigger info: {each}" for each in probe.triggers]
    assert "if got > 1 [paused]" in shown[1]


def test_fields_are_looked_up_beside_what_goes_and_nothing_is_kept_of_what_is_wrong(
    armer: Armer, table: EventTable
) -> None:
    define(table, "p:a f")

    with pytest.raises(DefinitionError, match="Couldn't find field"):
        define(table, "-:a\np:a g", "hist:keys=nothing")

    assert armer.looked_up == [("p:a g", ["p:a f"])]
    assert armer.new == ["p:a g"]
    assert [each.command for each in table.definitions] == ["p:a f"]


def test_records_have_what_hist_triggers_count_by() -> None:
    def fields(text: str, *triggers: str) -> SyntheticFields:
        parsed = parse_statements(text, registers=REGISTERS)
        (found,) = with_synthetic_fields(parsed, SyntheticFields(), triggers)
        assert isinstance(found, Definition)
        return found.synthetic_fields

    timed = fields("r:a f", "hist:keys=comm:vals=duration.p99")
    assert (timed.duration, timed.stacktrace) == (True, False)
    assert fields("r:a f", "hist:keys=comm:x=cpu:vals=100*pid-duration").duration
    for key in ("common_stacktrace", "comm,stack"):
        found = fields("p:a f", f"hist:keys={key}")
        assert (found.duration, found.stacktrace, found.is_stack_triggered) == (False, True, True)
    program = fields("p:a f", "hist:keys=ustack,comm")
    assert (program.stacktrace, program.userstacktrace) == (False, True)
    # What the definition has itself is meant.
    own = fields("r:a f duration=%di stack=%di", "hist:keys=duration,stack")
    assert (own.duration, own.stacktrace) == (False, False)
