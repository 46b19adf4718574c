"""Return values: in registers, in memory, none."""

from typing import Any

import pytest

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import UnknownTypeError
from kprobes.handlers.arguments import load_returned, store_returned
from kprobes.model.kernel import Prototype
from tests.build import typed
from tests.build.handled import DENTRY, FILE, NAME, make_handled

TYPES = typed.types()


def prototype(type_: str) -> Prototype:
    number = 0 if type_ == "void" else TYPES.named(type_)
    assert number is not None
    return Prototype(name="f", returns=type_, parameters=(), returned=number)


def returned(type_: str, **registers: int) -> Any:
    made = make_handled()
    memory = made.live.typed(made.memory)
    values = made.vcpu(**registers).registers
    return load_returned(X86_64.returns, prototype(type_), values, memory)


@pytest.mark.parametrize(
    ("type_", "ax", "value"),
    [
        ("void", 5, None),
        ("int", 0xFFFF_FFFE, -2),
        ("int", 0xBAD_FFFF_FFFE, -2),
        ("ssize_t", 1 << 63, 1 << 63),
        ("signed char", 0x1FF, -1),
        ("enum mode", 1, 1),
    ],
)
def test_a_number_is_read_by_its_type(type_: str, ax: int, value: int | None) -> None:
    assert returned(type_, ax=ax) == value


def test_an_enumerator_and_a_pointer_know_what_they_are() -> None:
    assert returned("enum mode", ax=1).name == "WRITE"
    assert returned("dentry_t", ax=DENTRY).d_name.len == 5


def test_a_small_struct_is_in_two_registers() -> None:
    found = returned("struct qstr", ax=5 << 32, dx=NAME)

    assert (found.len, found.name.string()) == (5, "hosts")


def test_a_large_struct_is_where_the_caller_made_room() -> None:
    assert returned("struct file", ax=FILE).f_mode == 0x1D


def test_a_number_is_changed_as_its_type_has_it() -> None:
    made = make_handled()
    memory, registers = made.live.typed(made.memory), made.vcpu().registers

    store_returned(X86_64.returns, prototype("int"), -2, registers, memory)
    assert registers["ax"] == (1 << 64) - 2
    with pytest.raises(OverflowError):
        store_returned(X86_64.returns, prototype("int"), 1 << 40, registers, memory)
    with pytest.raises(UnknownTypeError, match="f returns nothing"):
        store_returned(X86_64.returns, prototype("void"), 1, registers, memory)
    with pytest.raises(UnknownTypeError, match="not a number"):
        store_returned(X86_64.returns, prototype("struct qstr"), 1, registers, memory)
