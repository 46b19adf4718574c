"""A definition's filter in a guest that knows its CPUs and functions."""

import pytest
from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.guest.guest import Guest
from kprobes.guest.planner import Planner
from kprobes.guest.prepare import with_filter, with_options
from kprobes.lang.filter import task_filter
from kprobes.lang.trigger import parse_trigger
from kprobes.model.filter import Always, Filter, Header, Within
from kprobes.model.options import Options, Tasks, Wanted
from kprobes.model.resolved import Resolved
from tests.build.guest import make_guest
from tests.build.kernel import TEXT, make_kernel, make_probe, read, symbol

NUMBERS = TEXT + 0x8000
FUNCTION = TEXT + 0x1000


def _guest() -> Guest:
    made = make_guest(["p f"])
    made.guest.memory.write(NUMBERS, (2).to_bytes(4, "little"))
    symbols = [
        symbol("f", FUNCTION, size=0x20),
        symbol("nr_cpu_ids", NUMBERS, type="D"),
        symbol("__per_cpu_offset", NUMBERS + 64, type="D"),
        *made.guest.kernel.symbols.all_named("ftrace_pages_start"),
    ]
    return replace(made.guest, kernel=make_kernel(symbols))


def _filtered(filter_text: str, tasks: Filter | None = None) -> Resolved:
    probe = make_probe("p f a=$arg1 n=$arg2:u8")
    definition = replace(probe.definition, filter=filter_text)
    return with_filter(replace(probe, definition=definition), _guest(), tasks)


def test_a_filter_comes_after_the_choice_of_tasks() -> None:
    chosen = _filtered("n == 1 || n == 2", task_filter(pids=[7])).filter

    assert chosen is not None
    sources = [step.test.source for step in chosen.steps if not isinstance(step.test, Always)]
    assert sources == [Header.PID, 1, 1]


def test_triggers_see_the_same_tasks() -> None:
    texts = ("traceoff", "stop if n == 1")
    triggers = tuple(parse_trigger(each).trigger for each in texts)
    probe = make_probe("p f a=$arg1 n=$arg2:u8")
    definition = replace(probe.definition, triggers=triggers, soft_enable=3)

    found = with_options(replace(probe, definition=definition), _guest(), task_filter(pids=[7]))

    assert found.soft_enable == 3
    filters = [each.filter for each in found.triggers if each.filter is not None]
    assert [each.sources for each in filters] == [{Header.PID}, {Header.PID, 1}]


@pytest.mark.parametrize("place", ["f", hex(FUNCTION + 4)])
def test_the_guest_says_which_functions_there_are(place: str) -> None:
    chosen = _filtered(f"a.function == {place}").filter

    assert chosen is not None
    ranges = ((FUNCTION, FUNCTION + 0x1F),)
    assert chosen.steps[0].test == Within(source=0, size=8, ranges=ranges)


@pytest.mark.parametrize(
    ("filter_text", "why"),
    [("a.function == g", "not found"), ("cpu & CPUS{2}", "cpulist"), ("b == 1", "not found")],
)
def test_what_the_guest_has_not_is_refused(filter_text: str, why: str) -> None:
    with pytest.raises(DefinitionError, match=why):
        _filtered(filter_text)


@pytest.mark.parametrize("filter_text", ["", "0"])
def test_a_probe_without_a_filter_has_none(filter_text: str) -> None:
    assert _filtered(filter_text).filter is None


def test_what_is_prepared_has_its_filter() -> None:
    definition = replace(read("p f n=$arg2:u8"), filter="n == 1")

    options = Options(tasks=Tasks(comms=("ls",)))
    (plan,) = Planner(_guest()).plan(Wanted(definitions=[definition], options=options)).new

    chosen = plan.probes[0].filter
    assert chosen is not None
    assert chosen.sources == {Header.COMM, 0}
