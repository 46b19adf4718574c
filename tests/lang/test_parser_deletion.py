import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.parser import parse_statement
from kprobes.model.definition import Deletion
from tests.build.definitions import REGISTERS, marked_error


@pytest.mark.parametrize(
    ("text", "group", "event", "words"),
    [
        ("-:x", None, "x", ()),
        ("-:grp/x", "grp", "x", ()),
        ("-:grp/", "grp", "", ()),
        ("-:grp.x", None, "grp.x", ()),
        ("-:x  vfs_read+4 a=%di", None, "x", ("vfs_read+4", "a=%di")),
    ],
)
def test_a_deletion_is_read(
    text: str, group: str | None, event: str, words: tuple[str, ...]
) -> None:
    assert parse_statement(text, registers=REGISTERS) == Deletion(
        command=" ".join(text.split()), group=group, event=event, words=words
    )


@pytest.mark.parametrize("marked", ["-^", "-^foo", "-^10:foo", "-:^", "-:/^"])
def test_a_deletion_names_something(marked: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_statement(marked.replace("^", ""), registers=REGISTERS)

    assert marked_error(caught.value) == ("BAD_DELETION", marked)


def test_a_deletion_begins_its_line() -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_statement(" -:x", registers=REGISTERS)

    assert marked_error(caught.value) == ("BAD_DELETION", "^-:x")
