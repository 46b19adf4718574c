"""Injected calls on arm64: how a task comes back through the kernel's own code."""

import struct

import pytest
from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.aarch64.inject import INJECT_OPS
from kprobes.arch.aarch64.paging import PageTables
from kprobes.arch.aarch64.registers import NAMES, STUB_NAMES
from kprobes.arch.machine import CodeRequest, FunctionCall, ReturnPath
from kprobes.errors import TargetError
from kprobes.model.kernel import Kernel
from kprobes.units import MIB, Addr
from tests.build.a64 import code_of
from tests.build.a64_pages import PXN, UXN, Built
from tests.build.kernel import make_kernel, symbol

TEXT = 0xFFFF_8000_0801_0000
FINISH, UNCALLED, ALLOCATE = TEXT, TEXT + 0x100, TEXT + 0x200
DATA = TEXT + 0x10_0000
RETURN = "d5034fdf a9505bf5 d5184035 d5184016 a94007e0 a94e77fc f9407bfe 910543ff d503201f d69f03e0"
"""Some of ret_to_kernel of 6.1."""
TRAP = "d503233f d63f0020 d63f02c0 d65f03c0"
"""paciasp; blr x1; blr x22; ret"""
GUARDED = 1 << 50
RETURN_PATH = ReturnPath(trap=Addr(UNCALLED + 8), then=(Addr(FINISH),), register="x22", size=0x150)
REGISTERS = {STUB_NAMES[name]: 0x100 + n for n, name in enumerate(NAMES)} | {"sp": 0x9000}
KERNEL = replace(
    make_kernel(
        [
            symbol("ret_to_kernel", FINISH),
            symbol("iterate_supers_type", UNCALLED),
            symbol("__vmalloc_node_range", ALLOCATE),
            symbol("_stext", TEXT),
        ]
    ),
    text=(Addr(TEXT), Addr(TEXT + 16 * MIB)),
)


class Text(Struct, frozen=True, eq=False):
    """Memory of a guest whose text is one page."""

    tables: PageTables

    def read(self, addr: int, size: int) -> bytes:
        return self.tables.read(addr, size)


def guest(finish: str = RETURN, uncalled: str = TRAP, *, flags: int = 0) -> Text:
    built = Built(12, 48)
    built.map(TEXT, 0x8000, flags=flags)
    built.map(DATA, 0x9000, flags=PXN | UXN)
    built.ram.write(0x8000, code_of(finish))
    built.ram.write(0x8100, code_of(uncalled))
    return Text(tables=built.tables)


def test_a_call_through_a_register_that_functions_preserve_leads_to_the_kernels_return() -> None:
    assert INJECT_OPS.return_path(guest(), KERNEL) == RETURN_PATH


@pytest.mark.parametrize(
    ("finish", "uncalled", "flags", "kernel", "told"),
    [
        (RETURN, "d63f0020 d65f03c0", 0, KERNEL, "no place to return to"),
        (RETURN.removeprefix("d5034fdf "), TRAP, GUARDED, KERNEL, "not known"),
        (RETURN.replace("910543ff", "d503201f"), TRAP, 0, KERNEL, "not known"),
        (RETURN.replace("a9505bf5", "a9515bf5"), TRAP, 0, KERNEL, "not known"),
        (RETURN.replace("d69f03e0", "d65f03c0"), TRAP, 0, KERNEL, "not known"),
        (RETURN, TRAP, 0, make_kernel([]), "has no ret_to_kernel"),
    ],
)
def test_a_kernel_that_a_task_would_not_come_back_in_is_refused(
    finish: str, uncalled: str, flags: int, kernel: Kernel, told: str
) -> None:
    with pytest.raises(TargetError, match=told):
        INJECT_OPS.return_path(guest(finish, uncalled, flags=flags), kernel)


def test_where_text_is_guarded_a_call_returns_to_the_kernels_return_itself() -> None:
    path = INJECT_OPS.return_path(guest(flags=GUARDED), KERNEL)
    called = FunctionCall(function=Addr(ALLOCATE), args=(1,))

    setup = INJECT_OPS.set_up_call(path, 0x8000, called)

    assert path == ReturnPath(trap=Addr(FINISH), then=(Addr(FINISH),), size=0x150)
    assert setup.registers == {"x0": 1, "x30": FINISH, "pc": ALLOCATE, "sp": 0x8000}
    put = INJECT_OPS.at_trap(path, 0x8000, REGISTERS | {"cpsr": 0x6000_0BC5})
    assert put == {"pc": FINISH, "sp": 0x8000, "cpsr": 0x6000_03C5}


def test_who_else_returns_from_an_interrupt_has_them_masked_and_goes_on() -> None:
    text = guest(flags=GUARDED)
    registers = {"pc": FINISH, "cpsr": 0x6000_0005, "sp": 0x9000}

    after = INJECT_OPS.skip_trap(text.read, registers)

    assert after == {"pc": FINISH + 4, "cpsr": 0x6000_03C5}


def test_what_the_task_was_doing_ends_at_its_stack_pointer() -> None:
    frame, data = INJECT_OPS.save_frame(RETURN_PATH, REGISTERS)

    assert frame + len(data) == REGISTERS["sp"]
    assert len(data) == 2 * RETURN_PATH.size
    own = struct.unpack_from(f"<{len(NAMES)}Q", data, RETURN_PATH.size)
    assert own == tuple(REGISTERS[STUB_NAMES[name]] for name in NAMES)
    again = dict(zip(NAMES, struct.unpack_from(f"<{len(NAMES)}Q", data), strict=True))
    assert again["pc"] == FINISH
    assert again["pstate"] == REGISTERS["cpsr"] | 0x3C0


def test_who_was_stopped_where_a_register_had_led_lands_nowhere_by_it() -> None:
    registers = REGISTERS | {"cpsr": 0x6000_0805}

    _, data = INJECT_OPS.save_frame(RETURN_PATH, registers)

    again, own = (
        dict(zip(NAMES, struct.unpack_from(f"<{len(NAMES)}Q", data, at), strict=True))
        for at in (0, RETURN_PATH.size)
    )
    assert (again["pstate"], own["pstate"]) == (0x6000_03C5, 0x6000_0805)


def test_arguments_beyond_the_eighth_are_on_the_stack() -> None:
    called = FunctionCall(function=Addr(ALLOCATE), args=(*range(8), -1))

    setup = INJECT_OPS.set_up_call(RETURN_PATH, 0x8000, called)

    assert [setup.registers[f"x{n}"] for n in range(8)] == list(range(8))
    assert setup.words == ((1 << 64) - 1,)
    assert setup.registers["pc"] == ALLOCATE
    assert setup.registers["sp"] == 0x8000
    assert (setup.registers["x30"], setup.registers["x22"]) == (RETURN_PATH.trap, FINISH)


def test_who_stands_at_the_return_trap_goes_where_its_register_leads() -> None:
    registers = REGISTERS | {"pc": RETURN_PATH.trap, "x22": 0x1234}

    then = INJECT_OPS.skip_trap(guest().read, registers)

    assert then == {"pc": 0x1234, "x30": RETURN_PATH.trap + 4}
    assert INJECT_OPS.returned_frame(registers) == REGISTERS["sp"]


def test_a_task_is_put_where_one_stands_whose_call_came_back() -> None:
    put = INJECT_OPS.at_trap(RETURN_PATH, 0x8000, REGISTERS)

    registers = {**REGISTERS, **put}
    assert registers["pc"] == RETURN_PATH.trap
    assert INJECT_OPS.returned_frame(registers) == 0x8000
    assert INJECT_OPS.skip_trap(guest().read, registers)["pc"] == FINISH


def test_code_is_asked_for_below_the_text_with_the_protection_of_data() -> None:
    request = CodeRequest(size=MIB, like=Addr(DATA + 0x20), caller=RETURN_PATH.trap)

    called = INJECT_OPS.code(guest(), KERNEL, request)

    size, _, start, stop, _, protection, flags, _, caller = called.args
    assert called.function == ALLOCATE
    assert (size, flags, caller) == (MIB, 0, RETURN_PATH.trap)
    assert TEXT - 128 * MIB < start < stop <= TEXT
    assert protection == PXN | UXN | 0b11


def test_code_is_asked_for_where_branches_reach_it_from_what_only_boot_uses() -> None:
    request = CodeRequest(size=MIB, like=Addr(DATA), caller=RETURN_PATH.trap)
    last = Addr(TEXT + 40 * MIB)
    booting = replace(KERNEL, init_text=(Addr(TEXT + 39 * MIB), last))

    start, stop = INJECT_OPS.code(guest(), booting, request).args[2:4]

    assert last - 128 * MIB <= start < stop <= TEXT


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (("module_alloc",), FunctionCall(function=Addr(ALLOCATE), args=(MIB,))),
        (
            ("module_alloc", "execmem_alloc"),
            FunctionCall(function=Addr(ALLOCATE + 16), args=(0, MIB)),
        ),
        ((), None),
    ],
)
def test_code_for_modules_is_asked_for_where_modules_are(
    names: tuple[str, ...], called: FunctionCall | None
) -> None:
    kernel = make_kernel([symbol(name, ALLOCATE + 16 * n) for n, name in enumerate(names)])

    assert INJECT_OPS.module_code is not None
    assert INJECT_OPS.module_code(kernel, MIB) == called


@pytest.mark.parametrize(("shift", "va_bits"), [(12, 48), (12, 52), (14, 47), (16, 48)])
def test_pages_of_code_are_as_large_as_the_kernels(shift: int, va_bits: int) -> None:
    """set_memory_ro() and its like count them."""
    assert INJECT_OPS.page_size(Text(tables=Built(shift, va_bits).tables)) == 1 << shift
