"""Events of a session and their state, over a driver that says what it was asked."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.errors import DefinitionError, RefusedError, UsageError
from kprobes.event_table import EventTable, TraceProbe
from kprobes.histogram import Histogram
from kprobes.lang.parser import each_statement, parse_statements
from kprobes.model.definition import Definition
from kprobes.model.events import Counts, Hits, Loads
from kprobes.model.options import Limits, Wanted
from kprobes.model.resolved import RecordLayout
from kprobes.model.trigger import Trigger
from tests.build.definitions import REGISTERS
from tests.test_column_filter import READ


@dataclass
class Armer:
    """Arms nothing. Implements ``event_table.Driver``.

    Attributes:
        wanted: what would be armed.
        refused: words of definitions and filters that are refused.
        forgotten: definitions, by their text.
        new: those that never were wanted.
        deleted: with what was prepared last.
        replaced: filters, old and new.
        begun: how many recordings.
        layout: of all records.
        lives: what the guest says of triggers besides, by their numbers.
        looked_up: definitions whose fields were asked for, and what is deleted with them.
        histograms: by the numbers of their tables.
    """

    wanted: Wanted = field(default_factory=Wanted)
    refused: set[str] = field(default_factory=set[str])
    forgotten: list[str] = field(default_factory=list[str])
    new: list[str] = field(default_factory=list[str])
    deleted: list[str] = field(default_factory=list[str])
    replaced: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    begun: int = 0
    layout: RecordLayout = READ
    lives: dict[int, int] = field(default_factory=dict[int, int])
    looked_up: list[tuple[str, list[str]]] = field(default_factory=list[tuple[str, list[str]]])
    histograms: dict[int, Histogram] = field(default_factory=dict[int, Histogram])

    def first_kernel_error(self, error: DefinitionError) -> DefinitionError:
        return error

    def prepare(self, wanted: Wanted) -> None:
        self.deleted = [each.command for each in wanted.deleted]
        for each in wanted.definitions:
            if self.refused & {*each.command.split(), each.filter}:
                raise RefusedError(f"{each.command} cannot be probed")

    def apply(self, change: Callable[[Wanted], Wanted], *, begins: bool = False) -> None:
        wanted = change(self.wanted)
        self.prepare(wanted)
        self.wanted, self.begun = wanted, self.begun + begins

    def end(self) -> None:
        self.wanted = Wanted()

    def forget(self, definition: Definition, *, is_new: bool = False) -> None:
        assert all(each is not definition for each in self.wanted.definitions)
        self.forgotten.append(definition.command)
        self.new += [definition.command] if is_new else []

    def replace_definition(self, old: Definition, new: Definition) -> None:
        self.replaced.append((old.filter, new.filter))

    def left(self, triggers: Iterable[Trigger]) -> Mapping[int, int]:
        return {each.number: 3 for each in triggers if each.count is not None} | self.lives

    def layout_of(self, definition: Definition, deleted: Sequence[Definition]) -> RecordLayout:
        if self.refused & {*definition.command.split()}:
            raise RefusedError(f"{definition.command} cannot be probed")
        self.looked_up.append((definition.command, [each.command for each in deleted]))
        return self.layout

    def histogram(self, number: int = 0) -> Histogram | None:
        return self.histograms.get(number)

    def event_ids(self, definition: Definition) -> Collection[int]:
        return [len(definition.event)]

    def counts(self) -> Counts:
        return Counts(recorded={1: 5}, missed={1: 2}, nmissed={1: 1}, lost=0, damaged=0)

    def hits(self) -> list[Hits]:
        return [
            Hits(event=each.event, function="f", recorded=0, missed=0, event_id=len(each.event))
            for each in self.wanted.definitions
        ]

    def loads(self) -> Loads:
        return Loads(hits=np.array([0, 7], np.uint64))

    @property
    def armed(self) -> list[str]:
        return [each.event for each in self.wanted.definitions]


def define(table: EventTable, text: str, *, is_enabled: bool = True) -> TraceProbe:
    return table.define(parse_statements(text, registers=REGISTERS), is_enabled=is_enabled)


@pytest.fixture
def armer() -> Armer:
    return Armer()


@pytest.fixture
def table(armer: Armer) -> EventTable:
    return EventTable(armer)


def commands(table: EventTable) -> list[str]:
    return [each.command for each in table.definitions]


def test_what_is_enabled_is_armed_from_the_beginning_of_a_recording_to_its_end(
    armer: Armer, table: EventTable
) -> None:
    define(table, "p:a f\np:b f %di")
    define(table, "p:c g", is_enabled=False)
    assert armer.armed == []

    table.begin()
    assert (armer.armed, armer.begun) == (["a", "b"], 1)
    table.end()

    assert armer.armed == []
    assert commands(table) == ["p:a f", "p:b f %di", "p:c g"]


def test_events_come_and_go_while_a_recording_runs(armer: Armer, table: EventTable) -> None:
    a = define(table, "p:a f")
    table.begin()
    kept = armer.wanted.definitions[0]

    b = define(table, "p:b g")
    a.disable()
    assert armer.armed == ["b"]
    assert (a.is_enabled, b.is_enabled) == (False, True)
    a.enable()

    assert armer.armed == ["a", "b"]
    assert armer.wanted.definitions[0] is kept
    assert armer.begun == 1


def test_of_chosen_probes_only_these_are_recorded_and_what_comes_meanwhile(
    armer: Armer, table: EventTable
) -> None:
    a, b = define(table, "p:a f"), define(table, "p:b g")
    table.begin([a])
    assert armer.armed == ["a"]

    define(table, "p:c h")
    assert armer.armed == ["a", "c"]
    b.enable()

    assert armer.armed == ["a", "b", "c"]
    table.end()
    table.begin()
    assert armer.armed == ["a", "b", "c"]


def test_what_is_recorded_is_not_deleted_before_it_is_disabled(
    armer: Armer, table: EventTable
) -> None:
    a, b = define(table, "p:a f"), define(table, "p:b g")
    table.begin()

    for delete in (a.delete, lambda: define(table, "-:a")):
        with pytest.raises(RefusedError, match="a is being recorded: Device or resource busy"):
            delete()
    assert (commands(table), armer.armed) == (["p:a f", "p:b g"], ["a", "b"])
    a.disable()
    a.delete()
    b.disable()
    define(table, "-:b\np:c h")

    assert (commands(table), armer.armed) == (["p:c h"], ["c"])
    assert armer.forgotten == ["p:a f", "p:b g"]
    assert (a.definitions, a.is_enabled, repr(a)) == ((), False, "<TraceProbe: deleted>")


def test_a_deleted_event_may_be_defined_again_as_another_one(
    armer: Armer, table: EventTable
) -> None:
    define(table, "p:a f").delete()

    again = define(table, "r:a g %ax")

    assert again.definitions == ("r:a g %ax",)
    table.begin()
    assert armer.armed == ["a"]


@pytest.mark.parametrize("is_recording", [False, True])
def test_of_a_text_that_is_refused_nothing_stays(
    armer: Armer, table: EventTable, *, is_recording: bool
) -> None:
    define(table, "p:a f")
    gone = define(table, "p:z f", is_enabled=False)
    armer.refused = {"nothing"}
    if is_recording:
        table.begin()
    before = armer.wanted

    with pytest.raises(RefusedError, match="cannot be probed"):
        define(table, "p:b g\n-:z\np:c nothing")

    assert commands(table) == ["p:a f", "p:z f"]
    assert armer.wanted is before
    # Nothing of it may be in the way of what comes later.
    assert sorted(armer.forgotten) == ["p:b g", "p:c nothing"]
    assert armer.new == ([] if is_recording else armer.forgotten)
    assert gone.definitions == ("p:z f",)
    assert not gone.is_enabled
    with pytest.raises(DefinitionError):
        define(table, "p:d g\n-:nosuch")
    assert commands(table) == ["p:a f", "p:z f"]


def test_what_cannot_be_enabled_stays_disabled(armer: Armer, table: EventTable) -> None:
    a, b = define(table, "p:a f"), define(table, "p:b bad", is_enabled=False)
    table.begin()
    armer.refused = {"bad"}

    with pytest.raises(RefusedError):
        b.enable()

    assert (a.is_enabled, b.is_enabled, armer.armed) == (True, False, ["a"])
    a.disable()
    assert armer.armed == []


def test_a_recording_that_cannot_begin_has_not_begun(armer: Armer, table: EventTable) -> None:
    a = define(table, "p:a f")
    armer.refused = {"f"}

    with pytest.raises(RefusedError):
        table.begin()

    a.delete()
    assert commands(table) == []


def test_a_second_recording_is_refused_and_the_first_goes_on(
    armer: Armer, table: EventTable
) -> None:
    define(table, "p:a f")
    table.begin()

    with pytest.raises(UsageError, match="is being recorded already"):
        table.begin()

    assert (armer.armed, armer.begun) == (["a"], 1)
    table.end()
    table.begin()
    assert armer.begun == 2


def test_a_deleted_event_takes_no_filter(table: EventTable) -> None:
    gone = define(table, "p:a f")
    gone.delete()

    with pytest.raises(UsageError, match="the event was deleted"):
        gone.set_filter("common_pid == 3")
    assert repr(define(table, "")) == "<TraceProbe: no event>"


def test_a_filter_is_that_of_the_events_from_then_on(armer: Armer, table: EventTable) -> None:
    a = define(table, "p:a f %di\np:a g %si")
    table.begin()

    a.set_filter("arg1 > 5")

    assert [each.filter for each in armer.wanted.definitions] == ["arg1 > 5"] * 2
    assert armer.replaced == [("", "arg1 > 5")] * 2
    assert a.definitions == ("p:a f %di", "p:a g %si")


def test_what_joins_an_event_is_enabled_and_filtered_as_the_event_is(
    armer: Armer, table: EventTable
) -> None:
    on, off = define(table, "p:on f %di"), define(table, "p:off f", is_enabled=False)
    on.set_filter("arg1 > 5")
    table.begin()

    define(table, "p:on g %si\np:off g", is_enabled=False)

    assert [(each.command, each.filter) for each in armer.wanted.definitions] == [
        ("p:on f %di", "arg1 > 5"),
        ("p:on g %si", "arg1 > 5"),
    ]
    define(table, "p:off h")
    assert off.is_enabled
    assert armer.armed == ["on", "off", "on", "off", "off"]


def test_of_chosen_probes_what_joins_another_event_is_not_recorded(
    armer: Armer, table: EventTable
) -> None:
    a, _ = define(table, "p:a f"), define(table, "p:b f")
    table.begin([a])

    define(table, "p:b g", is_enabled=False)

    assert armer.armed == ["a"]


def test_a_filter_that_is_given_is_that_of_the_new_definitions_only(table: EventTable) -> None:
    define(table, "p:a f %di").set_filter("arg1 > 5")

    for place, text in (("g", ""), ("h", "arg1 < 5")):
        statements = parse_statements(f"p:a {place} %di", registers=REGISTERS)
        table.define(statements, is_enabled=True, filter=text)

    assert [each.filter for each in table.definitions] == ["arg1 > 5", "", "arg1 < 5"]


def test_whichever_definition_is_named_its_event_is_changed(
    armer: Armer, table: EventTable
) -> None:
    define(table, "p:a f %di")
    second = define(table, "p:a g %di")
    table.begin()

    second.set_filter("arg1 > 5")
    assert [each.filter for each in armer.wanted.definitions] == ["arg1 > 5"] * 2
    second.disable()
    assert armer.armed == []
    second.enable()

    assert armer.armed == ["a", "a"]


def test_of_an_event_that_is_recorded_all_definitions_but_the_last_may_go(
    armer: Armer, table: EventTable
) -> None:
    probes = [define(table, f"p:a {place}") for place in "fghi"]
    table.begin()

    for text in ("-:a", "-:a\np:a k", "p:a k\n-:a", "p:a k\n-:a f\n-:a g\n-:a h\n-:a i\n-:a"):
        with pytest.raises(RefusedError, match="a is being recorded: Device or resource busy"):
            define(table, text)
    assert commands(table) == ["p:a f", "p:a g", "p:a h", "p:a i"]
    define(table, "-:a f")
    probes[1].delete()
    define(table, "-:a h\np:a k\n-:a i")

    assert commands(table) == [each.command for each in armer.wanted.definitions] == ["p:a k"]
    gone = [text for text in armer.forgotten if text not in armer.new]
    assert gone == ["p:a f", "p:a g", "p:a h", "p:a i"]
    assert table.select("a").is_enabled


def test_a_definition_that_cannot_be_disarmed_stays(armer: Armer, table: EventTable) -> None:
    kept, gone = define(table, "p:a f"), define(table, "p:a g")
    table.begin()
    armer.refused = {"f"}

    with pytest.raises(RefusedError):
        gone.delete()

    assert commands(table) == ["p:a f", "p:a g"]
    assert kept.is_enabled


def test_what_is_not_recorded_is_looked_at_as_well_while_other_events_are(
    armer: Armer, table: EventTable
) -> None:
    define(table, "p:a f %di")
    b = define(table, "p:b g %di", is_enabled=False)
    table.begin()
    armer.refused = {"wrong", "arg1 > x"}

    with pytest.raises(RefusedError):
        define(table, "p:c wrong", is_enabled=False)
    with pytest.raises(RefusedError):
        b.set_filter("arg1 > x")

    assert commands(table) == ["p:a f %di", "p:b g %di"]
    assert [each.filter for each in table.definitions] == ["", ""]


def test_of_several_wrong_lines_the_first_one_is_told(armer: Armer, table: EventTable) -> None:
    define(table, "p:a f\np:z g", is_enabled=False)
    armer.refused = {"wrong"}

    for text in (
        "p:b wrong\np:c g %zz",
        "p:b wrong\np:a f",
        "p:b wrong\n-:c",
        "-:z\np:z wrong\n-:c",
        "p:b wrong\n-:b\n-:c",
    ):
        with pytest.raises(RefusedError, match="wrong cannot be probed"):
            table.define(each_statement(text, registers=REGISTERS), is_enabled=True)
    for text, code in (("p:a f\np:b g %zz", "SAME_PROBE"), ("p:b g\np:c g %zz", "BAD_REG_NAME")):
        with pytest.raises(DefinitionError) as caught:
            table.define(each_statement(text, registers=REGISTERS), is_enabled=True)
        assert caught.value.code == code

    assert commands(table) == ["p:a f", "p:z g"]
    assert armer.new == armer.forgotten


def test_what_the_same_text_deletes_again_must_have_been_right(
    armer: Armer, table: EventTable
) -> None:
    define(table, "p:a f", is_enabled=False)
    armer.refused = {"wrong"}

    for text in ("p:b wrong\n-:b", "p:b g\n-:b\np:b wrong\n-:b\np:c h", "-:a\np:a wrong\n-:a"):
        with pytest.raises(RefusedError, match="wrong cannot be probed"):
            define(table, text)
        assert commands(table) == ["p:a f"]

    define(table, "-:a\np:a g\n-:a\np:b h")
    assert commands(table) == ["p:b h"]
    assert armer.deleted == ["p:a f"]


def test_what_is_deleted_is_not_compared_with_what_comes_in_its_place(
    armer: Armer, table: EventTable
) -> None:
    define(table, "p:a f %di")

    define(table, "-:a\np:a f %di:u8 %si")

    assert armer.deleted == ["p:a f %di"]


@pytest.mark.parametrize(
    ("text", "shown"), [("0", ""), (" 0 ", ""), (" a > 5 \n", " a > 5"), ("", ""), (" ", " ")]
)
def test_a_filter_is_kept_as_its_file_shows_it(table: EventTable, text: str, shown: str) -> None:
    define(table, "p:a f a=%di").set_filter(text)

    assert [each.filter for each in table.definitions] == [shown]


@pytest.mark.parametrize("is_recording", [False, True])
def test_a_filter_that_is_wrong_leaves_the_one_before(
    armer: Armer, table: EventTable, *, is_recording: bool
) -> None:
    a = define(table, "p:a f %di")
    a.set_filter("arg1 > 5")
    if is_recording:
        table.begin()
    armer.refused, armer.replaced = {"wrong"}, []

    with pytest.raises(RefusedError):
        a.set_filter("wrong")

    assert [each.filter for each in table.definitions] == ["arg1 > 5"]
    assert armer.replaced == [("arg1 > 5", "wrong"), ("wrong", "arg1 > 5")]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a", ["a", "a"]),
        ("*", ["a", "a", "b"]),
        ("mine/*", ["a"]),
        ("mine:a", ["a"]),
        ("k*/?", ["a", "b"]),
    ],
)
def test_events_are_selected_by_patterns_of_their_names(
    table: EventTable, pattern: str, found: list[str]
) -> None:
    define(table, "p:a f\np:mine/a f\np:b g")

    selected = table.select(pattern)

    events = [
        text.split()[0].rpartition("/")[2].rpartition(":")[2] for text in selected.definitions
    ]
    assert events == found


def test_a_pattern_of_nothing_is_told(table: EventTable) -> None:
    define(table, "p:a f")

    with pytest.raises(UsageError, match="no such event: 'mine/a'"):
        table.select("mine/a")


def test_hits_and_misses_are_those_of_its_events(table: EventTable) -> None:
    a, long = define(table, "p:a f"), define(table, "p:longer g")

    assert (a.hits, a.missed) == (5, 3)
    assert (long.hits, long.missed) == (0, 0)


def test_what_has_passed_a_limit_is_not_wanted_until_it_is_enabled_again(
    armer: Armer, table: EventTable
) -> None:
    hot, other = define(table, "p:hot f"), define(table, "p:cold g")
    assert table.stop_over_limit({3: "is hot"}) == []
    table.begin()

    assert table.stop_over_limit({3: "is hot"}) == ["hot (f) is hot: it is disabled"]
    assert table.stop_over_limit({3: "is hot"}) == []
    assert armer.wanted.over_limit == {3}
    assert (hot.is_enabled, other.is_enabled) == (False, True)
    assert "hot disabled" in table.describe(hot.numbers[0])
    other.disable()
    assert armer.wanted.over_limit == {3}
    hot.enable()
    assert armer.wanted.over_limit == set()
    assert hot.is_enabled

    table.stop_over_limit({3: "is hot"})
    table.end()
    table.begin()
    assert (armer.wanted.over_limit, hot.is_enabled) == (set(), True)


def test_ctrl_c_does_not_end_a_thread_that_keeps_limits(armer: Armer, table: EventTable) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    define(table, "p:hot f")
    table.begin()
    table.options = replace(table.options, checkpoint=interrupt)
    table.stop_over_limit({3: "is hot"})

    armer.wanted.options.checkpoint()


def test_what_cannot_be_stopped_is_taken_as_enabled(armer: Armer, table: EventTable) -> None:
    hot = define(table, "p:hot f")
    table.begin()
    armer.refused.add("f")

    with pytest.raises(RefusedError):
        table.stop_over_limit({3: "is hot"})

    assert hot.is_enabled


def test_what_is_disabled_already_has_passed_no_limit(armer: Armer, table: EventTable) -> None:
    hot = define(table, "p:hot f")
    define(table, "p:calm g")
    table.begin()
    hot.disable()

    assert table.stop_over_limit({3: "is hot", 99: "is gone"}) == []
    assert armer.wanted.over_limit == set()


def test_an_event_that_has_passed_a_limit_can_be_deleted(armer: Armer, table: EventTable) -> None:
    hot = define(table, "p:hot f")
    define(table, "p:calm g")
    table.begin()
    table.stop_over_limit({3: "is hot"})

    hot.delete()

    assert armer.armed == ["calm"]
    assert commands(table) == ["p:calm g"]


def test_of_several_events_that_are_deleted_each_has_passed_a_limit_or_not(
    table: EventTable,
) -> None:
    define(table, "p:hot f")
    calm = define(table, "p:calm g")
    table.begin()
    table.stop_over_limit({3: "is hot"})

    with pytest.raises(RefusedError, match="calm is being recorded"):
        table.select("*").delete()
    calm.disable()
    table.select("*").delete()

    assert commands(table) == []


def test_limits_are_those_of_the_recording_s_beginning(armer: Armer, table: EventTable) -> None:
    define(table, "p:a f")
    table.begin()
    table.options = replace(table.options, limits=Limits(max_rate=5))
    define(table, "p:b g")
    assert armer.wanted.options.limits == Limits()

    table.end()
    table.begin()
    assert armer.wanted.options.limits == Limits(max_rate=5)
