"""Waiting for a guest that boots: which kernels are taken, and where they stand then."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from kprobes.errors import GuestGoneError, TargetError
from kprobes.guest import boot
from kprobes.guest.boot import (
    await_boot,
    has_started,
    is_initialising,
    read_init_text,
    sleeping_places,
)
from kprobes.guest.guest import Guest, GuestMemory, InitText
from kprobes.model.kernel import Symbol
from kprobes.transport.stub import Stub
from kprobes.units import Addr, Phys
from tests.build.kernel import make_kernel, symbol

DATA, STATE, INIT, FREE, EACH, LATE = (0xFFFF_FFFF_8200_0000 + (n << 12) for n in range(6))
RUNNING, SCHEDULING = 2, 1


def guest_of(*symbols: Symbol, jiffies: int = 0) -> Guest:
    def u64(addr: int) -> int:
        assert addr == DATA
        return jiffies

    memory = SimpleNamespace(u64=u64)
    return cast("Guest", SimpleNamespace(kernel=make_kernel(symbols), memory=memory))


NAMES = [symbol("__per_cpu_offset", DATA), symbol("nr_cpu_ids", DATA)]
JIFFIES = symbol("jiffies_64", DATA)


@pytest.mark.parametrize("hz", [100, 250, 300, 1000])
def test_a_kernel_whose_timer_has_not_ticked_has_not_started(hz: int) -> None:
    first = (1 << 32) - 300 * hz

    assert not has_started(guest_of(*NAMES, JIFFIES, jiffies=first))
    assert has_started(guest_of(*NAMES, JIFFIES, jiffies=first + 1))


def test_a_kernel_whose_data_is_not_known_yet_has_not_started() -> None:
    assert not has_started(guest_of(NAMES[0], JIFFIES, jiffies=1 << 32))
    assert has_started(guest_of(*NAMES))


class Booting:
    """A guest that boots as it is looked at, and its stub.

    Attributes:
        looks: what is found, one after the other: a state, or an error.
        passes: whether it comes to a breakpoint when it runs up to one.
    """

    def __init__(
        self, *looks: int | Exception, passes: bool = True, has_late_execmem: bool = False
    ) -> None:
        self.looks, self.passes = list(looks), passes
        self.more = [symbol("execmem_late_init", LATE)] * has_late_execmem
        self.came = list[set[int]]()
        self.is_running = self.is_held = self.is_paused_by_others = False
        self.at: set[int] = set()
        self.breakpoints: set[int] = set()
        self.state = 0

    def inspect(self) -> Guest:
        assert not self.is_running
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        self.state = found
        names = [*NAMES, JIFFIES, symbol("system_state", STATE), symbol("driver_init", INIT)]
        names += [symbol("free_initmem", FREE), symbol("do_one_initcall", EACH), *self.more]
        kernel = make_kernel(names)
        return cast("Guest", SimpleNamespace(kernel=kernel, memory=self))

    def u64(self, addr: int) -> int:
        assert addr == DATA
        return 1 << 33

    def read(self, addr: int, size: int) -> bytes:
        assert addr == STATE
        return self.state.to_bytes(size, "little")

    def run_until_stop(self, deadline: float, check: Callable[[], None]) -> int | None:
        assert deadline
        check()
        if self.is_paused_by_others:
            self.is_paused_by_others, self.is_held = False, True
            raise TargetError("the guest is paused")
        self.at = set(self.breakpoints) if self.passes else set()
        self.came.append(self.at)
        return 1 if self.passes else None

    def stop(self) -> None:
        assert not self.is_held
        self.is_running = False

    def resume(self) -> None:
        assert not self.is_held
        self.at, self.is_running = set(), True

    def let_run(self) -> None:
        if not self.is_held:
            self.resume()

    def stands(self) -> bool:
        self.is_held = False
        return self.is_held

    def paused(self) -> "Booting":
        return self

    def __enter__(self) -> None:
        assert not self.is_running

    def __exit__(self, *_: object) -> None:
        pass

    def insert_breakpoint(self, addr: int, *, is_hardware: bool) -> None:
        # The other kind would be written into a kernel that may be gone by then.
        assert is_hardware
        self.breakpoints.add(addr)

    def remove_breakpoint(self, addr: int) -> None:
        self.breakpoints.discard(addr)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        assert seconds < 1

    def run_until_stop(guest: Booting, deadline: float, check: Callable[[], None]) -> int | None:
        return guest.run_until_stop(deadline, check)

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 1.0)
    monkeypatch.setattr(boot, "time", clock)
    monkeypatch.setattr(boot, "run_until_stop", run_until_stop)


def waited(guest: Booting, said: Callable[[str], None] = lambda _: None) -> Guest:
    return await_boot(cast("Stub", guest), guest.inspect, said)


def test_a_guest_that_boots_stands_at_the_beginning_of_its_initcalls() -> None:
    said: list[str] = []
    guest = Booting(TargetError("in firmware"), TargetError("in firmware"), 0, SCHEDULING)

    waited(guest, said.append)

    assert said == ["in firmware", "in firmware", "it has not booted"]
    assert (guest.is_running, guest.at, guest.breakpoints) == (False, {INIT, FREE}, set())
    # Looked at once more there: page tables are others.
    assert guest.looks == []


def test_a_guest_runs_for_as_long_as_it_stood_to_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times, slept = iter([1.0, 1.7, 3.0, 3.001, 5.0]), list[float]()
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: next(times))
    monkeypatch.setattr(boot, "time", clock)

    waited(Booting(TargetError("in firmware"), TargetError("in firmware"), RUNNING))

    assert slept == pytest.approx([0.7, 0.005])


def test_where_memory_for_code_comes_late_so_does_the_beginning() -> None:
    guest = Booting(SCHEDULING, SCHEDULING, has_late_execmem=True)

    waited(guest)

    assert guest.came == [{LATE, FREE}, {EACH, FREE}]


def test_a_guest_that_runs_already_runs_on() -> None:
    guest = Booting(RUNNING)

    waited(guest)

    assert guest.is_running


def test_a_kernel_that_comes_nowhere_is_looked_at_again() -> None:
    said: list[str] = []
    guest = Booting(SCHEDULING, RUNNING, passes=False)

    waited(guest, said.append)

    assert set(said) == {"it has not booted"}
    assert (guest.is_running, guest.breakpoints) == (True, set())


def test_a_guest_that_is_paused_is_not_made_to_run() -> None:
    said: list[str] = []
    guest = Booting(SCHEDULING, SCHEDULING)
    guest.is_held = True

    waited(guest, said.append)

    assert said[0] == "it is paused"
    assert guest.at


def test_a_guest_that_is_paused_on_its_way_is_waited_for() -> None:
    said: list[str] = []
    guest = Booting(SCHEDULING, SCHEDULING, SCHEDULING)
    guest.is_paused_by_others = True

    waited(guest, said.append)

    assert "it is paused" in said
    assert guest.at


def test_what_ends_the_waiting_leaves_the_guest_running() -> None:
    guest = Booting(TargetError("in firmware"))

    def end(why: str) -> None:
        raise KeyboardInterrupt(why)

    with pytest.raises(KeyboardInterrupt):
        waited(guest, end)

    assert guest.is_running


def test_a_guest_that_ends_meanwhile_is_told() -> None:
    with pytest.raises(GuestGoneError):
        waited(Booting(TargetError("in firmware"), GuestGoneError("it has ended")))


def test_a_kernel_that_does_not_tell_its_state_is_not_taken_for_a_new_one() -> None:
    assert not is_initialising(cast("GuestMemory", None), make_kernel([]))


START = 0x40
CODE = bytes(range(1, 0xF0))


def init_text_of(state: int, *names: str) -> InitText | None:
    """Return what a kernel tells of the text that boot frees."""
    places = {"system_state": 0, "_sinittext": START, "_einittext": START + len(CODE)}
    ram = state.to_bytes(START, "little") + CODE

    def read(addr: int, size: int) -> bytes:
        return ram[addr : addr + size]

    memory = SimpleNamespace(read=read, physical=(0x1000).__add__)
    kernel = make_kernel([symbol(name, places[name]) for name in names or places])
    return read_init_text(cast("GuestMemory", memory), kernel)


def test_text_that_boot_frees_is_known_while_it_is_there() -> None:
    found = init_text_of(SCHEDULING)

    assert found == InitText(
        start=Addr(START),
        stop=Addr(START + len(CODE)),
        state=Phys(0x1000),
        phys=Phys(START + 0x1000),
        head=CODE,
    )
    assert init_text_of(RUNNING) is None
    assert init_text_of(SCHEDULING, "_sinittext", "_einittext") is None
    assert init_text_of(SCHEDULING, "system_state") is None


@pytest.mark.parametrize(
    ("state", "now", "is_freed"),
    [
        (SCHEDULING, CODE, False),
        (RUNNING, CODE, True),
        # Probes are in it, and the kernel has changed some.
        (SCHEDULING, b"\xcc" * 100 + CODE[100:], False),
        # Before 5.16 its state comes later.
        (SCHEDULING, b"\xcc" * len(CODE), True),
        (SCHEDULING, bytes(len(CODE)), True),
    ],
)
def test_text_is_freed_when_the_kernel_says_so_or_has_overwritten_it(
    state: int, now: bytes, is_freed: bool
) -> None:
    found = init_text_of(SCHEDULING)
    assert found is not None
    memory = {found.state: state.to_bytes(4, "little"), found.phys: now}

    assert found.is_freed(lambda addr, size: memory[Phys(addr)][:size]) == is_freed


INFO = symbol("execmem_info", DATA)


@pytest.mark.parametrize(
    ("state", "late", "info", "places"),
    [
        (SCHEDULING, False, 0, ("driver_init", "free_initmem")),
        (SCHEDULING, True, 1, ("do_one_initcall", "free_initmem")),
        (SCHEDULING, True, 0, ()),
        (RUNNING, False, 0, ()),
        (RUNNING, True, 1, ()),
    ],
)
def test_process_1_is_borrowed_where_it_may_sleep_and_memory_can_be_had(
    state: int, late: bool, info: int, places: tuple[str, ...]
) -> None:
    names = [symbol("system_state", STATE), INFO]
    kernel = make_kernel([*names, *([symbol("execmem_late_init", LATE)] if late else [])])

    def read(addr: int, size: int) -> bytes:
        assert addr == STATE
        return state.to_bytes(size, "little")

    memory = SimpleNamespace(u64={INFO.addr: info}.__getitem__, read=read)

    assert sleeping_places(cast("GuestMemory", memory), kernel) == places
