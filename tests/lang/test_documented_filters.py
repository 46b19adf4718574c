"""Every filter of docs/reference/language.md does what it says there."""

import re
from pathlib import Path

import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.filter import parse_filter
from kprobes.lang.filter_value import Known
from kprobes.model.codes import FilterCode
from tests.build.filtered import FUNCTION, known_of
from tests.build.kernel import make_probe

_PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "language.md").read_text()
_EVENT = re.search(r"These are for `(p:open [^`]*)`", _PAGE)


def _known() -> Known:
    assert _EVENT is not None
    found = known_of(make_probe(_EVENT[1].replace("\n", " ").replace("do_sys_openat2", "f")))
    return Known(fields=found.fields, cpus=2, function=lambda _: FUNCTION)


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", _PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("text", "".join(_blocks("filter")).splitlines())
def test_the_examples_are_filters(text: str) -> None:
    assert parse_filter(text, _known()) is not None


@pytest.mark.parametrize("block", _blocks("wrong-filter"))
def test_the_errors_are_as_shown(block: str) -> None:
    text, shown = block.split("\n", 1)

    with pytest.raises(DefinitionError) as caught:
        parse_filter(text, _known())

    assert f"{caught.value}\n" == shown


def test_every_operator_and_kind_of_value_has_an_example() -> None:
    examples = "".join(_blocks("filter"))

    assert [
        word for word in ("==", "!=", "<", "&", "~", "&&", "||", "!(") if word not in examples
    ] == []
    assert [
        word for word in ("CPUS{", ".function", "comm", "cpu", "[ch]") if word not in examples
    ] == []
    assert len(_blocks("wrong-filter")) == 3
    assert len(FilterCode) > 20
