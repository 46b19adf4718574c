"""A guest's memory as if nothing of ours were in it."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kprobes.arch.x86_64.arch import X86_64
from kprobes.guest.allocations import Allocation, AllocationLog, Kind
from kprobes.guest.arm import TextPatcher
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.view import GuestView
from kprobes.model.plan import INSTANCE_VALUES, InstanceTable, Patch
from kprobes.units import Addr
from tests.build.guest import DATA, make_memory
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.guest.test_stacks_callers import CALLER, enter

STACK = Addr(DATA + 0x3000)
OURS = Addr(0xFFFF_FFFF_C000_0000)
F = InstanceTable(addr=Addr(DATA), count=5, stride=INSTANCE_VALUES, trampoline=Addr(OURS + 0x110))
PATCH = Patch(addr=Addr(TEXT + 0x10), old=b"\x0f\x1f\x44\x00\x00", new=b"\xe8\x01\x02\x03\x04")
KERNEL = make_kernel(
    [
        symbol("f", TEXT),
        symbol("g", TEXT + 0x100),
        symbol("__entry_text_start", TEXT + 0x800),
        symbol("__entry_text_end", TEXT + 0x900),
    ]
)


@dataclass
class Vcpu:
    """The stub of a guest with one vCPU, whose steps lead it along a list of places."""

    memory: GuestMemory
    registers_: dict[str, int] = field(default_factory=lambda: {"rip": TEXT, "rsp": STACK})
    steps: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def ids(self) -> tuple[int, ...]:
        return (1,)

    def registers(self, cpu: int) -> dict[str, int]:
        assert cpu == 1
        return dict(self.registers_)

    def step(self, cpu: int) -> None:
        assert cpu == 1
        self.registers_["rip"], self.registers_["rsp"] = self.steps.pop(0)

    def read(self, addr: int, size: int, *, cpu: int | None) -> bytes:
        assert cpu in (1, None)
        return self.memory.read(addr, size)

    def write(self, addr: int, data: bytes, *, cpu: int | None) -> None:
        assert cpu in (1, None)
        self.memory.write(addr, data)


def viewed(*patches: Patch, tables: tuple[InstanceTable, ...] = (F,)) -> tuple[GuestView, Vcpu]:
    memory = make_memory()
    vcpu = Vcpu(memory)
    for patch in patches:
        memory.write(patch.addr, patch.new)
    arch: Any = SimpleNamespace(
        code=SimpleNamespace(call=SimpleNamespace(link=None)), returns=X86_64.returns
    )
    guest = SimpleNamespace(stub=vcpu, memory=memory, kernel=KERNEL, arch=arch)
    allocations = AllocationLog()
    allocations.live = (Allocation(kind=Kind.CODE, addr=OURS, size=0x1000),)
    patcher = SimpleNamespace(patches=patches, linker=SimpleNamespace(instances=tables))
    view = GuestView(
        lambda: cast("Guest", guest), allocations, lambda: cast("TextPatcher", patcher)
    )
    return view, vcpu


def test_text_is_as_it_was_whatever_part_of_a_patch_is_read() -> None:
    view, vcpu = viewed(PATCH)
    plain = bytearray(vcpu.memory.read(TEXT, 0x40))
    plain[0x10:0x15] = PATCH.old
    for start in range(0x20):
        for size in (1, 3, 8, 0x18):
            shown = view.read(TEXT + start, size, cpu=1)
            assert shown == plain[start : start + size]
    assert view.is_ours(PATCH.addr - 1, 2)
    assert not view.is_ours(PATCH.addr - 1, 1)
    assert not view.is_ours(PATCH.addr + 5, 1)
    assert not view.is_inside_patch(PATCH.addr)
    assert view.is_inside_patch(PATCH.addr + 4)


def test_a_return_address_that_was_taken_over_is_the_callers() -> None:
    view, vcpu = viewed()
    enter(vcpu.memory, F, STACK, CALLER)
    vcpu.memory.set_u64(STACK, F.trampoline)

    assert view.read(STACK, 8, cpu=1) == CALLER.to_bytes(8, "little")
    # A part of a word says nothing.
    held = vcpu.memory.read(STACK - 3, 24)
    shown = view.read(STACK - 3, 24, cpu=1)
    assert (shown[:3], shown[3:11], shown[11:]) == (
        held[:3],
        CALLER.to_bytes(8, "little"),
        held[11:],
    )
    assert view.read(STACK + 1, 5, cpu=1) == vcpu.memory.read(STACK + 1, 5)


def test_where_the_address_was_saved_elsewhere_the_innermost_call_has_saved_it() -> None:
    view, vcpu = viewed()
    enter(vcpu.memory, F, Addr(STACK + 0x80), CALLER)
    enter(vcpu.memory, F, Addr(STACK + 0x40), CALLER + 8)
    for place in (STACK + 0x20, STACK + 0x60):
        vcpu.memory.set_u64(place, F.trampoline)
    # Above all of them nobody has saved it: left by a call that has returned.
    vcpu.memory.set_u64(STACK + 0x100, F.trampoline)

    shown = [int.from_bytes(view.read(STACK + at, 8, cpu=1), "little") for at in (0x20, 0x60)]
    assert shown == [CALLER + 8, CALLER]
    assert view.read(STACK + 0x100, 8, cpu=1) == F.trampoline.to_bytes(8, "little")


def test_what_was_shown_and_is_written_back_stays_what_it_is() -> None:
    view, vcpu = viewed()
    enter(vcpu.memory, F, STACK, CALLER)
    vcpu.memory.set_u64(STACK, F.trampoline)
    shown = view.read(STACK - 8, 24, cpu=1)

    view.write(STACK - 8, b"\x11" * 8 + shown[8:16] + b"\x22" * 8, cpu=1)

    assert vcpu.memory.u64(STACK) == F.trampoline
    assert vcpu.memory.u64(STACK - 8) == 0x1111_1111_1111_1111
    assert vcpu.memory.u64(STACK + 8) == 0x2222_2222_2222_2222
    view.write(STACK, b"\x33" * 8, cpu=1)
    assert vcpu.memory.u64(STACK) == 0x3333_3333_3333_3333


def test_a_vcpu_in_our_code_is_led_out_of_it() -> None:
    view, vcpu = viewed()
    vcpu.registers_["rip"] = OURS + 0x20
    vcpu.steps = [(OURS + 0x24, STACK), (TEXT + 0x210, STACK), (OURS + 0xFFF, STACK), (TEXT, STACK)]

    view.leave_own_code()

    # A function that our code calls is not ours.
    assert vcpu.registers_["rip"] == TEXT + 0x210
    assert len(vcpu.steps) == 2


@pytest.mark.parametrize(
    ("way", "end"),
    [
        # By a jump or a call.
        ([(OURS, STACK), (OURS + 9, STACK - 8), (TEXT + 0x15, STACK)], TEXT + 0x15),
        # By a breakpoint's exception, which has the stack as it was when it begins.
        (
            [(TEXT + 0x810, STACK), (TEXT + 0x200, STACK - 200), (OURS, STACK), (TEXT + 0x11, 0)],
            TEXT + 0x11,
        ),
        # The instruction returns, or calls.
        ([(OURS, STACK), (TEXT + 0x300, STACK + 8)], TEXT + 0x300),
        # Another vCPU's stop came instead of the step.
        ([(TEXT + 0x10, STACK), (OURS, STACK), (TEXT + 0x15, STACK)], TEXT + 0x15),
    ],
)
def test_a_step_from_a_patch_ends_behind_what_it_replaces(
    way: list[tuple[int, int]], end: int
) -> None:
    view, vcpu = viewed(PATCH)
    vcpu.registers_["rip"] = PATCH.addr
    vcpu.steps = [*way, (0, 0)]

    assert view.step(1)

    assert vcpu.registers_["rip"] == end
    assert vcpu.steps == [(0, 0)]


def test_a_step_from_elsewhere_is_the_debuggers_own() -> None:
    view, vcpu = viewed(PATCH)
    vcpu.registers_["rip"] = PATCH.addr + 5
    assert not view.step(1)
    assert vcpu.registers_["rip"] == PATCH.addr + 5
