"""BTF headers to columns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.errors import FormatError
from kprobes.formats import btf_index
from kprobes.formats.btf_index import Kind
from tests.build.btf import BtfBuilder, kernel_types


def test_every_type_gets_its_place_kind_and_name() -> None:
    b = BtfBuilder()
    b.int_("int", 4)
    b.struct("pair", 8, [("a", 1, 0), ("b", 1, 32)])
    b.ptr(2)

    index = btf_index.parse(b.build())

    assert index.kinds.tolist() == [Kind.VOID, Kind.INT, Kind.STRUCT, Kind.PTR]
    assert index.at.tolist() == [-1, 0, 4, 13]
    assert [index.string(int(at)) for at in index.name_at] == ["", "int", "pair", ""]
    assert index.strings_equal("pair") == [int(index.name_at[2])]
    assert index.strings_equal("absent") == []


def test_the_size_covers_both_sections_whatever_follows() -> None:
    data = kernel_types().build()

    assert btf_index.size_at(b"before!!" + data + b"after", 8) == len(data)
    assert btf_index.parse(data + b"after").size == len(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x9f\xeb\x01",
        kernel_types().build()[:-1],
        b"\x9f\xeb\x02" + kernel_types().build()[3:],
        kernel_types().build()[:4] + b"\xff\xff\xff\xff" + kernel_types().build()[8:],
        BtfBuilder().build(),
    ],
)
def test_what_is_no_btf_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        btf_index.parse(data)


def test_an_unknown_kind_is_refused_because_its_size_is_unknown() -> None:
    b = BtfBuilder()
    b.int_("int", 4)
    b.add(25, "future", 0, words=[1, 2])

    with pytest.raises(FormatError, match="type 2 is of an unknown kind"):
        btf_index.parse(b.build())


def test_a_type_that_reaches_beyond_the_section_is_refused() -> None:
    b = BtfBuilder()
    b.add(Kind.STRUCT, "torn", 8, words=[0, 0, 0], info=2)

    with pytest.raises(FormatError):
        btf_index.parse(b.build())


@settings(max_examples=150)
@given(place=st.integers(0), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_damage_is_a_format_error_or_an_index(place: int, value: int, cut: int) -> None:
    data = bytearray(kernel_types().build())
    data[place % len(data)] = value

    try:
        index = btf_index.parse(bytes(data[: len(data) - cut]))
    except FormatError:
        return
    assert len(index.at) == len(index.kinds) == len(index.name_at)
