"""Injected calls on x86-64: how a task comes back through the kernel's own code."""

import pytest

from kprobes.arch.machine import CodeRequest, FunctionCall, ReturnPath
from kprobes.arch.x86_64.inject import INJECT_OPS
from kprobes.arch.x86_64.registers import NAMES, STUB_NAMES
from kprobes.errors import TargetError
from kprobes.model.kernel import Kernel
from kprobes.units import MIB, Addr
from tests.build.guest import DATA, make_memory
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.pages import PRESENT, WRITE

FINISH, IRQS_OFF, UNCALLED = TEXT + 0x200, TEXT + 0x300, TEXT + 0x400
ALLOCATE = TEXT + 0x480
POPS = "5b 5d 415c 415d c3"
"""``pop`` of rbx, rbp, r12 and r13, and a return."""


def kernel(*names: str) -> Kernel:
    known = {"orderly_reboot": UNCALLED, "restore_regs_and_return_to_kernel": FINISH}
    known |= {"module_alloc": ALLOCATE} | dict.fromkeys(names, IRQS_OFF)
    return make_kernel([symbol(name, addr) for name, addr in known.items()])


def without_modules(**further: int) -> Kernel:
    known = {
        "__do_sys_reboot": UNCALLED,
        "restore_regs_and_return_to_kernel": FINISH,
        "native_irq_disable": IRQS_OFF,
        "__vmalloc_node_range": ALLOCATE,
    }
    return make_kernel([symbol(name, addr) for name, addr in (known | further).items()])


def test_the_return_trap_is_a_return_in_a_function_that_nobody_calls() -> None:
    memory = make_memory()
    memory.write(UNCALLED, b"\x90\x90\xc3")
    memory.write(IRQS_OFF, b"\xfa\xc3")

    assert INJECT_OPS.return_path(memory, kernel()).trap == UNCALLED + 2


@pytest.mark.parametrize("name", ["pv_native_irq_disable", "native_irq_disable"])
@pytest.mark.parametrize(
    ("code", "offset"),
    [("fac3", 0), ("fae912345678", 0), ("f30f1efafac3", 4), ("f30f1efafae912345678", 4)],
)
def test_interrupts_are_off_before_registers_come_back(name: str, code: str, offset: int) -> None:
    memory = make_memory()
    memory.write(UNCALLED, b"\xc3")
    memory.write(IRQS_OFF, bytes.fromhex(code))

    assert INJECT_OPS.return_path(memory, kernel(name)).then == (IRQS_OFF + offset, FINISH)


@pytest.mark.parametrize("before", ["e8000000", "e9", "eb11", "0f1f4400", "6690", "90"])
def test_bytes_that_the_kernel_may_patch_switch_nothing_off(before: str) -> None:
    memory = make_memory()
    patched, good = TEXT + 0x500, TEXT + 0x600
    code = bytes.fromhex(before)
    memory.write(TEXT, b"\xcc" * 0x700)
    memory.write(patched - len(code), code + b"\xfa\xc3")
    memory.write(good, b"\xfa\xc3")

    memory.write(UNCALLED, b"\xc3")

    assert INJECT_OPS.return_path(memory, kernel()).then == (good, FINISH)


def test_a_kernel_that_never_switches_interrupts_off_is_refused() -> None:
    memory = make_memory()
    memory.write(UNCALLED, b"\xc3")

    with pytest.raises(TargetError, match="interrupts off"):
        INJECT_OPS.return_path(memory, kernel())


def test_without_an_allocator_of_modules_the_trap_makes_room_for_three_arguments() -> None:
    memory = make_memory()
    memory.write(UNCALLED, bytes.fromhex(f"c3 90 5bc3 {POPS}"))
    memory.write(IRQS_OFF, b"\xfa\xc3")

    found = INJECT_OPS.return_path(memory, without_modules())

    assert (found.trap, found.then, found.spare) == (UNCALLED + 5, (IRQS_OFF, FINISH), 3)
    assert memory.read(found.trap, 6) == bytes.fromhex("5d 415c 415d c3")


@pytest.mark.parametrize("code", ["5b5dc3", "585959c3", "5b5d415c415d90c3"])
def test_a_kernel_without_such_an_end_of_a_function_is_refused(code: str) -> None:
    memory = make_memory()
    memory.write(UNCALLED, b"\x90" * 64)
    memory.write(UNCALLED, bytes.fromhex(code))
    memory.write(IRQS_OFF, b"\xfa\xc3")

    with pytest.raises(TargetError, match="no place to return to"):
        INJECT_OPS.return_path(memory, without_modules())


PATH = ReturnPath(trap=Addr(UNCALLED), then=(Addr(IRQS_OFF), Addr(FINISH)), spare=3)


def test_arguments_beyond_the_sixth_are_where_the_trap_takes_them_off() -> None:
    registers = {STUB_NAMES[name]: 0 for name in NAMES if name in STUB_NAMES} | {"rsp": 0x9000}
    called = FunctionCall(function=Addr(ALLOCATE), args=(*range(6), 7, -1, 9))

    frame, data = INJECT_OPS.save_frame(PATH, registers)
    setup = INJECT_OPS.set_up_call(PATH, frame, called)

    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, 48, 8)]
    assert words == [UNCALLED, 0, 0, 0, IRQS_OFF, FINISH]
    assert setup.words == (UNCALLED, 7, (1 << 64) - 1, 9)
    assert setup.registers["rsp"] == frame
    assert frame % 16 == 8
    assert INJECT_OPS.at_trap(PATH, frame, registers)["rsp"] == frame + 8
    with pytest.raises(ValueError, match="no room for 10 arguments"):
        INJECT_OPS.set_up_call(PATH, frame, FunctionCall(function=Addr(0), args=tuple(range(10))))


@pytest.mark.parametrize(
    ("code", "after"),
    [
        ("c3", {"rip": 0x1234, "rsp": 0x108}),
        ("cc", {"rip": 0x1234, "rsp": 0x108}),
        ("5d", {"rip": UNCALLED + 1, "rsp": 0x108, "rbp": 0x1234}),
        ("415c", {"rip": UNCALLED + 2, "rsp": 0x108, "r12": 0x1234}),
    ],
)
def test_who_stands_at_the_trap_and_is_not_ours_does_its_first_instruction(
    code: str, after: dict[str, int]
) -> None:
    def read(addr: int, size: int) -> bytes:
        at = bytes.fromhex(code) if addr == UNCALLED else (0x1234).to_bytes(8, "little")
        return at.ljust(size, b"\0")[:size]

    assert INJECT_OPS.skip_trap(read, {"rip": UNCALLED, "rsp": 0x100}) == after


def test_code_is_asked_for_where_modules_would_be_with_the_protection_of_data() -> None:
    memory = make_memory()
    request = CodeRequest(size=MIB, like=Addr(DATA), caller=PATH.trap)

    called = INJECT_OPS.code(memory, without_modules(), request)

    size, _, start, stop, _, protection, flags, _, caller = called.args
    assert called.function == ALLOCATE
    assert (size, flags, caller) == (MIB, 0, UNCALLED)
    assert TEXT < start < stop < TEXT + (2 << 30)
    assert protection == PRESENT | WRITE
    without = make_kernel([symbol("vfs_read", TEXT)])
    with pytest.raises(TargetError, match="no module_alloc, nor __vmalloc_node_range"):
        INJECT_OPS.code(memory, without, request)


PER_CPU = 0xFFFF_8880_0000_0000
TIMER, OFFSETS, LAPIC = TEXT + 0x500, TEXT + 0x600, 0x1A000


@pytest.mark.parametrize(
    ("handler", "names", "is_known"),
    [
        (TIMER, {"__per_cpu_offset": OFFSETS, "lapic_events": LAPIC}, True),
        (TIMER + 64, {"__per_cpu_offset": OFFSETS, "lapic_events": LAPIC}, False),
        (0, {"__per_cpu_offset": OFFSETS, "lapic_events": LAPIC}, False),
        (TIMER, {"lapic_events": LAPIC}, False),
        (TIMER, {"__per_cpu_offset": OFFSETS}, False),
    ],
)
def test_a_timer_interrupt_is_raised_where_the_apics_timer_is_in_use(
    handler: int, names: dict[str, int], is_known: bool
) -> None:
    words = {OFFSETS: PER_CPU, PER_CPU + LAPIC: handler}

    class Words:
        tables = make_memory().tables

        def read(self, addr: int, size: int) -> bytes:
            return words[addr].to_bytes(size, "little")

    message = INJECT_OPS.timer_message(Words(), without_modules(**names), [TIMER])

    assert message == ((0xFEE0_0000, b"\xec\0\0\0") if is_known else None)
