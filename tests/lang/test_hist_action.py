"""Actions of hist triggers: what is read, and what is refused, where and how."""

import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.hist import parse_hist
from kprobes.model.hist import Handler
from kprobes.resolve.hist import known_fields
from tests.lang.test_hist import KNOWN, LAYOUT, check_mark

_SAVE = "onmax($x).save(got)"


@pytest.mark.parametrize("handler", Handler)
def test_it_is_listed_as_the_kernel_lists_it(handler: Handler) -> None:
    found = parse_hist(f"keys=got:{handler}($x).save( count , got.hex):x=count+1 if got > 1", KNOWN)

    assert found.text == (
        "hist:keys=got:vals=hitcount:x=count+1:sort=hitcount:size=2048"
        f":{handler}($x).save(count,got.hex) if got > 1"
    )
    assert found.action is not None
    assert (found.action.handler, found.action.variable.name) == (handler, "x")
    assert parse_hist(found.text, KNOWN) == found


@pytest.mark.parametrize(
    ("marked", "text"),
    [
        ("hist:keys=got:x=count:^onmax($x", "No closing paren found"),
        ("^hist:keys=got:x=count:onmax($x)", "No action found"),
        ("^hist:keys=got:x=count:onmax($x).save", "No action found"),
        ("^hist:keys=got:x=count:onmax($x).save()", "Invalid action parameter"),
        ("hist:keys=got:x=count:onchange($x).save(got,^z)", "Invalid action parameter"),
        ("hist:keys=got:x=count:onmax($x).^snapshot()", "No such action here"),
        ("hist:keys=got:x=count:onmax($x).^trace(got)", "No such action here"),
        ("hist:keys=got:x=count:^onmatch(a.b).save(got)", "No such action here"),
        (
            "hist:keys=got:x=count:onmax(^left).save(got)",
            "For onmax(x) or onchange(x), x must be a variable",
        ),
        (
            "hist:keys=got:x=count:onmax($^left).save(got)",
            "Couldn't find onmax or onchange variable",
        ),
        ("hist:keys=got:x=count:onmax($x).save(^junk)", "Couldn't find field"),
        ("hist:keys=got:x=count:onmax($x).save(^comm)", "Couldn't create field variable"),
        ("hist:keys=got:^count=got:onmax($count).save(count)", "Couldn't create field variable"),
        (
            f"^hist:keys=got:x=count:{_SAVE}:onmax($x).save(count)",
            "Couldn't create onmax or onchange variable",
        ),
        (
            f"^hist:keys=got:x=count:{_SAVE}:onchange($x).save(count)",
            "Can't have more than one save() action per hist",
        ),
        # How it is written comes before everything else, what it names after.
        ("^hist:keys=junk:x=count:onmax($x)", "No action found"),
        ("hist:keys=^junk:x=count:onmax($y).save(got)", "Couldn't find field"),
    ],
)
def test_the_mark_stands_where_the_kernels_does(marked: str, text: str) -> None:
    check_mark(marked, text)


def test_a_guest_keeps_no_changes() -> None:
    known = known_fields(LAYOUT, of_guest=True)

    assert parse_hist(f"keys=got:x=count:{_SAVE}", known).action is not None
    with pytest.raises(DefinitionError, match="No such action here") as caught:
        parse_hist("keys=got:x=count:onchange($x).save(got)", known)
    assert "each CPU of a guest counts for itself" in caught.value.hint


def test_triggers_that_keep_something_else_are_not_the_same() -> None:
    every = [
        parse_hist(f"keys=got:name=n:x=count{end}", KNOWN)
        for end in ("", f":{_SAVE}", ":onmax($x).save(count)", ":onchange($x).save(got)")
    ]

    assert len({each.identity for each in every}) == len({each.counted for each in every}) == 4
