"""Types by name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.errors import FormatError, UnknownTypeError
from kprobes.formats import btf_index
from kprobes.formats.btf import Btf
from kprobes.image.types import BtfTypes, parse_types
from kprobes.model.kernel import Parameter, TypeKind
from tests.build.btf import BtfBuilder, kernel_types


def types(builder: BtfBuilder) -> BtfTypes:
    return BtfTypes(Btf(btf_index.parse(builder.build())))


@pytest.mark.parametrize(
    ("struct", "path", "offset", "size"),
    [
        ("thing", "id", 0, 4),
        ("thing", "whole", 8, 8),
        ("thing", "high", 12, 4),
        ("thing", "list.prev", 24, 8),
        ("thing", "name", 32, 16),
        ("thing_t", "x", 8, 4),
        ("packed", "c", 1, 1),
    ],
)
def test_a_member_is_where_the_compiler_put_it(
    struct: str, path: str, offset: int, size: int
) -> None:
    found = types(kernel_types())

    assert found.offset(struct, path) == offset
    assert found.member_size(struct, path) == size


@pytest.mark.parametrize(
    ("struct", "path", "why"),
    [
        ("nowhere", "x", "no struct nowhere"),
        ("thing", "absent", "thing has no member absent"),
        ("thing", "list.absent", "thing.list has no member absent"),
        ("thing", "id.deeper", "thing.id has no member deeper"),
        ("packed", "a", "packed.a is a bit-field"),
        ("packed", "b", "packed.b is a bit-field"),
        ("old_bits", "bit", "old_bits.bit is a bit-field"),
    ],
)
def test_what_is_not_there_is_named(struct: str, path: str, why: str) -> None:
    with pytest.raises(UnknownTypeError, match=why):
        types(kernel_types()).offset(struct, path)


def test_sizes_and_enumerators_go_by_name() -> None:
    found = types(kernel_types())

    assert found.size("thing") == 64
    assert found.size("thing_t") == 12
    assert found.enumerator("GONE") == 2
    with pytest.raises(UnknownTypeError, match="no enumerator ABSENT"):
        found.enumerator("ABSENT")
    with pytest.raises(UnknownTypeError, match="no struct int"):
        found.size("int")


def test_a_function_has_its_parameters_names_and_types() -> None:
    found = types(kernel_types()).function("openat")

    assert found is not None
    assert found.returns == "int"
    assert [(parameter.name, parameter.type) for parameter in found.parameters] == [
        ("dfd", "int"),
        ("filename", "const char *"),
        ("fn", "int (*)(void *, void (*)(...))"),
    ]


def test_any_number_of_arguments_is_a_parameter_without_a_name() -> None:
    found = types(kernel_types()).function("printk")

    assert found is not None
    assert found.parameters[-1] == Parameter(name="", type="...")


def test_a_function_without_types_has_no_signature() -> None:
    found = types(kernel_types())

    assert found.function("absent") is None
    assert found.function("thing") is None


def test_a_type_is_described_without_typedefs_and_qualifiers() -> None:
    found = types(kernel_types())
    function = found.function("openat")
    assert function is not None
    dfd, filename, callback = (found.describe(p.number) for p in function.parameters)

    assert (dfd.kind, dfd.name, dfd.size, dfd.bits) == (TypeKind.INT, "int", 4, 32)
    assert (filename.kind, filename.size) == (TypeKind.POINTER, 8)
    assert found.describe(filename.target).name == "char"
    assert found.describe(callback.target).kind is TypeKind.OTHER
    assert found.describe(0).kind is TypeKind.VOID
    assert function.returned == dfd.number


def test_a_member_of_an_anonymous_one_is_its_holder_s() -> None:
    found = types(kernel_types())
    thing = found.struct("thing")
    assert thing is not None

    high, name = found.member(thing, "high"), found.member(thing, "name")

    assert high is not None
    assert (high.bit_offset, high.bit_size) == (96, 0)
    assert name is not None
    array = found.describe(name.number)
    assert (array.kind, array.size, array.count) == (TypeKind.ARRAY, 16, 16)
    assert found.member(thing, "absent") is None
    assert found.member(thing, "") is None
    assert found.member(high.number, "x") is None


def test_bit_fields_are_told_by_their_member_or_by_their_type() -> None:
    found = types(kernel_types())
    packed, old = found.struct("packed"), found.struct("old_bits")
    assert packed is not None
    assert old is not None

    a, b, bit = found.member(packed, "a"), found.member(packed, "b"), found.member(old, "bit")

    assert a is not None
    assert b is not None
    assert bit is not None
    assert [(m.bit_offset, m.bit_size) for m in (a, b, bit)] == [(0, 3), (3, 5), (0, 1)]
    assert found.describe(bit.number).bits == 1


def test_only_structs_are_found_by_name() -> None:
    found = types(kernel_types())

    assert found.struct("thing") is not None
    assert found.struct("thing_t") is None
    assert found.struct("state") is None
    assert found.struct("") is None


def test_enumerators_come_in_their_order_with_their_signs() -> None:
    b = BtfBuilder()
    state = b.enum("state", {"LIVE": 0, "GONE": 2})
    small = b.enum("small", {"MINUS": -1}, flag=True)
    wide = b.typedef("wide_t", b.enum64("wide", {"HUGE": 1 << 40, "TOP": 1 << 63}))
    number = b.int_("int", 4)
    found = types(b)

    assert found.enumerators(state) == ((0, "LIVE"), (2, "GONE"))
    assert found.enumerators(small) == ((-1, "MINUS"),)
    assert found.enumerators(wide) == ((1 << 40, "HUGE"), (1 << 63, "TOP"))
    assert found.enumerators(number) == ()
    assert found.describe(wide).size == 8


def test_a_struct_that_contains_itself_is_a_format_error() -> None:
    b = BtfBuilder()
    b.struct("loop", 8, [("", 1, 0), ("", 1, 0)])

    with pytest.raises(FormatError, match="contains itself"):
        types(b).offset("loop", "absent")


def test_a_damaged_btf_is_no_types() -> None:
    assert parse_types(b"\x9f\xeb\x01 and nothing sound") is None


@settings(max_examples=150)
@given(data=st.data())
def test_hostile_types_answer_or_raise_what_is_promised(data: st.DataObject) -> None:
    damaged = bytearray(kernel_types().build())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(24, len(damaged) - 1))
        damaged[place] = data.draw(st.sampled_from([0, 1, 2, 5, 10, 30, 255]))
    found = parse_types(bytes(damaged))
    if found is None:
        return

    for ask in (
        lambda: found.offset("thing", "list.prev"),
        lambda: found.member_size("thing", "high"),
        lambda: found.size("thing_t"),
        lambda: found.enumerator("GONE"),
        lambda: found.function("openat"),
        lambda: found.member(found.struct("thing") or 0, "high"),
        lambda: [found.describe(number) for number in range(40)],
        lambda: [found.enumerators(number) for number in range(40)],
    ):
        try:
            ask()
        except (FormatError, UnknownTypeError):
            continue


def test_types_are_found_by_their_names_in_c() -> None:
    found = types(kernel_types())

    for name in ("struct thing", "thing", "thing_t", "long unsigned int", "enum state", "state"):
        number = found.named(name)
        assert number is not None
        assert found.type_name(number).endswith(name)
    assert found.named("union thing") is None
    assert found.named("nothing") is None


def test_members_are_listed_with_those_of_anonymous_ones() -> None:
    found = types(kernel_types())
    thing, size = found.named("struct thing"), found.named("size_t")

    assert thing is not None
    assert {"id", "whole", "low", "high", "list", "name"} <= set(found.member_names(thing))
    assert size is not None
    assert found.member_names(size) == ()
