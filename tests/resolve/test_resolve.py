"""Names to operands, and what is wrong with them, with the caret where it belongs."""

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError, RefusedError
from kprobes.model.definition import TypeWord
from kprobes.model.kernel import Symbol
from kprobes.model.resolved import (
    CommValue,
    Constant,
    Load,
    Operand,
    RegisterValue,
    Resolved,
    StackValue,
)
from kprobes.resolve.place import find_function
from kprobes.resolve.resolve import resolve
from kprobes.units import Addr
from tests.build.kernel import TEXT, make_kernel, read, symbol

DI, SI = RegisterValue(name="di"), RegisterValue(name="si")
KERNEL = make_kernel(
    [
        symbol("vfs_read", TEXT),
        symbol("vfs_write", TEXT + 0x100),
        symbol("twice", TEXT + 0x200),
        symbol("twice", TEXT + 0x300),
        symbol("alias", TEXT + 0x400),
        symbol("alias", TEXT + 0x400),
        symbol("jiffies", TEXT + 0x8000, type="D"),
    ]
)


def _resolve(text: str) -> Resolved:
    return resolve(read(text), KERNEL, X86_64, event_id=7, locate=lambda function: function.addr)


def _load(base: Operand, offset: int = 0, *, is_user: bool = False) -> Load:
    return Load(base=base, offset=offset, is_user=is_user)


@pytest.mark.parametrize(
    ("form", "operand"),
    [
        ("%bx", RegisterValue(name="bx")),
        ("$arg1", DI),
        ("$arg6", RegisterValue(name="r9")),
        ("$arg7", StackValue(slot=1)),
        ("$arg9", StackValue(slot=3)),
        ("$stack", RegisterValue(name="sp")),
        ("$stack0", StackValue(slot=0)),
        ("$stack12", StackValue(slot=12)),
        ("$comm", CommValue()),
        ("\\12", Constant(value=12)),
        ("\\0xffffffffffffffff", Constant(value=(1 << 64) - 1)),
        ("@0x1234", _load(Constant(value=0x1234))),
        ("@jiffies", _load(Constant(value=TEXT + 0x8000))),
        ("@jiffies+8", _load(Constant(value=TEXT + 0x8008))),
        ("@jiffies-8", _load(Constant(value=TEXT + 0x7FF8))),
        ("+8($arg1)", _load(DI, 8)),
        ("-8($arg1)", _load(DI, -8)),
        ("+u8($arg1)", _load(DI, 8, is_user=True)),
        ("+0(+u8(-16($arg2)))", _load(_load(_load(SI, -16), 8, is_user=True))),
        ("+0(@jiffies)", _load(_load(Constant(value=TEXT + 0x8000)))),
        ("+0($arg1):string", _load(DI)),
        ("+0($arg1):ustring", _load(DI, is_user=True)),
        ("+u0($arg1):string", _load(DI, is_user=True)),
        ("+0(+0($arg1)):ustring", _load(_load(DI), is_user=True)),
        ("\\7:string", _load(Constant(value=7))),
        ("\\7:ustring", _load(Constant(value=7), is_user=True)),
        ("+8($arg1):string[2]", _load(_load(DI, 8))),
        ("+u8($arg1):ustring[2]", _load(_load(DI, 8, is_user=True), is_user=True)),
        ("+0($arg1):u8[3]", _load(DI)),
        ("@jiffies:ustring", _load(Constant(value=TEXT + 0x8000), is_user=True)),
    ],
)
def test_every_form_has_its_operand(form: str, operand: Operand) -> None:
    (fetch,) = _resolve(f"p vfs_read a={form}").fetches

    assert fetch.operand == operand
    assert fetch.field.name == "a"


def test_a_probe_knows_its_function_its_event_and_its_number() -> None:
    probe = _resolve("p:grp/ev vfs_write")

    assert probe.function == TEXT + 0x100
    layout = probe.layout
    assert (layout.group, layout.event, layout.event_id) == ("grp", "ev", 7)


@pytest.mark.parametrize(
    ("form", "calls"),
    [
        ("$arg1", False),
        ("$comm", False),
        ("$stack0", False),
        ("$stack1", True),
        ("+0($arg1)", True),
        ("@1", True),
    ],
)
def test_reading_memory_needs_the_guest_s_functions(form: str, calls: bool) -> None:
    assert _resolve(f"p vfs_read b=%ax a={form}").calls_guest == calls


@pytest.mark.parametrize(
    ("marked", "code", "hint"),
    [
        ("p ^vfs_raed", "BAD_PROBE_ADDR", "did you mean vfs_read"),
        ("p ^no_such_thing_at_all", "BAD_PROBE_ADDR", ""),
        ("p:grp/ev ^twice $arg1", "NON_UNIQ_SYMBOL", "2 functions have this name"),
        ("p ^jiffies", "BAD_PROBE_ADDR", "jiffies is data"),
        ("p vfs_read a=%ax:^string", "BAD_STRING", ""),
        ("p vfs_read $arg1 b=$stack2:^ustring", "BAD_STRING", ""),
        ("p vfs_read $comm:^u64", "NEED_STRING_TYPE", ""),
        ("p vfs_read c=$comm:^ustring", "NEED_STRING_TYPE", ""),
    ],
)
def test_the_caret_marks_what_is_wrong(marked: str, code: str, hint: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        _resolve(marked.replace("^", "", 1))

    error = caught.value
    assert (error.code, error.column) == (code, marked.index("^"))
    assert hint in error.hint


@pytest.mark.parametrize(
    ("marked", "word", "code"),
    [
        ("p vfs_read a=%ax:^x64", TypeWord(base="string", size=4), "BAD_STRING"),
        ("p vfs_read $arg1 b=$stack2:^x64", TypeWord(base="ustring", size=4), "BAD_STRING"),
        ("p vfs_read a=%ax:^x64", TypeWord(base="u8", size=1, count=3), "BAD_STRING"),
        ("p vfs_read a=$stack:^x64", TypeWord(base="symstr", size=4), "BAD_SYMSTRING"),
        ("p vfs_read a=+u0(%di):^x64", TypeWord(base="symstr", size=4), "BAD_SYMSTRING"),
        ("p vfs_read a=@1:^x64", TypeWord(base="symstr", size=4, count=2), "BAD_STRING"),
    ],
)
def test_what_parsing_may_have_let_through_is_refused(
    marked: str, word: TypeWord, code: str
) -> None:
    good = read(marked.replace("^", "", 1))
    *others, last = good.args
    bad = replace(good, args=(*others, replace(last, spec=word)))

    with pytest.raises(DefinitionError) as caught:
        resolve(bad, KERNEL, X86_64, event_id=1, locate=lambda function: function.addr)

    assert (caught.value.code, caught.value.column) == (code, marked.index("^"))


def test_an_unknown_symbol_in_an_argument_is_named() -> None:
    with pytest.raises(DefinitionError) as caught:
        _resolve("p vfs_read a=@no_such_symbol")

    assert caught.value.code == "BAD_PROBE_ADDR"
    assert "no_such_symbol" in caught.value.hint


def test_two_names_of_one_address_are_not_ambiguous() -> None:
    assert find_function(read("p alias"), KERNEL).addr == TEXT + 0x400


def test_a_refusal_to_place_the_probe_comes_through() -> None:
    def refuse(function: Symbol) -> Addr:
        raise RefusedError(f"{function.name} is out of bounds")

    with pytest.raises(RefusedError, match="vfs_read is out of bounds"):
        resolve(read("p vfs_read"), KERNEL, X86_64, event_id=1, locate=refuse)


def test_a_wrong_argument_is_told_before_the_place_is_looked_for() -> None:
    def must_not_be_called(function: Symbol) -> Addr:
        raise AssertionError(function)

    with pytest.raises(DefinitionError):
        resolve(
            read("p vfs_read $arg1:string"), KERNEL, X86_64, event_id=1, locate=must_not_be_called
        )
