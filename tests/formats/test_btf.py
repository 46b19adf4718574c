"""Facts of BTF types, sound and hostile ones."""

import pytest

from kprobes.errors import FormatError
from kprobes.formats import btf_index
from kprobes.formats.btf import Btf
from kprobes.formats.btf_index import Kind
from tests.build.btf import BtfBuilder, kernel_types


def btf(builder: BtfBuilder) -> Btf:
    return Btf(btf_index.parse(builder.build()))


def test_a_type_is_found_by_name_and_kind() -> None:
    types = btf(kernel_types())

    (number,) = types.numbers("thing", Kind.STRUCT, Kind.UNION)

    assert types.type(number).name == "thing"
    assert types.type(number).vlen == 4
    assert types.numbers("thing", Kind.FUNC) == []
    assert types.numbers("absent", Kind.STRUCT) == []


def test_sizes_follow_typedefs_arrays_and_pointers() -> None:
    b = BtfBuilder()
    char = b.int_("char", 1)
    name = b.typedef("name_t", b.array(b.array(char, 4), 3))
    pointers = b.array(b.ptr(name), 5)

    types = btf(b)

    assert types.size(name) == 12
    assert types.size(pointers) == 40
    assert types.size(0) == 0


def test_enumerators_have_the_sign_that_their_enum_has() -> None:
    types = btf(kernel_types())

    def value(name: str, enum: str) -> int:
        found = types.find_enumerator(name)
        assert found is not None
        assert types.type(found[0]).name == enum
        return found[1]

    assert value("LIVE", "state") == 0
    assert value("GONE", "state") == 2
    assert value("MINUS", "small") == -1
    assert value("HUGE", "wide") == 1 << 40
    assert types.find_enumerator("ABSENT") is None
    assert types.find_enumerator("thing") is None


def test_without_any_flag_enumerators_are_signed_as_old_pahole_meant_them() -> None:
    b = BtfBuilder()
    b.enum("old", {"NEGATIVE": -2})

    assert btf(b).find_enumerator("NEGATIVE") == (1, -2)


def test_with_flags_about_an_enum_without_one_is_unsigned() -> None:
    b = BtfBuilder()
    b.enum("signed", {"MINUS": -1}, flag=True)
    b.enum("unsigned", {"TOP": 0x8000_0000})

    assert btf(b).find_enumerator("TOP") == (2, 0x8000_0000)


def test_a_circle_of_typedefs_is_a_format_error() -> None:
    b = BtfBuilder()
    b.typedef("a", 2)
    b.typedef("b", 1)

    with pytest.raises(FormatError, match="refers to itself"):
        btf(b).strip(1)


def test_an_array_of_itself_is_a_format_error() -> None:
    b = BtfBuilder()
    b.array(1, 1000)

    with pytest.raises(FormatError, match="refers to itself"):
        btf(b).size(1)


def test_types_and_strings_that_do_not_exist_are_format_errors() -> None:
    b = BtfBuilder()
    b.ptr(99)
    types = btf(b)

    with pytest.raises(FormatError):
        types.type(99)
    with pytest.raises(FormatError):
        types.type(-1)
    with pytest.raises(FormatError):
        types.index.string(1 << 30)
