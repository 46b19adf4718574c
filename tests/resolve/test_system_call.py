"""System calls as places: the function that serves one, and where its arguments are."""

import pytest

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError
from kprobes.lang.parser import parse
from kprobes.model.resolved import EntryValue, Load, RegisterValue, Resolved
from kprobes.resolve.resolve import resolve
from kprobes.resolve.system_call import find_system_call, number_parameters
from kprobes.resolve.tracefs_event import to_kprobe_event
from tests.build.kernel import TEXT, make_kernel, symbol

KERNEL = make_kernel(
    [
        symbol("__x64_sys_openat", TEXT),
        symbol("__x64_sys_both", TEXT + 0x100),
        symbol("sys_both", TEXT + 0x200),
        symbol("__arm64_sys_getpid", TEXT + 0x300),
    ]
)
OPENAT = (
    ("dfd", "int"),
    ("filename", "const char *"),
    ("flags", "int"),
    ("mode", "umode_t"),
    ("size", "size_t"),
    ("how", "struct open_how *"),
)
DI, SI, DX, R10, R8, R9 = (8 * n for n in (14, 13, 12, 7, 9, 8))
"""Offsets in struct pt_regs, in the order of a system call's arguments."""


def resolved(text: str) -> Resolved:
    definition = number_parameters(parse(text, registers=X86_64.registers), OPENAT)
    return resolve(definition, KERNEL, X86_64, event_id=1, locate=lambda each: each.addr)


def test_the_function_is_the_one_that_serves_it() -> None:
    probe = resolved("p sys_openat")

    assert (probe.addr, probe.layout.function) == (TEXT, "__x64_sys_openat")
    assert (probe.layout.event, probe.definition.place.symbol) == ("p_sys_openat_0", "sys_openat")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("p sys_openat", "__x64_sys_openat"),
        ("p sys_getpid", "__arm64_sys_getpid"),
        ("p sys_both", None),
        ("p __x64_sys_openat", None),
        ("p sys_nosuch", None),
    ],
)
def test_a_function_of_the_very_name_is_no_system_call(text: str, name: str | None) -> None:
    found = find_system_call(parse(text, registers=X86_64.registers), KERNEL)

    assert (found and found.name) == name


def test_arguments_are_in_the_callers_registers_by_number_and_by_name() -> None:
    words = [f"n{n}=$arg{n}" for n in range(1, 7)]
    numbers = resolved(f"p sys_openat {' '.join(words)}").fetches
    names = resolved("p sys_openat dfd filename flags mode size how").fetches

    operands = [
        Load(base=RegisterValue(name="di"), offset=offset, is_user=False)
        for offset in (DI, SI, DX, R10, R8, R9)
    ]
    assert [each.operand for each in numbers] == operands
    assert [each.operand for each in names] == operands
    assert [each.field.type for each in names] == ["s32", "x64", "s32", "u16", "u64", "x64"]


def test_all_of_them_are_known_by_their_names() -> None:
    probe = resolved("p sys_openat $arg*")

    assert [each.field.name for each in probe.fetches] == [name for name, _ in OPENAT]


def test_a_text_is_the_programs_where_the_argument_is_one() -> None:
    pointer = Load(base=RegisterValue(name="di"), offset=SI, is_user=False)
    for text in ("filename:ustring", "filename:string", "+u0(filename):string"):
        (fetch,) = resolved(f"p sys_openat {text}").fetches
        assert fetch.operand == Load(base=pointer, offset=0, is_user=True)


def test_at_its_return_they_are_what_the_registers_were() -> None:
    (fetch,) = resolved("r sys_openat dfd").fetches

    entry = EntryValue(base=RegisterValue(name="di"))
    assert fetch.operand == Load(base=entry, offset=DI, is_user=False)


@pytest.mark.parametrize(
    ("marked", "code", "hint"),
    [
        ("p sys_openat ^nosuch", "NO_BTFARG", "its arguments: dfd filename flags"),
        ("p sys_openat a=+0(^nosuch)", "NO_BTFARG", "its arguments: dfd filename flags"),
        ("p sys_openat a=^$arg7", "BAD_ARG_NUM", "arguments count from 1 to 6"),
        ("p sys_openat+4 ^$arg1", "NOFENTRY_ARGS", ""),
        ("p ^sys_nosuch", "BAD_PROBE_ADDR", ""),
    ],
)
def test_what_it_has_not_is_told(marked: str, code: str, hint: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        resolved(marked.replace("^", "", 1))

    assert (caught.value.code, caught.value.column) == (code, marked.index("^"))
    assert caught.value.hint.startswith(hint)


def test_this_machines_own_kernel_gets_it_in_its_words() -> None:
    event = to_kprobe_event(resolved("p sys_openat dfd"), (6, 1), X86_64)

    assert event.line("g", "e") == "p:g/e __x64_sys_openat dfd=+112(%di):s32"


def test_arm64_has_them_in_the_order_of_its_registers() -> None:
    definition = parse("p sys_getpid a=$arg3", registers=AARCH64.registers)
    (fetch,) = resolve(
        definition, KERNEL, AARCH64, event_id=1, locate=lambda each: each.addr
    ).fetches

    assert fetch.operand == Load(base=RegisterValue(name="x0"), offset=16, is_user=False)
