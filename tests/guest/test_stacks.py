"""Users of a range of code: vCPUs, and every stack that may lead back there."""

import struct
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import RESTORED, GuestReplacedError, TargetError
from kprobes.guest.allocate import Allocator
from kprobes.guest.allocations import Allocation, AllocationLog, Call, Kind
from kprobes.guest.arena import ArenaSize, CodeMemory
from kprobes.guest.arm import TextPatcher
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.journal import Journal
from kprobes.guest.release import await_exit
from kprobes.guest.room import Retired
from kprobes.guest.stacks import (
    are_inside,
    awaited,
    free_dead_calls,
    home,
    is_anyone_inside,
    returned_to,
)
from kprobes.model.kernel import Kernel
from kprobes.model.plan import INSTANCE_VALUES, InstanceTable
from kprobes.ports import Tables
from kprobes.transport.stub import Stub
from kprobes.units import Addr
from tests.build.guest import CODE, CPUS, DATA, PERCPU, make_arena, make_memory
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.machine import ABI

SIZE = X86_64.thread_size
STACK_AT, TASKS, NODE, SIGNAL, HEAD, SAVED, QUEUED = 0, 16, 32, 48, 8, 96, 104
CURRENT = 0x200
TRAP = TEXT + 0x200
INIT, IDLE = DATA, DATA + 0x100
"""The tasks of CPU 0's idle loop, which heads the list, and of CPU 1's, which is in no list."""
STACKS = DATA + 0x8000
CPU_STACKS = DATA + 0x2_0000
MEMBERS = {
    "task_struct.stack": (STACK_AT, 8),
    "task_struct.tasks": (TASKS, 16),
    "task_struct.thread_node": (NODE, 16),
    "task_struct.signal": (SIGNAL, 8),
    "task_struct.on_rq": (QUEUED, 4),
    "task_struct.pid": (0, 4),
    "task_struct.tgid": (0, 4),
    "task_struct.self_exec_id": (0, 8),
    "task_struct.comm": (0, 16),
    "task_struct.thread_info.flags": (0, 8),
    "task_struct.thread.sp": (SAVED, 8),
    "signal_struct.thread_head": (HEAD, 16),
}
SYMBOLS = [
    symbol("init_task", INIT),
    symbol("current_task", CURRENT),
    symbol("__preempt_count", CURRENT + 8),
    symbol("nr_cpu_ids", TEXT + 0x100),
    symbol("__per_cpu_offset", TEXT + 0x108),
    symbol("asm_exc_int3", TRAP),
]
KERNEL = make_kernel(SYMBOLS, types=MEMBERS)
BYTE = make_kernel(SYMBOLS, types=MEMBERS | {"task_struct.on_rq": (QUEUED, 1)})
"""As in 7.2: other bytes come after it."""
UNKNOWN = replace(
    make_kernel(SYMBOLS),
    members={path: at for path, (at, _) in MEMBERS.items() if path != "task_struct.on_rq"},
)
"""Without types, and without the place of that."""


@dataclass
class Vcpus:
    """vCPUs that stand somewhere in the kernel."""

    all: dict[int, dict[str, int]] = field(
        default_factory=lambda: {
            cpu + 1: {"rip": TEXT, "rsp": CPU_STACKS + SIZE * (cpu + 1) - 64} for cpu in range(CPUS)
        }
    )

    def ids(self) -> tuple[int, ...]:
        return tuple(self.all)

    def registers(self, cpu: int) -> Mapping[str, int]:
        return self.all[cpu]

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()


def _stack(n: int) -> int:
    return STACKS + SIZE * n


def _guest() -> tuple[Guest, Vcpus, GuestMemory]:
    """Three tasks in a list, the second of two threads; and an idle task in none."""
    memory, vcpus = make_memory(), Vcpus()
    leaders = [INIT, DATA + 0x1000, DATA + 0x1100]
    thread = DATA + 0x1200
    for task in (*leaders, thread, IDLE):
        memory.set_u64(task + QUEUED, 1)
    for n, task in enumerate(leaders):
        after = leaders[(n + 1) % len(leaders)] + TASKS
        signal, threads = task + 64, [task] if n != 1 else [task, thread]
        memory.set_u64(task + STACK_AT, _stack(n))
        memory.set_u64(task + TASKS, after)
        memory.set_u64(task + SIGNAL, signal)
        chain = [signal + HEAD, *(one + NODE for one in threads), signal + HEAD]
        for here, there in pairwise(chain):
            memory.set_u64(here, there)
    memory.set_u64(thread + STACK_AT, _stack(3))
    memory.set_u64(IDLE + STACK_AT, _stack(4))
    memory.write(TEXT + 0x100, struct.pack("<IIQQ", CPUS, 0, *PERCPU))
    for base, task in zip(PERCPU, (INIT, IDLE), strict=True):
        memory.set_u64(base + CURRENT, task)
    guest = Guest(
        address="fake",
        stub=cast("Stub", vcpus),
        memory=memory,
        kernel=KERNEL,
        arch=X86_64,
        task_size=ABI.task_size,
        tables=cast("Tables", memory.tables),
    )
    return guest, vcpus, memory


def _is_inside(guest: Guest) -> bool:
    return is_anyone_inside(guest, [(Addr(CODE), Addr(CODE + 0x1000))])


RANGES = [(CODE + 0x800, CODE + 0x805), (CODE + 0x10, CODE + 0x13), (CODE + 0x13, CODE + 0x20)]
"""In no order, and two of them side by side."""


def test_of_several_ranges_those_are_told_that_somebody_is_in() -> None:
    guest, vcpus, _ = _guest()
    vcpus.all[1]["rip"], vcpus.all[2]["rip"] = CODE + 0x12, CODE + 0x804
    ranges = [(Addr(start), Addr(stop)) for start, stop in RANGES]

    assert are_inside(guest, ranges).tolist() == [True, True, False]
    assert are_inside(guest, []).tolist() == []


@pytest.mark.parametrize("at", [0x10, 0x12, 0x13, 0x1F, 0x800, 0x804])
def test_each_of_several_ranges_is_looked_at(at: int) -> None:
    guest, vcpus, _ = _guest()
    vcpus.all[1]["rip"] = CODE + at

    assert is_anyone_inside(guest, [(Addr(start), Addr(stop)) for start, stop in RANGES])


@pytest.mark.parametrize("at", [-1, 0, 0xF, 0x20, 0x7FF, 0x805, 0x1000])
def test_between_several_ranges_nobody_is_inside(at: int) -> None:
    guest, vcpus, memory = _guest()
    vcpus.all[1]["rip"] = CODE + at
    memory.set_u64(CPU_STACKS + SIZE - 32, CODE + at)

    assert not is_anyone_inside(guest, [(Addr(start), Addr(stop)) for start, stop in RANGES])


@pytest.mark.parametrize("at", [0x12, 0x804])
def test_a_task_that_was_interrupted_in_one_of_several_ranges_is_inside(at: int) -> None:
    guest, _, memory = _guest()
    memory.set_u64(_stack(2) + 8, CODE + at)
    memory.set_u64(_stack(2) + 16, X86_64.constants["cs"])

    assert is_anyone_inside(guest, [(Addr(start), Addr(stop)) for start, stop in RANGES])


def test_in_a_guest_that_is_elsewhere_nobody_is_inside() -> None:
    guest, _, memory = _guest()
    for addr in (CODE - 1, CODE + 0x1000, 0, (1 << 64) - 1):
        memory.set_u64(_stack(1) + 64, addr)

        assert not _is_inside(guest)


@pytest.mark.parametrize("cpu", [1, 2])
def test_a_vcpu_that_runs_there_is_inside(cpu: int) -> None:
    guest, vcpus, _ = _guest()
    vcpus.all[cpu]["rip"] = CODE + 0xFFF

    assert _is_inside(guest)


@pytest.mark.parametrize("cpu", [0, 1])
def test_a_vcpu_that_will_return_there_is_inside(cpu: int) -> None:
    guest, _, memory = _guest()
    memory.set_u64(CPU_STACKS + SIZE * (cpu + 1) - 32, CODE + 5)

    assert _is_inside(guest)


@pytest.mark.parametrize("n", [0, 4])
@pytest.mark.parametrize("at", [0, 8, SIZE - 8])
def test_a_running_task_that_will_return_there_is_inside(n: int, at: int) -> None:
    guest, _, memory = _guest()
    memory.set_u64(_stack(n) + at, CODE)

    assert _is_inside(guest)


@pytest.mark.parametrize("n", range(5))
@pytest.mark.parametrize("at", [0, 8, SIZE - 16])
@pytest.mark.parametrize("segment", [0x10, 0x0007_0000_0000_0010])
def test_a_task_that_was_interrupted_there_is_inside(n: int, at: int, segment: int) -> None:
    guest, _, memory = _guest()
    memory.set_u64(_stack(n) + at, CODE)
    memory.set_u64(_stack(n) + at + 8, segment)

    assert _is_inside(guest)


@pytest.mark.parametrize(
    ("queued", "is_inside"), [(0, False), (1, True), (2, True), (5 << 32, False)]
)
def test_what_an_interrupt_has_left_on_the_stack_of_a_task_that_sleeps_says_nothing(
    queued: int, *, is_inside: bool
) -> None:
    guest, _, memory = _guest()
    memory.set_u64(DATA + 0x1000 + QUEUED, queued)
    memory.set_u64(_stack(1) + 8, CODE)
    memory.set_u64(_stack(1) + 16, 0x10)

    assert _is_inside(guest) == is_inside


@pytest.mark.parametrize(
    ("kernel", "queued", "is_inside"),
    [(BYTE, 0x100, False), (BYTE, 0x101, True), (UNKNOWN, 0, True)],
)
def test_who_is_queued_is_told_by_a_byte_and_may_be_anybody_where_that_is_not_known(
    kernel: Kernel, queued: int, *, is_inside: bool
) -> None:
    guest, _, memory = _guest()
    memory.set_u64(DATA + 0x1000 + QUEUED, queued)
    memory.set_u64(_stack(1) + 8, CODE)
    memory.set_u64(_stack(1) + 16, 0x10)

    assert _is_inside(replace(guest, kernel=kernel)) == is_inside


IRQ_STACKS, NMI_STACK = DATA + 0x4_0000, DATA + 0x5_0000
WITH_IRQ_STACKS = make_kernel([*SYMBOLS, symbol("hardirq_stack_ptr", CURRENT + 16)], types=MEMBERS)


@pytest.mark.parametrize(
    ("sp", "at", "is_inside"),
    [
        # In an NMI that came in an interrupt: where that returns to is on its stack.
        (NMI_STACK + 64, 0x3F00, True),
        (NMI_STACK + 64, 0x10, True),
        # In the interrupt itself what is below is dead.
        (IRQ_STACKS + SIZE + 0x3F80, 0x3F00, False),
        (IRQ_STACKS + SIZE + 0x3E80, 0x3F00, True),
    ],
)
def test_what_an_nmi_has_interrupted_is_seen(sp: int, at: int, *, is_inside: bool) -> None:
    guest, vcpus, memory = _guest()
    for cpu, base in enumerate(PERCPU):
        memory.set_u64(base + CURRENT + 16, IRQ_STACKS + SIZE * (cpu + 1) - 8)
    vcpus.all[1]["rsp"], vcpus.all[2]["rsp"] = _stack(0) + SIZE - 64, sp
    memory.set_u64(IRQ_STACKS + SIZE + at, CODE + 5)

    assert _is_inside(replace(guest, kernel=WITH_IRQ_STACKS)) == is_inside


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 8, SIZE - 8])
def test_what_a_call_has_left_on_the_stack_of_a_task_that_sleeps_says_nothing(
    n: int, at: int
) -> None:
    guest, _, memory = _guest()
    memory.set_u64(_stack(n) + at, CODE)

    assert not _is_inside(guest)


def test_a_task_that_has_given_its_stack_back_is_passed_over() -> None:
    guest, _, memory = _guest()
    memory.set_u64(DATA + 0x1000 + STACK_AT, 0)

    assert not _is_inside(guest)


def test_a_vcpu_in_user_mode_is_passed_over() -> None:
    guest, vcpus, _ = _guest()
    vcpus.all[1] = {"rip": 0x40_0000, "rsp": 0x7FFF_0000_1000}

    assert not _is_inside(guest)


@pytest.mark.parametrize("stack", [8, (1 << 47) - 8, (1 << 64) - 2048, (1 << 64) - 4096])
def test_a_stack_at_the_edge_of_what_addresses_can_be_is_passed_over(stack: int) -> None:
    guest, _, memory = _guest()
    memory.set_u64(DATA + 0x1000 + STACK_AT, stack)

    assert not _is_inside(guest)


def test_a_cpu_that_never_ran_is_passed_over() -> None:
    guest, _, memory = _guest()
    memory.set_u64(PERCPU[1] + CURRENT, 0)

    assert not _is_inside(guest)


def test_part_of_a_stack_that_is_not_mapped_hides_nothing_of_the_rest() -> None:
    guest, vcpus, memory = _guest()
    # Exception stacks lie between guard pages.
    edge = PERCPU[0] + 0x1000
    vcpus.all[1] = {"rip": TEXT, "rsp": edge - 64}
    memory.set_u64(edge - 32, CODE + 5)

    assert _is_inside(guest)


@pytest.mark.parametrize("is_of_threads", [False, True])
def test_a_task_list_without_end_is_told(is_of_threads: bool) -> None:
    guest, _, memory = _guest()
    task = DATA + 0x1000
    link = task + (NODE if is_of_threads else TASKS)
    memory.set_u64(link, link)

    with pytest.raises(TargetError, match="no end"):
        _is_inside(guest)


@pytest.mark.parametrize(("at", "is_inside"), [(-8, False), (0, True), (8, True)])
def test_what_a_sleeping_task_has_returned_from_is_dead(at: int, *, is_inside: bool) -> None:
    guest, _, memory = _guest()
    pointer = _stack(1) + 0x2000
    memory.set_u64(DATA + 0x1000 + SAVED, pointer)
    memory.set_u64(pointer + at, CODE + 5)
    memory.set_u64(pointer + at + 8, 0x10)

    assert _is_inside(guest) == is_inside


@pytest.mark.parametrize(("at", "is_inside"), [(-8, False), (0, True), (8, True)])
def test_of_the_stack_that_a_vcpu_stands_on_only_what_is_above_is_alive(
    at: int, *, is_inside: bool
) -> None:
    guest, vcpus, memory = _guest()
    pointer = _stack(0) + 0x2000
    vcpus.all[1] = {"rip": TEXT, "rsp": pointer}
    memory.set_u64(pointer + at, CODE + 5)

    assert _is_inside(guest) == is_inside


def test_what_a_task_saved_long_ago_says_nothing_when_an_interrupt_has_left_its_stack() -> None:
    guest, _, memory = _guest()
    memory.set_u64(INIT + SAVED, _stack(0) + 0x2000)
    memory.set_u64(_stack(0) + 0x1000, CODE + 5)

    assert _is_inside(guest)


@pytest.mark.parametrize(("at", "is_inside"), [(-8, True), (0, False), (8, False)])
def test_what_lies_after_the_stack_of_a_running_task_is_none_of_it(
    at: int, *, is_inside: bool
) -> None:
    guest, vcpus, memory = _guest()
    vcpus.all[2] = {"rip": TEXT, "rsp": _stack(4) + 0x2000}
    memory.set_u64(_stack(5) + at, CODE + 5)

    assert _is_inside(guest) == is_inside


class Wanderer(Vcpus):
    """One of two vCPUs goes on from place to place whenever the guest runs."""

    def __init__(self, return_method: Sequence[int]) -> None:
        super().__init__()
        self.return_method = list(return_method)

    @contextmanager
    def paused(self) -> Generator[None]:
        self.all[1]["rip"] = self.return_method.pop(0)
        yield


@pytest.mark.parametrize(
    "return_method",
    [
        [TRAP, CODE + 8, TEXT],
        [TRAP + 4, TRAP + 8, CODE + 8, CODE + 12, TEXT],
        [CODE + 8, TRAP, CODE, TEXT],
        [TEXT],
    ],
)
def test_who_goes_from_a_breakpoint_s_exception_into_the_code_is_waited_for(
    return_method: list[int],
) -> None:
    guest, _, _ = _guest()
    stub = Wanderer(return_method)
    allocations = AllocationLog()
    # In the order of arming: the code is there before the callback.
    for kind, addr, size in ((Kind.CODE, CODE, 0x1000), (Kind.NOTIFIER, DATA, 0)):
        allocations.begin(
            Call(frame=1, trap=2, allocates=Allocation(kind=kind, addr=addr, size=size))
        )
        allocations.end(0)

    await_exit(replace(guest, stub=cast("Stub", stub)), allocations, otherwise="")

    assert stub.return_method == []


INSTANCES = InstanceTable(
    addr=Addr(DATA + 0x4_0000), count=3, stride=INSTANCE_VALUES, trampoline=Addr(CODE)
)
LIVE, DEAD = CPU_STACKS + SIZE - 32, DATA + 0x3_8000


def _slots(memory: GuestMemory) -> list[int]:
    return [memory.u64(Addr(INSTANCES.addr + INSTANCES.stride * n)) for n in range(INSTANCES.count)]


@pytest.mark.parametrize(("rip", "left"), [(TEXT, [LIVE, 0, 0]), (CODE, [LIVE, 0, DEAD])])
def test_instances_of_dead_calls_are_freed_unless_somebody_is_in_our_code(
    rip: int, left: list[int]
) -> None:
    guest, vcpus, memory = _guest()
    vcpus.all[1]["rip"] = rip
    for n, slot in enumerate([LIVE, 0, DEAD]):
        memory.set_u64(Addr(INSTANCES.addr + INSTANCES.stride * n), slot)

    freed = free_dead_calls(guest, [INSTANCES], [(Addr(CODE), Addr(CODE + 0x1000))], _is_ours)

    assert freed == left.count(0) - 1
    assert _slots(memory) == left


def _is_ours() -> None:
    pass


def _is_another() -> None:
    raise GuestReplacedError(RESTORED)


def test_nothing_is_freed_in_another_state_of_the_guest() -> None:
    guest, _, memory = _guest()
    memory.set_u64(INSTANCES.addr, DEAD)

    with pytest.raises(GuestReplacedError):
        free_dead_calls(guest, [INSTANCES], [], _is_another)

    assert _slots(memory)[0] == DEAD


@pytest.mark.parametrize("is_another", [False, True])
def test_code_is_let_go_of_in_the_state_in_which_nobody_was_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_another: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    guest, _, memory = _guest()
    arena, journal = make_arena(), Journal.create("fake")
    patcher = TextPatcher(guest, arena, ABI, journal)
    pool = patcher.linker.pool
    pool.grow(replace(arena, code=CodeMemory(addr=Addr(arena.code.stop), size=0x100)))
    place, _ = pool.take_code(pool.areas[1], 0x100, lambda _: bytes(0x100))
    gone = Retired(text=(place, Addr(place + 0x100)), instances=INSTANCES)
    pool.retired = [gone]
    memory.set_u64(INSTANCES.addr, LIVE)
    if is_another:
        journal.watch(_is_another)

    with pytest.raises(GuestReplacedError) if is_another else nullcontext():
        Allocator(journal, ArenaSize(), None, pytest.fail).tidy(guest, patcher)

    assert (pool.retired, _slots(memory)[0]) == (([gone], LIVE) if is_another else ([], 0))


TRAMPOLINE = CODE + 0x110
TAKEN = InstanceTable(
    addr=Addr(DATA + 0x7000), count=4, stride=INSTANCE_VALUES, trampoline=Addr(TRAMPOLINE)
)


def _waiting_guest() -> tuple[Guest, Vcpus, GuestMemory]:
    # Return addresses are signed in their upper 16 bits.
    guest, vcpus, memory = _guest()
    returns = replace(guest.arch.returns, comes_back=False, address_mask=(1 << 48) - 1)
    return replace(guest, arch=replace(guest.arch, returns=returns)), vcpus, memory


def _enter(memory: GuestMemory, slot: Addr) -> None:
    at = home(TAKEN.count, slot) * TAKEN.stride
    memory.write(Addr(TAKEN.addr + at), struct.pack("<QQQ", slot, TEXT + 8, TEXT + 8))


@pytest.mark.parametrize("number", range(4))
def test_where_callers_cannot_be_given_back_a_call_in_progress_is_waited_for(number: int) -> None:
    guest, _, memory = _waiting_guest()
    assert not awaited(guest, [TAKEN])

    _enter(memory, Addr(_stack(number) + SIZE - 128))

    assert awaited(guest, [TAKEN]) == [TAKEN]
    assert not awaited(guest, [replace(TAKEN, trampoline=Addr(0))])


def test_what_a_call_that_has_returned_left_on_a_stack_or_in_a_register_is_not_waited_for() -> None:
    guest, vcpus, memory = _waiting_guest()

    memory.set_u64(_stack(3) + SIZE - 128, TRAMPOLINE ^ 0x5A << 56)
    vcpus.all[2]["rbx"] = TRAMPOLINE

    assert not awaited(guest, [TAKEN])


def test_a_task_that_sleeps_in_a_call_that_returns_to_us_keeps_its_own_table_only() -> None:
    guest, _, memory = _waiting_guest()
    other = replace(TAKEN, addr=Addr(TAKEN.addr + TAKEN.size))
    _enter(memory, Addr(_stack(3) + SIZE - 128))

    assert returned_to(guest, [other, TAKEN], []) == [TAKEN]
