"""Types of drgn's, made of BTF: sound ones as C has them, hostile ones end."""

import random

import pytest
from drgn import Architecture, Platform, Program, Qualifiers, Type, TypeKind

from kprobes.drgn.types import TypeFinder
from kprobes.errors import FormatError
from kprobes.formats import btf_index
from kprobes.formats.btf import Btf
from kprobes.formats.btf_index import Kind
from tests.build.btf import BtfBuilder, kernel_types


def finder(data: bytes) -> TypeFinder:
    prog = Program(Platform(Architecture.X86_64))
    types = TypeFinder(prog, Btf(btf_index.parse(data)))
    prog.register_type_finder("tested", types, enable_index=0)
    return types


def program(builder: BtfBuilder) -> Program:
    prog = Program(Platform(Architecture.X86_64))
    types = TypeFinder(prog, Btf(btf_index.parse(builder.build())))
    prog.register_type_finder("tested", types, enable_index=0)
    return prog


def members(type_: Type) -> list[tuple[str | None, int, int | None, str]]:
    """Return name, offset and size in bits, and type of each."""
    assert type_.members is not None
    return [(m.name, m.bit_offset, m.bit_field_size, m.type.type_name()) for m in type_.members]


def test_members_are_where_c_has_them() -> None:
    prog = program(kernel_types())

    assert prog.type("struct thing").size == 64
    assert members(prog.type("struct thing")) == [
        ("id", 0, None, "int"),
        (None, 64, None, "union <anonymous>"),
        ("list", 128, None, "struct list_head"),
        ("name", 256, None, "char [16]"),
    ]
    assert prog.type("struct thing").member("high").bit_offset == 96
    assert members(prog.type("thing_t").type) == [("x", 64, None, "int")]


def test_bit_fields_have_their_sizes_both_old_and_new() -> None:
    prog = program(kernel_types())

    assert members(prog.type("struct packed")) == [
        ("a", 0, 3, "int"),
        ("b", 3, 5, "int"),
        ("c", 8, None, "char"),
    ]
    assert members(prog.type("struct old_bits")) == [("bit", 0, 1, "unsigned int")]


def test_a_struct_may_point_to_itself() -> None:
    b = BtfBuilder()
    b.struct("node", 8, [("next", 2, 0)])
    b.ptr(1)
    b.union("value", 8, [("node", 2, 0), ("", 1, 0)])

    prog = program(b)

    assert members(prog.type("struct node")) == [("next", 0, None, "struct node *")]
    assert members(prog.type("union value"))[1] == (None, 0, None, "struct node")


def test_numbers_enums_and_qualifiers_are_what_they_are() -> None:
    b = kernel_types()
    b.add(Kind.INT, "_Bool", 1, words=[8])
    flags = b.add(Kind.INT, "signed char", 1, words=[1 << 24 | 8])
    b.typedef("volatile_t", b.add(Kind.VOLATILE, value=b.const(flags)))

    prog = program(b)

    assert prog.type("_Bool").kind is TypeKind.BOOL
    assert prog.type("signed char").is_signed
    assert not prog.type("unsigned long").is_signed
    assert prog.type("double").kind is TypeKind.FLOAT
    assert prog.type("volatile_t").type.qualifiers == Qualifiers.CONST | Qualifiers.VOLATILE
    enum = prog.type("enum small")
    assert enum.enumerators is not None
    assert [(each.name, each.value) for each in enum.enumerators] == [("MINUS", -1)]
    assert enum.type.is_signed
    assert not prog.type("enum state").type.is_signed
    assert prog.type("enum wide").type.size == 8


def test_functions_have_their_parameters() -> None:
    types = finder(kernel_types().build())

    (openat,) = types.btf.numbers("openat", Kind.FUNC)
    (printk,) = types.btf.numbers("printk", Kind.FUNC)

    assert types.type(openat).type_name() == (
        "int (int dfd, const char *filename, int (*fn)(void *, void (*)(void)))"
    )
    assert types.type(printk).type_name() == "int (const char *fmt, ...)"


def test_of_several_of_a_name_the_first_complete_one_counts() -> None:
    b = BtfBuilder()
    number = b.int_("int", 4)
    b.add(Kind.FWD, "twice")
    b.struct("twice", 4, [("first", number, 0)])
    b.struct("twice", 4, [("second", number, 0)])
    b.add(Kind.FWD, "never", info=1 << 31)

    prog = program(b)

    assert members(prog.type("struct twice")) == [("first", 0, None, "int")]
    assert not prog.type("union never").is_complete()
    with pytest.raises(LookupError):
        prog.type("struct never")
    with pytest.raises(LookupError):
        prog.type("struct twice", "file.c")


def test_a_struct_without_a_name_is_known_by_its_members() -> None:
    types = finder(kernel_types().build())

    found = types.nameless(["low", "high"])

    assert found is not None
    assert found.size == 8
    assert types.nameless(["low"]) is None


@pytest.mark.parametrize("kind", [Kind.PTR, Kind.TYPEDEF, Kind.CONST])
def test_a_type_that_refers_to_itself_is_an_error(kind: Kind) -> None:
    b = BtfBuilder()
    b.add(kind, "circle", 2)
    b.add(kind, "circle", 1)

    with pytest.raises(FormatError, match="refers to itself"):
        finder(b.build()).type(1)


def test_damaged_types_are_errors_or_read() -> None:
    sound = kernel_types().build()
    draw = random.Random(7)
    seen = {"read": 0, "refused": 0}
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(3):
            data[draw.randrange(24, len(data))] = draw.randrange(256)
        try:
            types = finder(bytes(data))
            for number in range(len(types.btf)):
                for member in (
                    types.type(number).members or () if _has_members(types, number) else ()
                ):
                    member.type.type_name()
            seen["read"] += 1
        except (FormatError, ValueError, OverflowError, TypeError):
            seen["refused"] += 1
    assert min(seen.values()) > 0


def _has_members(types: TypeFinder, number: int) -> bool:
    return types.type(number).kind in (TypeKind.STRUCT, TypeKind.UNION)
