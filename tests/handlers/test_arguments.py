"""Arguments by name: where the ABI has them, typed, and changed in place."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from kprobes.arch.arch import Passed
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import MemoryFault, UsageError
from kprobes.handlers.arguments import (
    Argument,
    Arguments,
    EntryArguments,
    HandlerPlace,
    arguments_of,
    declaration,
    find_prototype,
)
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.values import TextPointer
from kprobes.model.kernel import Parameter, Prototype
from tests.build import typed
from tests.build.handled import DENTRY, FILE, NAME, STACK, Handled, make_handled, make_place


def arguments(made: Handled, name: str = "vfs_read", **registers: int) -> Arguments:
    found = make_place(name).arguments(made.live)
    return Arguments(found, made.vcpu(**registers).registers, made.live.typed(made.memory))


def test_arguments_are_typed() -> None:
    made = make_handled()
    args = arguments(made, di=FILE, si=NAME, cx=1, r8=0x1FF)

    assert (args.file.f_mode, args["buf"].string()) == (0x1D, "hosts")
    assert isinstance(args.buf, TextPointer)
    assert (args.mode.name, args.c) == ("WRITE", -1)
    assert (list(args), len(args)) == (["file", "buf", "count", "mode", "c"], 5)
    assert repr(args).startswith(f"file=(struct file *){FILE:#x}, buf=(char *){NAME:#x}, count=")
    assert "count" in dir(args)


def test_they_are_looked_up_once_for_each_set_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    made, looked_up = make_handled(), list[str]()
    find = HandlerPlace.arguments

    def counted(place: HandlerPlace, live: LiveKernel) -> Mapping[str, Argument]:
        looked_up.append(place.function.name)
        return find(place, live)

    monkeypatch.setattr(HandlerPlace, "arguments", counted)
    known = EntryArguments(make_place(), made.live)

    found = [known(), known()]
    kernel = replace(made.live.guest.kernel, types=typed.UNTYPED.types)
    monkeypatch.setattr(LiveKernel, "guest", replace(made.live.guest, kernel=kernel))
    with pytest.raises(UsageError, match="no type information"):
        known()
    monkeypatch.undo()

    assert found[0] is found[1]
    assert list(found[0]) == list(find(make_place(), made.live))
    assert looked_up == ["vfs_read", "vfs_read"]


def test_the_seventh_argument_is_on_the_stack_above_the_return_address() -> None:
    made = make_handled()
    made.put(STACK, 0xBAD)
    made.put(STACK + 8, 7)
    made.put(STACK + 16, 8)
    args = arguments(made, "many", r9=6)

    assert (args.p6, args.p7, args.p8) == (6, 7, 8)
    args.p8 = 88
    args.p6 = 66
    assert (args.p8, args.p6, args.registers_["r9"]) == (88, 66, 66)
    assert made.memory.read_u64(STACK + 16) == 88


def test_assigning_changes_the_register() -> None:
    made = make_handled()
    args = arguments(made)

    args.count = 5
    args["c"] = -2
    args.buf = args.buf + 1
    assert (args.registers_["dx"], args.registers_["r8"]) == (5, (1 << 64) - 2)
    assert (args.c, int(args.buf)) == (-2, args.registers_["si"])


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("c", 300, OverflowError), ("nothing", 0, AttributeError), ("count", "5", TypeError)],
)
def test_what_does_not_fit_changes_nothing(name: str, value: Any, error: type[Exception]) -> None:
    args = arguments(make_handled())
    before = dict(args.registers_)

    with pytest.raises(error):
        setattr(args, name, value)

    assert args.registers_ == before


def test_an_unknown_name_is_told_those_that_are_there() -> None:
    args = arguments(make_handled())

    with pytest.raises(AttributeError, match="no argument fil; there are file, buf, count"):
        _ = args.fil
    with pytest.raises(KeyError):
        _ = args["fil"]


def _parameters(*types: str) -> Prototype:
    found = typed.types()
    numbers = [found.named(name) for name in types]
    parameters = [
        Parameter(name=f"a{n}", type=name, number=number or 0)
        for n, (name, number) in enumerate(zip(types, numbers, strict=True))
    ]
    return Prototype(name="f", returns="void", parameters=tuple(parameters))


@pytest.mark.parametrize(
    ("types", "places"),
    [
        (["path", "unsigned long"], [("di", "si"), ("dx",)]),
        (["bits", "dentry", "unsigned long"], [("di",), 8, ("si",)]),
        (["unsigned long"] * 5 + ["path", "unsigned long"], [*"abcde", 8, ("r9",)]),
        (["__int128", "unsigned int"], [("di", "si"), ("dx",)]),
    ],
)
def test_structs_are_where_the_abi_has_them(types: Sequence[str], places: Sequence[object]) -> None:
    found = arguments_of(_parameters(*types), typed.types(), X86_64)

    for argument, place in zip(found.values(), places, strict=True):
        if isinstance(place, str):
            assert len(argument.passed.registers) == 1
        else:
            assert place in (argument.passed.registers, argument.passed.stack)


def test_a_struct_in_registers_is_read_and_cannot_be_assigned() -> None:
    made = make_handled()
    registers = made.vcpu(di=1, si=DENTRY).registers
    found = arguments_of(_parameters("path"), typed.types(), X86_64)
    args = Arguments(found, registers, made.live.typed(made.memory))

    assert int(args.a0.mnt) == 1
    assert args.a0.dentry.d_name.name.string() == "hosts"
    with pytest.raises(MemoryFault, match="registers"):
        args.a0.mnt = 2
    args.a0.dentry.d_flags = 3
    assert args.a0.dentry.d_flags == 3


@pytest.mark.parametrize("is_on_stack", [False, True])
def test_a_struct_that_the_caller_has_copied_is_read_and_written_there(is_on_stack: bool) -> None:
    made = make_handled()
    made.put(STACK + 8, DENTRY)
    (found,) = arguments_of(_parameters("dentry"), typed.types(), X86_64).values()
    place = (
        Passed(stack=8, is_address=True)
        if is_on_stack
        else Passed(registers=("di",), is_address=True)
    )
    registers = made.vcpu(di=DENTRY).registers
    args = Arguments({"a0": replace(found, passed=place)}, registers, made.live.typed(made.memory))

    assert args.a0.d_name.name.string() == "hosts"
    args.a0.d_flags = 3
    assert args.a0.d_flags == 3
    assert registers["di"] == DENTRY


def test_a_prototype_is_spelled_as_c_writes_it() -> None:
    prototype = find_prototype(typed.types(), "vfs_read")
    callback = Parameter(name="fn", type="int (*)(void *)")
    rest = Parameter(name="", type="...")

    assert declaration(prototype) == (
        "ssize_t vfs_read(struct file *file, char *buf, unsigned long count, enum mode mode, "
        "signed char c)"
    )
    assert declaration(Prototype(name="f", returns="char *", parameters=(callback, rest))) == (
        "char *f(int (*fn)(void *), ...)"
    )
    assert declaration(Prototype(name="f", returns="void", parameters=())) == "void f(void)"


def test_a_function_without_types_and_one_that_is_not_entered_have_no_arguments() -> None:
    live = make_handled().live

    with pytest.raises(UsageError, match="do not say what arguments untyped has"):
        make_place("untyped").arguments(live)
    with pytest.raises(UsageError, match=r"vfs_read\+0x8/0x40 is not where vfs_read is entered"):
        make_place(offset=8).arguments(live)
