"""Statements to verdicts on a small guest."""

from pathlib import Path

import pytest

from kprobes.errors import DefinitionError, RefusedError, TargetError
from kprobes.guest.guest import Guest
from kprobes.guest.planner import Planner
from kprobes.inspect.check import Checker, CheckResult, checker_of_guest, checker_of_image
from kprobes.model.options import Wanted
from tests.build.definitions import read
from tests.build.guest import GuestWithSites
from tests.build.named_guest import make_named_guest
from tests.build.work import is_linear


def make_scene() -> GuestWithSites:
    made = make_named_guest("vfs_read", "vfs_write", "do_exit", without_site=["__vfs_read"])
    made.guest.memory.write(made.sites[2], b"\xcc" * 5)
    return made


@pytest.fixture
def checker() -> Checker:
    return checker_of_guest(make_scene().guest)


def only(results: list[CheckResult]) -> CheckResult:
    (result,) = results
    return result


def test_what_is_accepted_is_resolved_and_its_site_looked_at(checker: Checker) -> None:
    result = only(checker.check("  p:x   vfs_read a=%di  # a comment"))

    (placed,) = result.placed
    assert placed.site is not None
    assert (result.is_accepted, result.command) == (True, "p:x vfs_read a=%di")
    assert (placed.probe.layout.event, placed.probe.layout.ip) == ("x", placed.site.addr)


def test_a_file_s_statements_have_their_lines_and_one_refusal_stops_no_other(
    checker: Checker,
) -> None:
    results = checker.check("# none\np vfs_read\n\np nosuch\np vfs_write a=%zz\np vfs_write\n")

    assert [(v.line, v.is_accepted) for v in results] == [
        (2, True),
        (4, False),
        (5, False),
        (6, True),
    ]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("p vfs_raed", "did you mean vfs_read"),
        ("p vfs_read a=%rdi", "did you mean %di?"),
        ("p vfs_read+3", "vfs_read+0x3 is inside the 5-byte instruction at vfs_read+0x0"),
        ("p __vfs_read", "no instruction from"),
        ("p nosuch_*", ""),
    ],
)
def test_what_is_refused_comes_with_what_would_work(
    checker: Checker, text: str, advice: str
) -> None:
    result = only(checker.check(text))

    assert isinstance(result.error, DefinitionError | RefusedError)
    assert result.advice.startswith(advice)
    assert bool(result.advice) == bool(advice)


def test_a_pattern_leaves_out_whose_returns_cannot_be_probed() -> None:
    made = make_named_guest("vfs_read", "vfs_write")
    made.guest.memory.write(made.sites[1], b"\xcc" * 5)
    checker = checker_of_guest(made.guest)

    pattern, named = checker.check("r vfs_*\nr vfs_write")

    assert [each.probe.layout.function for each in pattern.placed] == ["vfs_read"]
    assert "another tracer has it" in str(named.error)


def test_a_module_that_is_not_loaded_is_waited_for(checker: Checker) -> None:
    result = only(checker.check("p nosuch:thing a=%di"))

    assert (result.is_accepted, result.waits_for, result.placed) == (True, "nosuch", ())


def test_a_site_that_somebody_else_holds_is_refused(checker: Checker) -> None:
    assert "another tracer has it" in str(only(checker.check("p do_exit")).error)


def test_definitions_count_as_if_the_ones_before_were_armed(checker: Checker) -> None:
    texts = ("p:x vfs_read %di", "p:x vfs_read %di", "p:x vfs_write %di:u8", "r:x vfs_write")

    errors = [only(checker.check(text)).error for text in texts]

    codes = [error.code if isinstance(error, DefinitionError) else "" for error in errors]
    assert codes == ["", "SAME_PROBE", "DIFF_ARG_TYPE", "DIFF_PROBE_TYPE"]


def test_a_place_is_looked_up_before_others_of_its_event_are(checker: Checker) -> None:
    wrong = checker.check("r:x vfs_read\np:x nosuch\np:x vfs_read")[1:]

    codes = [each.error.code for each in wrong if isinstance(each.error, DefinitionError)]
    assert codes == ["BAD_PROBE_ADDR", "DIFF_PROBE_TYPE"]


def test_a_deletion_says_what_it_takes_away_and_frees_the_event(checker: Checker) -> None:
    checker.check("p:x vfs_read %di")

    gone, again = checker.check("-:x\np:x vfs_write %si:u8")

    assert [definition.command for definition in gone.deleted] == ["p:x vfs_read %di"]
    assert again.is_accepted
    assert isinstance(only(checker.check("-:y")).error, DefinitionError)


def test_a_pattern_is_placed_on_every_function(checker: Checker) -> None:
    result = only(checker.check("p vfs_*"))

    assert [placed.probe.layout.function for placed in result.placed] == ["vfs_read", "vfs_write"]


def test_nothing_is_written_into_the_guest() -> None:
    scene = make_scene()
    before = scene.text(), list(scene.stub.events)

    checker_of_guest(scene.guest).check("p vfs_*\np nosuch\n-:p_vfs_read_0")

    assert (scene.text(), scene.stub.events) == before


def test_a_file_that_is_no_kernel_is_told(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot read"):
        checker_of_image(tmp_path / "absent")


def refuse(guest: Guest) -> None:
    raise RefusedError(f"nothing can be probed in {guest.kernel.release}")


def test_check_and_trace_refuse_alike_where_nothing_can_be_probed() -> None:
    guest = make_scene().guest

    result = only(checker_of_guest(guest, check=refuse).check("p vfs_read"))
    with pytest.raises(RefusedError) as caught:
        Planner(guest, refuse).plan(Wanted(definitions=(read("p vfs_read"),)))

    assert str(result.error) == str(caught.value)
    assert result.advice == ""


@pytest.mark.parametrize("line", ["p:e{} vfs_read", "p vfs_{}*"])
def test_many_definitions_are_no_more_work_each_than_few(line: str) -> None:
    def check(count: int) -> None:
        checker = checker_of_guest(make_scene().guest)
        checker.check("\n".join(line.format(at) for at in range(count)))

    assert is_linear(check)
