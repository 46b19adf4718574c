"""Every example of docs/reference/language.md does what it says there."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast, get_args

import pytest
from msgspec import Struct

from kprobes.arch.x86_64.registers import NAMES
from kprobes.errors import DefinitionError
from kprobes.lang.parser import parse, parse_statements
from kprobes.lang.types import TYPES
from kprobes.model.definition import AllVariables, Computed, Fetch, Statement, TypeWord
from tests.system.differences import DIFFERENCES, OF_EVENTS

_PLAIN = ("string", "ustring", "symstr", "%pd", "%pD", "u64", "s32", "x8")
_PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "language.md").read_text()


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", _PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", _blocks("probe"))
def test_the_examples_are_definitions(block: str) -> None:
    assert len(parse_statements(block, registers=NAMES)) == len(block.splitlines())


@pytest.mark.parametrize("block", _blocks("wrong"))
def test_the_errors_are_as_shown(block: str) -> None:
    definition, shown = block.split("\n", 1)

    with pytest.raises(DefinitionError) as caught:
        parse(definition, registers=NAMES)

    assert f"{caught.value}\n" == shown


def test_the_page_has_examples_and_every_type() -> None:
    assert (len(_blocks("probe")), len(_blocks("wrong"))) == (6, 4)
    assert all(f"`{word}`" in _PAGE for word in TYPES)


def test_every_form_of_fetch_has_an_example() -> None:
    found = {type(node) for node in _nodes(_statements())}

    # What only debug information knows is on another page, or has no word.
    assert set(get_args(Fetch)) - found == {AllVariables, Computed}


def test_every_type_has_an_example() -> None:
    words = {node.base for node in _nodes(_statements()) if isinstance(node, TypeWord)}

    assert words >= {*(word.removeprefix("%") for word in ("char", "symbol", "bits", *_PLAIN))}


def test_all_differences_from_the_kernel_are_documented_and_they_are_few() -> None:
    table = _PAGE.partition("## Where the kernel differs")[2]
    found = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]

    assert found == [*(difference.what for difference in DIFFERENCES), *OF_EVENTS]
    assert len(found) <= 10


def _statements() -> tuple[Statement, ...]:
    return tuple(
        statement
        for block in _blocks("probe")
        for statement in parse_statements(block, registers=NAMES)
    )


def _nodes(value: object) -> Iterator[object]:
    if isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from _nodes(item)
    elif isinstance(value, Struct):
        yield value
        for name in value.__struct_fields__:
            yield from _nodes(getattr(value, name))
