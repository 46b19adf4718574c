"""``regs``: the kernel's names, what may be changed, and how it looks."""

from collections.abc import Callable

import pytest

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import UsageError
from kprobes.handlers.registers import Hit, Registers
from tests.build.handled import STACK, TASK, USER_DATA, make_handled, make_place
from tests.build.kernel import TEXT


@pytest.fixture
def regs() -> Registers:
    made, place = make_handled(), make_place()
    made.put(USER_DATA, b"mine\0")
    hit = Hit(
        live=made.live,
        vcpu=made.vcpu(di=0xFFFF_FFFF_FFFF_FFFF),
        module="",
        constants=X86_64.constants,
        arguments=lambda: place.arguments(made.live),
    )
    return Registers(hit, ip=TEXT + 1)


def test_registers_are_read_by_name_both_ways(regs: Registers) -> None:
    assert regs.ip == regs["ip"] == TEXT + 1
    assert (regs.di, regs.sp, regs.flags) == ((1 << 64) - 1, STACK, 0x10F)
    assert (regs.cs, regs.ss, regs.orig_ax) == (0x10, 0x18, 0)
    assert (regs.cpu, len(list(regs))) == (1, 21)
    assert {"r15", "orig_ax", "args"} <= set(dir(regs))


def test_a_changed_register_is_remembered_and_the_vcpu_is_not_yet_changed(regs: Registers) -> None:
    regs.ax = -1
    regs["r15"] = 5
    regs.bx = regs.bx

    assert (regs.ax, regs.r15) == ((1 << 64) - 1, 5)
    assert regs.changed_ == {"ax", "r15"}
    assert regs.hit_.vcpu.registers["r15"] != 5


def test_ip_counts_as_changed_when_it_was_set_to_what_it_was(regs: Registers) -> None:
    regs.ip = regs.ip

    assert regs.changed_ == {"ip"}


def _set_cs(regs: Registers) -> None:
    regs.cs = 0


def _set_unknown(regs: Registers) -> None:
    regs.rax = 0


def _set_wide(regs: Registers) -> None:
    regs.ax = 1 << 64


def _set_item(regs: Registers) -> None:
    regs["eax"] = 0


def _read_unknown(regs: Registers) -> int:
    return regs.rdi


def _read_item(regs: Registers) -> int:
    return regs["rdi"]


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (_set_cs, AttributeError),
        (_set_unknown, AttributeError),
        (_set_wide, OverflowError),
        (_set_item, KeyError),
        (_read_unknown, AttributeError),
        (_read_item, KeyError),
    ],
)
def test_what_cannot_be_is_an_error(
    regs: Registers, act: Callable[[Registers], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        act(regs)

    assert regs.changed_ == set()


def test_the_task_and_its_user_memory_are_there(regs: Registers) -> None:
    assert (regs.task.pid, int(regs.task)) == (77, TASK)
    assert regs.user.string(USER_DATA) == "mine"


def test_they_are_shown_as_the_kernel_does(regs: Registers) -> None:
    assert repr(regs).splitlines()[:3] == [
        "RIP: 0010:vfs_read+0x1/0x40",
        f"RSP: 0018:{STACK:016x} EFLAGS: 0000010f ORIG_RAX: 0000000000000000",
        "RAX: 000000000000010a RBX: 0000000000000105 RCX: 000000000000010b",
    ]
    assert repr(regs).splitlines()[-1].startswith("R13: 0000000000000102 R14: ")


def test_a_kernel_without_types_has_registers_and_says_what_is_missing() -> None:
    made, place = make_handled(is_typed=False), make_place()
    hit = Hit(
        live=made.live,
        vcpu=made.vcpu(),
        module="",
        constants=X86_64.constants,
        arguments=lambda: place.arguments(made.live),
    )
    regs = Registers(hit, ip=0)

    for missing in (lambda: regs.task, lambda: regs.args):
        with pytest.raises(UsageError, match="no type information"):
            missing()


@pytest.fixture
def arm64() -> Registers:
    made = make_handled(arch=AARCH64)
    hit = Hit(
        live=made.live,
        vcpu=made.vcpu(x30=TEXT + 8),
        module="",
        constants=AARCH64.constants,
        arguments=dict,
    )
    return Registers(hit, ip=TEXT + 4)


def test_every_architecture_has_the_kernels_names(arm64: Registers) -> None:
    assert (arm64.pc, arm64.sp, arm64.x0) == (TEXT + 4, STACK, 0x100)
    assert arm64.lr == arm64["lr"] == arm64.x30 == TEXT + 8
    assert list(arm64) == [*(f"x{n}" for n in range(31)), "pstate", "sp", "pc"]
    assert {"lr", "x30", "pc"} <= set(dir(arm64))
    with pytest.raises(AttributeError, match="no register ip"):
        _ = arm64.ip


def test_another_name_changes_the_same_register(arm64: Registers) -> None:
    arm64.lr = 5
    arm64.pc = arm64.pc

    assert (arm64.x30, arm64.changed_) == (5, {"x30", "pc"})
