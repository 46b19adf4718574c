"""Borrowing a task: its registers on its own stack, the call, and nothing left behind."""

import struct
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.registers import NAMES, STUB_NAMES
from kprobes.errors import (
    GuestGoneError,
    GuestMigratedError,
    GuestReplacedError,
    MemoryFault,
    TargetError,
)
from kprobes.formats.rsp import StopReply
from kprobes.guest.allocations import Allocation, AllocationLog, Kind
from kprobes.guest.guest import GuestMemory
from kprobes.guest.inject import CallInjector, Returned
from kprobes.transport.stub import SIGTRAP, Stub
from kprobes.units import Addr, Phys
from tests.build.guest import DATA, make_memory
from tests.build.kernel import TEXT, make_kernel, symbol

STACK = DATA + 0x4000
SYSCALL, FINISH, UNCALLED, FUNCTION = TEXT + 0x100, TEXT + 0x200, TEXT + 0x300, TEXT + 0x400
TRAP = UNCALLED + 7
TIMER = TEXT + 0x500
IDLE = TEXT + 0x800
IRQS_OFF = TEXT + 0x600
KERNEL = make_kernel(
    [
        symbol("x64_sys_call", SYSCALL),
        symbol("restore_regs_and_return_to_kernel", FINISH),
        symbol("pv_native_irq_disable", IRQS_OFF),
        symbol("orderly_reboot", UNCALLED),
        symbol("module_alloc", TEXT + 0x700),
    ]
)


@dataclass
class FakeCpus:
    """A stub whose stops are scripted: each resume runs one step of the script.

    Attributes:
        script: what happens while the guest runs: a vCPU that stops, or None for a time-out.
    """

    vcpus: dict[int, dict[str, int]]
    script: list[Callable[[], int | None]] = field(default_factory=list[Callable[[], "int | None"]])
    breakpoints: set[int] = field(default_factory=set[int])
    is_running: bool = False
    is_held: bool = False
    is_debugged: bool = False
    debugger: None = None
    is_gone: bool = False
    migrations: list[bool] = field(default_factory=list[bool])
    """Whether the guest is being migrated, each time that it is asked."""
    is_elsewhere: bool = False
    seen: list[set[int]] = field(default_factory=list[set[int]])
    messages: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    memory: GuestMemory | None = None

    def is_migrating(self) -> bool:
        assert not self.is_running
        return bool(self.migrations) and self.migrations.pop(0)

    def has_migrated(self) -> bool:
        assert not self.is_running
        return self.is_elsewhere

    def ids(self) -> tuple[int, ...]:
        return tuple(self.vcpus)

    def registers(self, cpu: int) -> Mapping[str, int]:
        assert not self.is_running
        return dict(self.vcpus[cpu])

    def set_registers(self, cpu: int, values: Mapping[str, int]) -> dict[str, int]:
        assert not self.is_running
        before = {name: self.vcpus[cpu][name] for name in values}
        self.vcpus[cpu].update(values)
        return before

    def read(self, addr: int, size: int, *, cpu: int) -> bytes:
        assert cpu in self.vcpus
        assert self.memory is not None
        return self.memory.read(addr, size)

    def write_physical(self, addr: int, data: bytes) -> None:
        assert not self.is_running
        self.messages.append((addr, data))

    def insert_breakpoint(self, addr: int, *, is_hardware: bool = False) -> None:
        assert not is_hardware
        assert not self.is_running
        self.breakpoints.add(addr)

    def remove_breakpoint(self, addr: int) -> None:
        assert not self.is_running
        self.breakpoints.discard(addr)

    def resume(self) -> None:
        assert not self.is_running
        self.is_running = True
        self.seen.append(set(self.breakpoints))

    def wait(self, timeout_s: float) -> StopReply | None:
        assert self.is_running
        assert timeout_s >= 0
        if not self.script:
            return None
        stopped = self.script.pop(0)()
        if stopped is None:
            return None
        self.is_running = False
        return StopReply(signal=5, cpu=stopped)

    def stop(self) -> StopReply:
        assert self.is_running
        if self.is_gone:
            raise GuestGoneError("the guest is gone")
        self.is_running = False
        return StopReply(signal=2, cpu=1)

    @contextmanager
    def paused(self) -> Generator[None]:
        was_running = self.is_running
        if was_running:
            self.stop()
        yield
        if was_running:
            self.resume()


def _vcpu(rip: int, rsp: int = STACK) -> dict[str, int]:
    names = [STUB_NAMES[name] for name in NAMES if name in STUB_NAMES]
    return {name: 0x1000 + n for n, name in enumerate(names)} | {"rip": rip, "rsp": rsp}


def _guest() -> tuple[FakeCpus, GuestMemory, CallInjector]:
    memory = make_memory()
    memory.write(UNCALLED, b"\x90" * 7 + b"\xc3")
    memory.write(IRQS_OFF, b"\xfa\xc3")
    cpus = FakeCpus({1: _vcpu(0), 2: _vcpu(0, STACK + 0x1000)}, memory=memory)
    return cpus, memory, CallInjector(cast("Stub", cpus), memory, KERNEL, AllocationLog())


def _caught(cpus: FakeCpus, place: int = SYSCALL) -> None:
    def step() -> int | None:
        cpus.vcpus[1]["rip"] = place
        return 1

    cpus.script.append(step)


def _returns(cpus: FakeCpus, cpu: int, result: int) -> Callable[[], int | None]:
    """The function returns on a vCPU, which the return trap's breakpoint stops."""

    def step() -> int | None:
        kept = {name: cpus.vcpus[1][name] for name in ("rsp", "r15")}
        cpus.vcpus[cpu] |= kept | {"rip": TRAP, "rsp": kept["rsp"] + 8, "rax": result}
        return cpu

    return step


def test_a_task_that_stands_at_a_place_is_taken_before_anybody_runs() -> None:
    cpus, _, injector = _guest()
    cpus.vcpus[2]["rip"] = SYSCALL

    with injector.task() as task:
        assert task.thread == 2

    assert cpus.seen == []


def test_a_task_that_comes_to_a_place_as_the_time_ends_is_taken() -> None:
    cpus, _, injector = _guest()

    def stop() -> StopReply:
        cpus.is_running = False
        cpus.vcpus[1]["rip"] = SYSCALL
        return StopReply(signal=SIGTRAP, cpu=1)

    setattr(cpus, "stop", stop)  # noqa: B010
    with injector.task(timeout_s=0) as task:
        assert task.thread == 1

    assert len(cpus.seen) == 1


def test_a_function_is_called_with_its_numbers_and_its_result_comes_back() -> None:
    cpus, _, injector = _guest()
    _caught(cpus)
    asked: list[dict[str, int]] = []

    def step() -> int | None:
        asked.append(dict(cpus.vcpus[1]))
        return _returns(cpus, 1, 42)()

    cpus.script.append(step)
    with injector.task() as task:
        found = task.call(Addr(FUNCTION), 1, -2, 3)

    assert found == 42
    (registers,) = asked
    assert registers["rip"] == FUNCTION
    assert [registers[name] for name in ("rdi", "rsi", "rdx")] == [1, (1 << 64) - 2, 3]
    # The ABI: the stack is 16-byte aligned before a call pushes the return address.
    assert registers["rsp"] % 16 == 8


def test_the_task_s_own_registers_lie_on_its_stack_as_the_kernel_returns_from_interrupts() -> None:
    cpus, memory, injector = _guest()
    before = cpus.vcpus[1] | {"rip": SYSCALL}
    _caught(cpus)

    with injector.task() as task:
        words = struct.unpack(
            f"<{3 + len(NAMES)}Q", memory.read(task.trap.frame, 8 * (3 + len(NAMES)))
        )

    assert words[:3] == (TRAP, IRQS_OFF, FINISH)
    frame = dict(zip(NAMES, words[3:], strict=True))
    assert frame == {name: before.get(STUB_NAMES.get(name, ""), 0) for name in NAMES}
    assert task.trap.frame + 8 * len(words) <= before["rsp"] - 128


def test_a_task_that_nothing_was_called_in_goes_the_way_back_from_a_call() -> None:
    cpus, memory, injector = _guest()
    _caught(cpus)

    with injector.task() as task:
        pass

    at = cpus.vcpus[1]["rsp"]
    assert cpus.vcpus[1]["rip"] == TRAP
    assert (memory.u64(at), memory.u64(at + 8)) == (IRQS_OFF, FINISH)
    assert at == task.trap.frame + 8
    assert cpus.breakpoints == set()


def test_a_first_call_that_was_noted_and_not_made_is_told_from_the_one_before() -> None:
    cpus, _, injector = _guest()
    _caught(cpus)
    cpus.script.append(_returns(cpus, 1, 42))
    with injector.task() as task:
        task.call(Addr(FUNCTION))
    # Another task, later.
    cpus.vcpus[1] |= {"rip": SYSCALL, "rsp": STACK - 0x800}
    _caught(cpus)

    with injector.task() as task:
        found = task.trap.poll()

    assert found is not None
    assert (found.thread, found.number) == (1, 1)


def test_a_call_may_end_on_another_vcpu() -> None:
    cpus, _, injector = _guest()
    _caught(cpus)
    cpus.script.append(_returns(cpus, 2, 7))

    with injector.task() as task:
        assert task.call(Addr(FUNCTION)) == 7
        assert task.thread == 2


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_what_proves_that_memory_is_there_is_written_before_anybody_knows_of_the_memory(
    is_interrupted: bool,
) -> None:
    cpus, memory, _ = _guest()
    allocations = AllocationLog()
    injector = CallInjector(cast("Stub", cpus), memory, KERNEL, allocations)
    _caught(cpus)
    cpus.script.append(_returns(cpus, 1, 0x5000))
    seen: list[tuple[int, bool]] = []

    def mark(addr: int) -> None:
        seen.append((addr, allocations.call is not None))
        if is_interrupted:
            raise KeyboardInterrupt

    new = Allocation(kind=Kind.DATA, addr=0, size=64)
    with suppress(KeyboardInterrupt), injector.task() as task:
        task.call(Addr(FUNCTION), allocates=new, mark=mark)

    assert seen == [(0x5000, True)]
    assert allocations.live == (replace(new, addr=0x5000),)


def test_somebody_else_at_the_return_trap_is_not_taken_for_our_task() -> None:
    cpus, _, injector = _guest()
    _caught(cpus)

    def stranger() -> int | None:
        # As a task of an earlier session, whose calls had the same numbers.
        number = cpus.vcpus[1]["r15"]
        cpus.vcpus[2] |= {"rip": TRAP, "rsp": STACK + 0x800, "r15": number, "rax": 13}
        return 2

    cpus.script += [stranger, _returns(cpus, 1, 42)]
    with injector.task() as task:
        assert task.call(Addr(FUNCTION)) == 42


def test_a_task_that_still_stands_at_the_return_trap_is_sent_on_to_where_it_would_return() -> None:
    cpus, memory, injector = _guest()
    memory.set_u64(STACK + 0x800, FINISH)
    _caught(cpus)

    def left_over() -> int | None:
        cpus.vcpus[2] |= {"rip": TRAP, "rsp": STACK + 0x800}
        return 2

    cpus.script += [left_over, _returns(cpus, 1, 42)]
    with injector.task() as task:
        task.call(Addr(FUNCTION))

    assert cpus.vcpus[2]["rip"] == FINISH
    assert cpus.vcpus[2]["rsp"] == STACK + 0x808


def test_a_guest_that_is_put_back_while_such_a_task_is_sent_on_is_left_as_it_was_put_back() -> None:
    cpus, memory, _ = _guest()
    allocations = AllocationLog()
    injector = CallInjector(cast("Stub", cpus), memory, KERNEL, allocations)
    memory.set_u64(STACK + 0x800, FINISH)
    other, is_put_back = _vcpu(TIMER, STACK - 0x380), False

    def check() -> None:
        if is_put_back:
            raise GuestReplacedError("the guest was restored to an earlier state")

    def left_over() -> int | None:
        cpus.vcpus[2] |= {"rip": TRAP, "rsp": STACK + 0x800}
        seen = dict(cpus.vcpus[2])

        def put_back_after(cpu: int) -> Mapping[str, int]:
            nonlocal is_put_back
            del cpus.registers
            is_put_back = True
            cpus.vcpus[cpu] = dict(other)
            return seen

        cpus.registers = put_back_after
        return 2

    allocations.check = check
    _caught(cpus)
    cpus.script.append(left_over)
    with injector.task() as task, pytest.raises(GuestReplacedError):
        task.call(Addr(FUNCTION))

    assert cpus.vcpus[2] == other


def test_what_the_call_before_came_back_with_is_not_taken_for_this_one_s() -> None:
    cpus, _, injector = _guest()
    _caught(cpus)
    with injector.task() as task:
        cpus.script.append(_returns(cpus, 1, 42))
        assert task.call(Addr(FUNCTION)) == 42
        first = dict(cpus.vcpus[1])

        def still_there() -> int | None:
            asked.update(cpus.vcpus[1])
            cpus.vcpus[1] |= first
            return 1

        def now_back() -> int | None:
            cpus.vcpus[1] |= asked
            return _returns(cpus, 1, 43)()

        asked: dict[str, int] = {}
        cpus.script += [still_there, now_back]
        assert task.trap.poll() == Returned(thread=1, number=1, result=42)
        assert task.call(Addr(FUNCTION)) == 43
        assert task.trap.poll() == Returned(thread=1, number=2, result=43)


def test_while_a_call_runs_only_the_return_trap_stops_anybody() -> None:
    cpus, _, injector = _guest()
    _caught(cpus)
    cpus.script.append(_returns(cpus, 1, 0))

    with injector.task() as task:
        task.call(Addr(FUNCTION))

    assert cpus.seen == [{SYSCALL}, {TRAP}]
    assert cpus.breakpoints == set()
    assert not cpus.is_running


def test_a_function_that_does_not_return_in_time_is_told() -> None:
    cpus, _, injector = _guest()
    _caught(cpus)
    cpus.script.append(lambda: None)

    with pytest.raises(TargetError, match="did not return"), injector.task() as task:
        task.call(Addr(FUNCTION), timeout_s=0.1)

    assert cpus.breakpoints == set()
    assert not cpus.is_running


def test_a_guest_in_which_no_task_comes_by_is_told_and_left_as_it_was() -> None:
    cpus, _, injector = _guest()
    before = {cpu: dict(registers) for cpu, registers in cpus.vcpus.items()}

    with pytest.raises(TargetError, match="no task of the guest"), injector.task(timeout_s=0.0):
        pass

    assert cpus.vcpus == before
    assert cpus.breakpoints == set()


def test_a_guest_that_goes_is_told_as_such() -> None:
    cpus, _, injector = _guest()

    def die() -> int | None:
        cpus.is_gone = True
        raise GuestGoneError("the guest is gone")

    cpus.script.append(die)

    with pytest.raises(GuestGoneError), injector.task():
        pass


def test_an_interruption_while_the_guest_runs_leaves_it_stopped_and_without_breakpoints() -> None:
    cpus, _, injector = _guest()

    def interrupt() -> int | None:
        raise KeyboardInterrupt

    for comes_before in (0, 1):
        cpus.script = [lambda: 1] * comes_before + [interrupt]

        with pytest.raises(KeyboardInterrupt), injector.task() as task:
            task.call(Addr(FUNCTION))

        assert cpus.breakpoints == set()
        assert not cpus.is_running


def test_a_task_that_has_not_come_back_is_not_sent_again() -> None:
    cpus, _, injector = _guest()
    _caught(cpus)
    cpus.script.append(lambda: None)
    with injector.task() as task:
        with pytest.raises(TargetError, match="did not return"):
            task.call(Addr(FUNCTION), timeout_s=0.1)
        before = {cpu: dict(registers) for cpu, registers in cpus.vcpus.items()}

        assert task.is_calling
        with pytest.raises(ValueError, match="has not returned"):
            task.call(Addr(FUNCTION))

        assert cpus.vcpus == before


def test_a_vcpu_that_stops_where_nobody_asked_it_to_makes_no_call() -> None:
    cpus, _, injector = _guest()

    def strange() -> int:
        # It had come to a breakpoint that is gone: in an interrupt, it must not sleep.
        cpus.vcpus[2]["rip"] = TIMER
        return 2

    cpus.script.append(strange)
    _caught(cpus)

    with injector.task() as task:
        assert task.thread == 1

    assert cpus.vcpus[2]["rip"] == TIMER


def test_a_kernel_without_a_place_to_return_to_is_refused() -> None:
    memory = make_memory()
    memory.write(UNCALLED, b"\x90" * 0x40)

    with pytest.raises(TargetError, match="no place to return to"):
        CallInjector(cast("Stub", FakeCpus({})), memory, KERNEL, AllocationLog())


def test_without_the_syscall_switch_every_busy_syscall_is_watched() -> None:
    cpus, memory, _ = _guest()
    names = ("__x64_sys_read", "__x64_sys_futex", "vmstat_shepherd")
    rest = [symbol(name, TEXT + 0x1000 + 16 * n) for n, name in enumerate(names)]
    kernel = make_kernel([*KERNEL.symbols.glob("[!x]*"), *rest])
    _caught(cpus, rest[0].addr)

    with CallInjector(cast("Stub", cpus), memory, kernel, AllocationLog()).task():
        pass

    assert cpus.seen == [{found.addr for found in rest}]


@pytest.mark.parametrize("handler", [TIMER, TIMER + 0x40])
def test_an_idle_cpu_gets_a_timer_interrupt_if_that_is_its_timers(handler: int) -> None:
    cpus, memory, _ = _guest()
    known = {
        "shepherd": DATA,
        "system_wq": DATA + 8,
        "__per_cpu_offset": DATA + 16,
        "lapic_events": 24,
        "hrtimer_interrupt": TIMER,
        "mod_delayed_work_on": FUNCTION,
    }
    for addr, value in {DATA + 8: 0x1234, DATA + 16: DATA, DATA + 24: handler}.items():
        memory.write(addr, value.to_bytes(8, "little"))
    kernel = make_kernel(
        [*KERNEL.symbols.glob("*"), *(symbol(name, addr) for name, addr in known.items())]
    )

    def ticks() -> int | None:
        if cpus.breakpoints != {TIMER}:
            cpus.script.insert(0, ticks)
            return None
        cpus.vcpus[1]["rip"] = TIMER
        return 1

    def wakes() -> int:
        cpus.vcpus[1]["rip"] = SYSCALL
        return 1

    cpus.script = [ticks, _returns(cpus, 1, 1), wakes]

    with CallInjector(cast("Stub", cpus), memory, kernel, AllocationLog()).task() as task:
        assert task.thread == 1

    assert cpus.messages == ([(0xFEE0_0000, b"\xec\0\0\0")] if handler == TIMER else [])


def test_no_task_of_a_guest_that_another_has_paused_makes_a_call() -> None:
    cpus, _, injector = _guest()
    cpus.is_held = True

    with pytest.raises(TargetError, match="the guest is paused"), injector.task():
        raise AssertionError("it must run for this")

    assert not cpus.is_running


def test_nobody_comes_to_a_breakpoint_while_the_guest_is_migrated() -> None:
    cpus, _, injector = _guest()
    cpus.migrations = [True, True, False]
    _caught(cpus)

    with injector.task():
        pass

    assert cpus.seen[:2] == [set(), set()]
    assert SYSCALL in cpus.seen[2]


def test_a_guest_whose_migration_does_not_end_in_time_is_told() -> None:
    cpus, _, injector = _guest()
    cpus.migrations = [True] * 100

    with pytest.raises(TargetError, match="is being migrated"), injector.task(timeout_s=0.1):
        raise AssertionError("nobody may be at a breakpoint meanwhile")

    assert cpus.breakpoints == set()


def test_a_guest_that_runs_elsewhere_now_is_told() -> None:
    cpus, _, injector = _guest()
    cpus.is_held = cpus.is_elsewhere = True

    with pytest.raises(GuestMigratedError, match="it has its probes where it runs now"):
        injector.task().__enter__()


def test_a_guest_that_is_paused_while_a_task_is_waited_for_is_told() -> None:
    cpus, _, injector = _guest()

    def pause() -> int:
        cpus.is_held = True
        return 1

    cpus.script.append(pause)
    with pytest.raises(TargetError, match="the guest is paused"), injector.task():
        raise AssertionError("it must run for this")

    assert cpus.breakpoints == set()


def test_another_state_in_which_the_frame_is_mapped_nowhere_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpus, memory, _ = _guest()
    allocations = AllocationLog()
    injector = CallInjector(cast("Stub", cpus), memory, KERNEL, allocations)
    _caught(cpus)

    def nowhere(addr: int) -> Phys:
        raise MemoryFault(addr, 1)

    with injector.task() as task:
        before = dict(cpus.vcpus[1])

        def check() -> None:
            # Once it has been given its registers.
            if cpus.vcpus[1] != before:
                monkeypatch.setattr(memory, "physical", nowhere)
                raise GuestReplacedError("the guest was restored to an earlier state")

        allocations.check = check
        with pytest.raises(GuestReplacedError):
            task.call(Addr(FUNCTION), 1)


def test_nothing_is_called_in_a_guest_that_is_another_one() -> None:
    cpus, memory, injector = _guest()
    allocations = AllocationLog()
    injector = CallInjector(cast("Stub", cpus), memory, KERNEL, allocations)
    _caught(cpus)

    def is_another() -> None:
        raise GuestReplacedError("the guest was rebooted")

    with injector.task() as task:
        frame = memory.read(task.trap.frame, 64)
        before = dict(cpus.vcpus[1])
        allocations.check = is_another
        with pytest.raises(GuestReplacedError):
            task.call(Addr(FUNCTION), 1)

    assert cpus.vcpus[1] == before
    assert memory.read(task.trap.frame, 64) == frame
    assert allocations.call is None


def test_a_guest_that_is_put_back_during_a_call_is_noticed_before_the_call_is_late() -> None:
    cpus, memory, _ = _guest()
    allocations = AllocationLog()
    injector = CallInjector(cast("Stub", cpus), memory, KERNEL, allocations)
    _caught(cpus)

    is_another = False

    def check() -> None:
        if is_another:
            raise GuestReplacedError("the guest was restored to an earlier state")

    def nobody() -> int | None:
        nonlocal is_another
        is_another = True
        return None

    allocations.check = check
    with injector.task() as task:
        cpus.script.append(nobody)
        with pytest.raises(GuestReplacedError):
            task.call(Addr(FUNCTION), 1, timeout_s=3600)

    assert not cpus.is_running
    assert cpus.breakpoints == set()


def test_a_stack_that_is_put_back_during_a_call_tells_a_guest_whose_time_has_not_gone_back() -> (
    None
):
    cpus, memory, _ = _guest()
    allocations = AllocationLog()
    injector = CallInjector(cast("Stub", cpus), memory, KERNEL, allocations)
    _caught(cpus)
    stack = memory.read(Addr(STACK - 0x400), 0x400)

    def nobody() -> int | None:
        memory.write(STACK - 0x400, b"\xab" * 0x400)
        return None

    with injector.task() as task:
        cpus.script.append(nobody)
        with pytest.raises(GuestReplacedError, match="restored to an earlier state"):
            task.call(Addr(FUNCTION), 1, timeout_s=3600)
    memory.write(STACK - 0x400, stack)
    with pytest.raises(GuestReplacedError, match="restored to an earlier state"):
        allocations.check()

    assert not cpus.is_running
    assert cpus.breakpoints == set()


def test_who_is_caught_in_a_guest_that_is_another_one_is_let_go() -> None:
    cpus, memory, _ = _guest()
    allocations = AllocationLog()
    stack = memory.read(STACK - 0x400, 0x400)
    injector = CallInjector(cast("Stub", cpus), memory, KERNEL, allocations)
    _caught(cpus)

    def is_another() -> None:
        raise GuestReplacedError("the guest was restored to an earlier state")

    allocations.check = is_another
    with pytest.raises(GuestReplacedError), injector.task():
        pass

    assert memory.read(STACK - 0x400, 0x400) == stack
    assert cpus.breakpoints == set()


@pytest.mark.parametrize("look", [1, 2, 3])
def test_a_guest_that_is_put_back_right_after_a_look_is_left_as_it_was_put_back(look: int) -> None:
    cpus, memory, _ = _guest()
    allocations = AllocationLog()
    injector = CallInjector(cast("Stub", cpus), memory, KERNEL, allocations)
    # Its stack is in use where the task's frame would be.
    other, stack = _vcpu(TIMER, STACK - 0x380), b"\xab" * 0x400
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks > look:
            raise GuestReplacedError("the guest was restored to an earlier state")
        if looks == look:
            cpus.vcpus[1] = dict(other)
            memory.write(STACK - 0x400, stack)

    allocations.check = check
    _caught(cpus)
    with pytest.raises(GuestReplacedError), injector.task() as task:
        task.call(Addr(FUNCTION), 1)

    assert cpus.vcpus[1] == other
    assert memory.read(STACK - 0x400, 0x400) == stack
    assert cpus.breakpoints == set()
    # Nothing ran but to catch it.
    assert len(cpus.seen) == 1


@pytest.mark.parametrize("pc", [IDLE, TEXT])
def test_nobody_is_waited_for_where_all_sleep(pc: int) -> None:
    cpus, memory, _ = _guest()
    known = {
        "__per_cpu_offset": DATA + 16,
        "lapic_events": 24,
        "hrtimer_interrupt": TIMER,
        "default_idle": IDLE,
        "pv_native_safe_halt": IDLE + 0x40,
    }
    for addr, value in {DATA + 16: DATA, DATA + 24: TIMER}.items():
        memory.write(addr, value.to_bytes(8, "little"))
    kernel = make_kernel(
        [*KERNEL.symbols.glob("*"), *(symbol(name, addr) for name, addr in known.items())]
    )
    cpus.vcpus = {cpu: _vcpu(at) | {"eflags": 0x202} for cpu, at in {1: IDLE, 2: pc}.items()}
    injector = CallInjector(cast("Stub", cpus), memory, kernel, AllocationLog())

    # No work that could be queued: its last wait is for what comes by itself.
    with pytest.raises(TargetError, match="no task of the guest"), injector.task(timeout_s=0.001):
        pass

    assert len(cpus.seen) == (1 if pc == IDLE else 2)
