"""No text makes the parser do anything but accept or refuse it; what it accepts reads back."""

import os
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.errors import DefinitionError
from kprobes.lang.listing import show
from kprobes.lang.parser import parse_boot, parse_statements
from kprobes.model.definition import Definition
from tests.build.definitions import REGISTERS, plain
from tests.build.mutations import corpus, texts

_LONGEST = 4093
_MILLION = int(os.environ.get("KPROBES_FUZZ_INPUTS", "1000000"))


def accept_or_refuse(text: str) -> int:
    """How many definitions a text has, each of which reads back from its listing."""
    refused, found = None, ()
    try:
        found = parse_statements(text, registers=REGISTERS)
    except DefinitionError as error:
        refused = error
    assert refused is None or refused.column >= 0
    definitions = [each for each in found if isinstance(each, Definition)]
    for definition in definitions:
        _reads_back(definition)
    return len(definitions)


def _reads_back(definition: Definition) -> None:
    listing = show(definition)
    # The kernel's sanitize_event_name() leaves the first character as it is, too: .oo__entry.
    if len(listing) <= _LONGEST and not definition.event.startswith("."):
        (again,) = parse_statements(listing, registers=REGISTERS)
        assert plain(again) == plain(definition), listing


def test_mutations_are_accepted_or_refused_and_read_back() -> None:
    accepted = sum(accept_or_refuse(text) for text in texts(1, 5_000, corpus()))

    assert accepted > 300


def test_mutations_of_boot_parameters_are_accepted_or_refused() -> None:
    accepted = 0
    for text in texts(2, 1_000, corpus()):
        with suppress(DefinitionError):
            accepted += len(parse_boot(text.replace(" ", ","), registers=REGISTERS))

    assert accepted > 20


@settings(max_examples=50)
@given(st.text())
def test_any_text_is_accepted_or_refused(text: str) -> None:
    accept_or_refuse(text)
    accept_or_refuse(f"p vfs_read {text}")


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(10))
def test_a_million_mutations_are_accepted_or_refused_and_read_back(seed: int) -> None:
    inputs = texts(100 + seed, _MILLION // 10, corpus())

    accepted = sum(accept_or_refuse(text) for text in inputs)

    assert accepted > _MILLION // 200
