"""Users of a range of code on arm64: a register has the task, return addresses are signed."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import pytest
from msgspec.structs import replace

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.errors import UnknownTypeError
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.stacks import check_types, is_anyone_inside
from kprobes.ports import Tables
from kprobes.transport.stub import Stub
from kprobes.units import U64, Addr
from tests.build.guest import CODE, DATA, make_memory
from tests.build.kernel import TEXT, make_kernel, symbol

SIZE = AARCH64.thread_size
SIGNED = 0xFF7F << 48
STACK_AT, TASKS, NODE, SIGNAL, HEAD, SAVED, QUEUED = 0, 16, 32, 48, 8, 96, 104
ENTRY = TEXT + 0x400
RUNNING, SLEEPING = DATA, DATA + 0x100
RUNNING_STACK, SLEEPING_STACK = DATA + 0x8000, DATA + 0x8000 + SIZE
SLEEPS_AT = SLEEPING_STACK + SIZE - 0x200
KERNEL_S, USER_S = 0x6040_0005, 0x6000_0000
MEMBERS = {
    "task_struct.stack": (STACK_AT, 8),
    "task_struct.tasks": (TASKS, 16),
    "task_struct.thread_node": (NODE, 16),
    "task_struct.signal": (SIGNAL, 8),
    "task_struct.on_rq": (QUEUED, 4),
    "task_struct.thread.cpu_context.sp": (SAVED, 8),
    "signal_struct.thread_head": (HEAD, 16),
}
SYMBOLS = [
    symbol("init_task", RUNNING),
    symbol("__entry_text_start", ENTRY),
    symbol("__entry_text_end", ENTRY + 0x100),
]
KERNEL = replace(make_kernel(SYMBOLS, types=MEMBERS), arch="aarch64")


@dataclass
class Vcpu:
    """One vCPU that stands in the kernel, on a task's stack."""

    held: dict[str, int] = field(
        default_factory=lambda: {
            "pc": TEXT,
            "sp": RUNNING_STACK + SIZE - 0x100,
            "x30": TEXT,
            "SP_EL0": RUNNING,
            "ELR_EL1": TEXT,
        }
    )

    def ids(self) -> tuple[int, ...]:
        return (1,)

    def registers(self, cpu: int) -> Mapping[str, int]:
        del cpu
        return {name: value for name, value in self.held.items() if name.islower() or name == "x30"}

    def register(self, cpu: int, name: str) -> int:
        del cpu
        return self.held[name]


def _signature(tables: Tables) -> int:
    del tables
    return SIGNED


def _guest() -> tuple[Guest, Vcpu, GuestMemory]:
    memory, vcpu = make_memory(), Vcpu()
    for task, other in ((RUNNING, SLEEPING), (SLEEPING, RUNNING)):
        signal = task + 64
        memory.set_u64(task + TASKS, other + TASKS)
        memory.set_u64(task + SIGNAL, signal)
        memory.set_u64(signal + HEAD, task + NODE)
        memory.set_u64(task + NODE, signal + HEAD)
    memory.set_u64(RUNNING + STACK_AT, RUNNING_STACK)
    memory.set_u64(SLEEPING + STACK_AT, SLEEPING_STACK)
    memory.set_u64(SLEEPING + SAVED, SLEEPS_AT)
    memory.set_u64(SLEEPING + QUEUED, 1)
    machine = AARCH64.machine
    paging = replace(machine.paging, signature=_signature)
    guest = Guest(
        address="fake",
        stub=cast("Stub", vcpu),
        memory=memory,
        kernel=KERNEL,
        arch=replace(AARCH64, machine=replace(machine, paging=paging)),
        task_size=1 << 48,
        tables=cast("Tables", memory.tables),
    )
    return guest, vcpu, memory


def _is_inside(guest: Guest) -> bool:
    return is_anyone_inside(guest, [(Addr(CODE), Addr(CODE + 0x1000))])


def signed(addr: int) -> int:
    """Return an address with some signature in its upper bits."""
    return addr & ~SIGNED | 0x5A3C << 48 & SIGNED


@pytest.mark.parametrize(
    ("held", "is_inside"),
    [
        ({}, False),
        ({"pc": CODE + 8}, True),
        ({"x30": CODE + 8}, True),
        ({"x30": signed(CODE + 8)}, True),
        ({"ELR_EL1": CODE + 8}, False),
        ({"ELR_EL1": CODE + 8, "pc": ENTRY}, True),
        ({"ELR_EL1": CODE + 8, "pc": ENTRY + 0x100}, False),
    ],
)
def test_registers_have_where_a_vcpu_is_and_will_be(
    held: dict[str, int], *, is_inside: bool
) -> None:
    guest, vcpu, _ = _guest()
    vcpu.held |= held

    assert _is_inside(guest) == is_inside


@pytest.mark.parametrize("word", [CODE + 8, signed(CODE + 8)])
def test_a_running_tasks_return_addresses_may_be_signed(word: int) -> None:
    guest, _, memory = _guest()

    memory.set_u64(RUNNING_STACK + SIZE - 0x80, word)

    assert _is_inside(guest)


@pytest.mark.parametrize(
    ("words", "is_inside"),
    [
        ((CODE + 8, KERNEL_S), True),
        ((CODE + 8, USER_S), False),
        ((CODE + 8, U64 & ~0xFF | 5), False),
        ((signed(CODE + 8), KERNEL_S), False),
    ],
)
def test_a_sleeping_task_is_inside_where_it_was_interrupted(
    words: tuple[int, int], *, is_inside: bool
) -> None:
    guest, _, memory = _guest()

    memory.write(SLEEPS_AT + 0x40, struct.pack("<QQ", *words))

    assert _is_inside(guest) == is_inside


def test_what_an_interrupt_has_left_in_a_hole_of_a_sleeping_task_s_frame_says_nothing() -> None:
    guest, _, memory = _guest()
    memory.set_u64(SLEEPING + QUEUED, 0)

    memory.write(SLEEPS_AT + 0x40, struct.pack("<QQ", CODE + 8, KERNEL_S))

    assert not _is_inside(guest)


def test_below_a_saved_stack_pointer_nothing_is_alive() -> None:
    guest, _, memory = _guest()

    memory.write(SLEEPS_AT - 0x40, struct.pack("<QQ", CODE + 8, KERNEL_S))

    assert not _is_inside(guest)


@pytest.mark.parametrize(
    "held",
    [
        {"pc": 0x40_0000, "SP_EL0": 0x7FFF_0000},
        {"pc": 0x40_0000, "SP_EL0": 0xFFFF_1234_0000_0000},
        {"pc": ENTRY, "SP_EL0": 0xFFFF_1234_0000_0000},
    ],
)
def test_what_the_user_has_in_the_register_is_no_task(held: dict[str, int]) -> None:
    guest, vcpu, _ = _guest()
    vcpu.held |= held

    assert not _is_inside(guest)


def test_types_must_say_where_a_sleeping_task_s_stack_pointer_is() -> None:
    check_types(KERNEL)
    few = {name: place for name, place in MEMBERS.items() if "cpu_context" not in name}

    with pytest.raises(UnknownTypeError):
        check_types(replace(make_kernel(SYMBOLS, types=few), arch="aarch64"))
