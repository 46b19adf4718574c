"""Injected calls on x86-64: how a task comes back through the kernel's own code."""

import pytest

from kprobes.arch.x86_64.inject import INJECT_OPS
from kprobes.errors import TargetError
from kprobes.model.kernel import Kernel
from tests.build.guest import make_memory
from tests.build.kernel import TEXT, make_kernel, symbol

FINISH, IRQS_OFF, UNCALLED = TEXT + 0x200, TEXT + 0x300, TEXT + 0x400


def kernel(*names: str) -> Kernel:
    known = {"orderly_reboot": UNCALLED, "restore_regs_and_return_to_kernel": FINISH}
    known |= dict.fromkeys(names, IRQS_OFF)
    return make_kernel([symbol(name, addr) for name, addr in known.items()])


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
