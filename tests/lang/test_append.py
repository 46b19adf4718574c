from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.lang.append import Definitions, apply
from kprobes.lang.listing import show
from kprobes.lang.parser import parse_statements
from kprobes.model.definition import Definition, Statement
from tests.build.definitions import REGISTERS, marked_error
from tests.build.work import COUNTS, is_linear


def run(*lines: str) -> tuple[Definition, ...]:
    return apply(parse_statements("\n".join(lines), registers=REGISTERS))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("p:x f", "p:x g"),
        ("p:x f %di", "p:x g %di"),
        ("p:x f %di", "p:x f %si"),
        ("p:x f %di", "p:x g %di:x64"),
        ("p:x f %di:u8", "p:x g %si:b3@1/8"),
        ("p:x f $comm", 'p:x g \\"a":string'),
        ("p:x f a=%di:%pd", "p:x g a=+0(%di):string"),
        ("p:x f a=b->c", "p:x g a=%di:u8"),
        ("p:x f", "p:y/x f"),
        ("p:x f", "r:y f"),
        ("p:x f", "f:x f"),
        ("f:x f", "f:x g"),
        ("t:x f", "t:x g"),
        ("p:x f+4", "p:x f"),
        ("p f*", "p f*"),
        ("r3:x f", "r4:x g"),
    ],
)
def test_an_event_may_have_several_probes_that_record_the_same(first: str, second: str) -> None:
    assert len(run(first, second)) == 2


@pytest.mark.parametrize(
    ("first", "marked", "code"),
    [
        ("p:x f", "^p:x f", "SAME_PROBE"),
        ("p:x f+0", "^p:x f", "SAME_PROBE"),
        ("p:x f a=%di", "^p:x f a=%di", "SAME_PROBE"),
        ("r:x f", "^r9:x f", "SAME_PROBE"),
        ("p f", "^p f", "SAME_PROBE"),
        ("p:x f", "^r:x f", "DIFF_PROBE_TYPE"),
        ("p:x f", "^p:x f%return", "DIFF_PROBE_TYPE"),
        ("f:x f", "^f:x f%return", "DIFF_PROBE_TYPE"),
        ("f:g/x f", "^t:g/x f", "DIFF_PROBE_TYPE"),
        ("p:g/x f", "^f:g/x f", "EVENT_EXIST"),
        ("t:g/x f", "^r:g/x f", "EVENT_EXIST"),
        ("p:x f %di", "p:x g ^", "DIFF_ARG_TYPE"),
        ("p:x f", "p:x g ^%di", "DIFF_ARG_TYPE"),
        ("p:x f %di", "p:x g ^a=%di", "DIFF_ARG_TYPE"),
        ("p:x f %di:u8", "p:x g ^%di:x8", "DIFF_ARG_TYPE"),
        ("p:x f +0(%di):u8[3]", "p:x g ^+0(%di):u8[4]", "DIFF_ARG_TYPE"),
        ("p:x f %di %si:u8", "p:x g %di %si:u16 ^%dx", "DIFF_ARG_TYPE"),
        ("p:x f %di %si:u8", "p:x g %di ^%si:u16", "DIFF_ARG_TYPE"),
    ],
)
def test_probes_of_one_event_must_agree(first: str, marked: str, code: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        run(first, marked.replace("^", ""))

    assert marked_error(caught.value) == (code, marked)


def test_every_probe_of_an_event_is_looked_at() -> None:
    with pytest.raises(DefinitionError) as caught:
        run("p:x f", "p:x g", "p:x f")

    assert caught.value.code == "SAME_PROBE"


@pytest.mark.parametrize(
    ("deletion", "left"),
    [
        ("-:x", ["p:b/y h"]),
        ("-:a/x", ["p:kprobes/x g", "p:b/y h"]),
        ("-:a/", ["p:kprobes/x g", "p:b/y h"]),
        ("-:x g", ["p:a/x f+4 arg1=%di", "p:b/y h"]),
        ("-:x f+4", ["p:kprobes/x g", "p:b/y h"]),
        ("-:x f+4 arg1=%di", ["p:kprobes/x g", "p:b/y h"]),
    ],
)
def test_a_deletion_takes_away_all_that_match(deletion: str, left: list[str]) -> None:
    found = run("p:a/x f+0x4 %di", "p:x g", "p:b/y h", deletion)

    assert [show(d) for d in found] == left


@pytest.mark.parametrize(
    "deletion", ["-:z", "-:kprobes/y", "-:x f+0x4", "-:x f+4 %di", "-:x f+4 arg1=%di b=%si", "-:/x"]
)
def test_a_deletion_must_match_something(deletion: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        run("p:a/x f+0x4 %di", deletion)

    assert marked_error(caught.value) == ("NO_EVENT", f"^{deletion}")


@pytest.mark.parametrize(
    "lines", [("p:e{} f",), ("p:e f{} %di",), ("p:g{}/e f",), ("p f*",), ("p:e{} f", "-:e{}")]
)
def test_many_definitions_are_no_more_work_each_than_few(lines: tuple[str, ...]) -> None:
    def statements(count: int) -> tuple[Statement, ...]:
        text = "\n".join(line.format(at) for line in lines for at in range(count))
        return parse_statements(text, registers=REGISTERS)

    read = {count: statements(count) for count in COUNTS}

    assert is_linear(lambda count: apply(read[count]))


def test_a_second_probe_of_one_name_is_told_how_it_can_be_added() -> None:
    with pytest.raises(DefinitionError) as caught:
        run("p vfs_read %di", "p vfs_read %di")

    assert caught.value.hint.endswith(": p:NAME vfs_read %di")


def definitions(*lines: str) -> tuple[Definitions, list[int]]:
    found = Definitions()
    added, _ = found.apply(statements(*lines))
    return found, added


def statements(*lines: str) -> Sequence[Statement]:
    return parse_statements("\n".join(lines), registers=REGISTERS)


def test_numbers_stay_and_are_given_once() -> None:
    found, (first, second) = definitions("p:x f", "p:y f")

    (third,), deleted = found.apply(statements("-:x", "p:x g"))

    assert ([*deleted], [number for number, _ in found.items()]) == ([first], [second, third])
    assert third not in (first, second)
    gone, left = found.get(first), found.get(third)
    assert (gone, left and left.command) == (None, "p:x g")


def test_what_comes_and_goes_in_one_text_is_neither_added_nor_deleted() -> None:
    found, _ = definitions("p:x f")

    assert found.apply(statements("p:y f", "-:y")) == ([], {})
    assert [show(each) for each in found] == ["p:kprobes/x f"]


def test_of_a_text_that_is_wrong_at_its_end_nothing_stays() -> None:
    found, numbers = definitions("p:x f", "p:y f", "p:x g")
    before = list(found)

    with pytest.raises(DefinitionError):
        found.apply(statements("-:x", "p:z f", "p:x h %di", "-:nothing"))

    assert list(found) == before
    assert [number for number, _ in found.items()] == numbers
    # Neither was taken away, nor is in the way.
    with pytest.raises(DefinitionError):
        found.apply(statements("p:x f"))
    found.apply(statements("p:z f %si"))


def test_what_was_applied_can_be_undone_later() -> None:
    found, numbers = definitions("p:x f", "p:y f")
    before = list(found)

    found.undo(*found.apply(statements("-:x", "p:x g %di", "p:z f")))

    assert (list(found), [number for number, _ in found.items()]) == (before, numbers)
    with pytest.raises(DefinitionError):
        found.apply(statements("-:z"))


def test_another_filter_keeps_number_and_order() -> None:
    found, (first, _) = definitions("p:x f %di", "p:y f")
    new = replace(before := next(iter(found)), filter="arg1 > 1")

    assert found.replace(first, new) is before

    assert found.get(first) is next(iter(found)) is new
