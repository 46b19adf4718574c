"""Functions that may be called: what they take and return, and which are refused."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kprobes.errors import (
    AmbiguousSymbolError,
    KprobesError,
    RefusedError,
    UnknownSymbolError,
    UsageError,
)
from kprobes.formats.btf_index import Kind
from kprobes.guest.call import Callee
from kprobes.guest.guest import Guest
from kprobes.guest.places import places_of
from kprobes.image.types import parse_types
from kprobes.units import U64
from tests.build.btf import BtfBuilder
from tests.build.guest import make_guest
from tests.build.kernel import TEXT, make_kernel, symbol

SIGNED = 1 << 24
BOOT = TEXT + 0x6000
FUNCTIONS = [
    "add",
    "bool_of",
    "pointer",
    "stores",
    "byte",
    "enum_of",
    "takes_struct",
    "gives_struct",
    "any",
    "many",
    "untyped",
]


def make_types() -> BtfBuilder:
    b = BtfBuilder()
    int_ = b.add(Kind.INT, "int", 4, words=[32 | SIGNED])
    byte, long_ = b.int_("unsigned char", 1), b.int_("unsigned long", 8)
    bool_, pointer = b.int_("_Bool", 1), b.ptr(0)
    pair = b.struct("pair", 16, [("a", long_, 0), ("b", long_, 64)])
    enum = b.enum("signed_enum", {"LESS": -1, "MORE": 1}, flag=True)
    b.func("add", int_, [("left", int_), ("right", byte)])
    b.func("bool_of", bool_, [("to", bool_)])
    b.func("pointer", pointer, [("at", pointer)])
    b.func("stores", 0, [("number", long_)])
    b.func("byte", byte, [])
    b.func("enum_of", enum, [])
    b.func("takes_struct", int_, [("pair", pair)])
    b.func("gives_struct", pair, [])
    b.func("any", int_, [("first", int_), ("", 0)])
    b.func("many", int_, [(f"p{n}", int_) for n in range(7)])
    b.func("boots", int_, [])
    b.func("data", int_, [])
    b.func("twice", int_, [])
    return b


def make_calling() -> Guest:
    made = make_guest(["p f"] * len(FUNCTIONS))
    symbols = [
        *(symbol(n, a, size=0x20) for n, a in zip(FUNCTIONS, made.sites, strict=True)),
        symbol("_sinittext", BOOT),
        symbol("boots", BOOT + 0x40),
        symbol("_einittext", BOOT + 0x80),
        symbol("data", TEXT + 0x8000, type="D"),
        symbol("twice", TEXT + 0x7000),
        symbol("twice", TEXT + 0x7100),
        *made.guest.kernel.symbols.all_named("ftrace_pages_start"),
    ]
    return replace(made.guest, kernel=make_kernel(symbols, types=parse_types(make_types().build())))


def callee(name: str) -> Callee:
    guest = make_calling()
    return Callee(guest, places_of(guest), name)


def test_numbers_become_registers() -> None:
    assert callee("add").arguments([-5, 255]) == [-5 & U64, 255]
    assert callee("pointer").arguments([TEXT]) == [TEXT]
    assert callee("stores").arguments([U64]) == [U64]
    assert callee("bool_of").arguments([True]) == [1]


@pytest.mark.parametrize(
    ("name", "told"),
    [("stores", "takes 1 argument, not 2"), ("add", "takes 2 arguments, not 3")],
)
def test_how_many_arguments_there_are_is_told(name: str, told: str) -> None:
    given = [0] * int(told[-1])

    with pytest.raises(UsageError, match=told):
        callee(name).arguments(given)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add", (1,)),
        ("add", (1, 2, 3)),
        ("add", (1 << 31, 0)),
        ("add", (0, 256)),
        ("add", (0, -1)),
        ("bool_of", (2,)),
        ("stores", (U64 + 1,)),
        ("stores", ("1",)),
        ("pointer", (b"text",)),
        ("byte", (1,)),
    ],
)
def test_what_does_not_fit_is_the_user_s_error(name: str, arguments: Sequence[int]) -> None:
    with pytest.raises(UsageError, match=name):
        callee(name).arguments(arguments)


@pytest.mark.parametrize(
    ("name", "register", "result"),
    [
        ("add", 0xFFFF_FFFB, -5),
        ("add", 0x1234_0000_0007, 7),
        ("byte", 0xABCD_01FF, 0xFF),
        ("bool_of", 0xFF00, False),
        ("bool_of", 0xFF01, True),
        ("pointer", TEXT, TEXT),
        ("enum_of", 0xFFFF_FFFF, -1),
        ("stores", 17, None),
    ],
)
def test_a_register_becomes_what_the_type_says(name: str, register: int, result: object) -> None:
    found = callee(name).result(register)

    assert (found, type(found)) == (result, type(result))


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("takes_struct", RefusedError, "struct pair"),
        ("gives_struct", RefusedError, "returns struct pair"),
        ("any", RefusedError, "any number"),
        ("many", RefusedError, "7 arguments, and 6 fit"),
        ("untyped", RefusedError, "do not say what it takes"),
        ("boots", RefusedError, "init text"),
        ("data", RefusedError, "data, no function"),
        ("nothing", UnknownSymbolError, "nothing"),
        ("ext4:add", UnknownSymbolError, "ext4:add"),
        ("twice", AmbiguousSymbolError, "twice|2"),
    ],
)
def test_what_cannot_be_called_is_refused(name: str, error: type[KprobesError], why: str) -> None:
    with pytest.raises(error, match=why):
        callee(name)
