"""Fields of return probes that no definition fetches."""

import pytest

from kprobes.errors import DefinitionError
from kprobes.model.definition import SyntheticFields
from kprobes.model.resolved import HEADER, EntryCounter, ExitAddress, ProcessId, Storage
from kprobes.resolve.explain import explain, format_text
from kprobes.resolve.resolve import check_alike
from tests.build.kernel import make_extra, make_probe

BOTH = SyntheticFields(duration=True, exits=True)


def test_they_come_last_and_each_when_it_is_wanted() -> None:
    probe = make_extra("r f a=$retval:u8", BOTH)

    assert [fetch.operand for fetch in probe.fetches[1:]] == [EntryCounter(), ExitAddress()]
    assert [(f.name, f.type, f.storage, f.offset, f.size) for f in probe.layout.fields] == [
        ("a", "u8", Storage.NUMBER, HEADER + 8, 1),
        ("duration", "u64", Storage.DURATION, HEADER + 16, 8),
        ("exit", "symbol", Storage.NUMBER, HEADER + 24, 8),
    ]
    assert probe.layout.size == HEADER + 32
    for synthetic_fields, names in (
        (SyntheticFields(duration=True), ["duration"]),
        (SyntheticFields(exits=True), ["exit"]),
    ):
        found = make_extra("r f", synthetic_fields).layout.fields
        assert [field.name for field in found] == names


def test_probes_at_entries_have_none() -> None:
    assert make_extra("p f a=$arg1", BOTH).layout == make_probe("p f a=$arg1").layout


@pytest.mark.parametrize("text", ["p f", "r f", "p f a=$arg1"])
def test_every_probe_may_have_the_tasks_process(text: str) -> None:
    probe = make_extra(text, SyntheticFields(tgid=True))

    field, fetch = probe.layout.fields[-1], probe.fetches[-1]
    assert (field.name, field.type, field.size) == ("common_tgid", "s32", 4)
    assert (fetch.operand, fetch.calls_guest) == (ProcessId(), False)
    assert explain(fetch) == "s32 = current->tgid"
    assert len(probe.layout.fields) == len(make_probe(text).layout.fields) + 1


@pytest.mark.parametrize("marked", ["r f a=$retval ^exit=$retval", "r f ^duration=$retval"])
def test_an_argument_of_the_same_name_is_refused(marked: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        make_extra(marked.replace("^", ""), BOTH)

    assert (caught.value.code, caught.value.column) == ("USED_ARG_NAME", marked.index("^"))
    assert make_probe(marked.replace("^", "")).layout.fields


def test_the_listing_does_not_have_them() -> None:
    assert make_extra("r f a=$retval", BOTH).definition.args[-1].name == "a"


def test_the_format_file_has_numbers() -> None:
    text = format_text(make_extra("r f", BOTH).layout, number=1)

    assert "field:u64 duration;\toffset:24;\tsize:8;\tsigned:0;" in text
    assert 'print fmt: "(%lx <- %lx) duration=%Lu exit=%pS"' in text


def test_probes_of_one_event_have_the_same() -> None:
    first = make_extra("r:e f a=$retval", BOTH)

    check_alike(first, make_extra("r:e f a=$retval", BOTH))
    with pytest.raises(DefinitionError) as caught:
        check_alike(first, make_probe("r:e f a=$retval"))
    assert caught.value.code == "DIFF_ARG_TYPE"


def test_what_differs_is_not_looked_for_in_them() -> None:
    command = "r:e f a=$retval b=$retval"

    with pytest.raises(DefinitionError) as caught:
        check_alike(make_extra("r:e f a=$retval", BOTH), make_extra(command, BOTH))

    assert caught.value.column == command.index("b=")
