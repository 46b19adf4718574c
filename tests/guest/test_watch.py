"""Fates of a guest that is watched: panics, hangs, stops of others."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import Struct, field

from kprobes.errors import (
    GuestCrashedError,
    GuestMigratedError,
    GuestShutDownError,
    TargetError,
)
from kprobes.formats.rsp import StopReply
from kprobes.guest import watch
from kprobes.guest.guest import Guest
from kprobes.guest.journal import Journal
from kprobes.guest.watch import GuestWatch
from kprobes.model.options import Options
from tests.build.kernel import TEXT, make_kernel, symbol

PANIC, DUMP, IDLE, WORK, PARKED, SHUTDOWN, LOCK = (TEXT + 0x1000 * n for n in range(1, 8))
IRQS_ON = 1 << 9
USER = 0x40_0000
SYMBOLS = [
    symbol("panic", PANIC),
    symbol("kmsg_dump", DUMP),
    symbol("default_idle", IDLE),
    symbol("stuck_here", WORK),
    symbol("native_play_dead", PARKED),
    symbol("syscore_shutdown", SHUTDOWN),
    symbol("native_queued_spin_lock_slowpath", LOCK),
]


class FakeVcpus(Struct):
    """A stub whose guest stops by itself where a test says; two vCPUs."""

    registers_of: dict[int, dict[str, int]] = field(
        default_factory=lambda: {n: {"rip": IDLE, "eflags": IRQS_ON} for n in (1, 2)}
    )
    breakpoints: set[int] = field(default_factory=set[int])
    is_running: bool = True
    is_held: bool = False
    is_debugged: bool = False
    debugger: None = None
    is_elsewhere: bool = False
    stops_at: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(vCPU, address) that it comes to when it runs next."""
    hardware: list[bool] = field(default_factory=list[bool])

    def wait(self, timeout_s: float) -> StopReply | None:
        del timeout_s
        assert self.is_running or self.is_held
        if not self.stops_at or self.is_held:
            return None
        cpu, place = self.stops_at.pop(0)
        self.registers_of[cpu]["rip"] = place
        self.is_running = False
        return StopReply(signal=5, cpu=cpu)

    def ids(self) -> tuple[int, ...]:
        return tuple(self.registers_of)

    def registers(self, cpu: int) -> Mapping[str, int]:
        assert not self.is_running
        return self.registers_of[cpu]

    def insert_breakpoint(self, addr: int, *, is_hardware: bool = False) -> None:
        assert not self.is_running
        self.breakpoints.add(addr)
        self.hardware.append(is_hardware)

    def remove_breakpoint(self, addr: int) -> None:
        assert not self.is_running
        self.breakpoints.discard(addr)

    def resume(self) -> None:
        assert not self.is_running
        self.is_running = True

    def stop(self) -> None:
        self.is_running = False

    def has_migrated(self) -> bool:
        return self.is_elsewhere

    @contextmanager
    def paused(self) -> Generator[None]:
        ran, self.is_running = self.is_running and not self.is_held, False
        yield
        self.is_running |= ran


def _nothing(*_: object, **_named: object) -> None:
    pass


class Scene:
    """A watch, and what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
        self.stub = FakeVcpus()
        self.said: list[str] = []
        self.now = 100.0
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(watch, "check_stopped", _nothing)
        kernel = make_kernel([each for each in SYMBOLS if each.name not in changes])
        memory = SimpleNamespace(ram=None)
        guest = cast("Guest", SimpleNamespace(stub=self.stub, kernel=kernel, memory=memory))
        journal = SimpleNamespace(check=_nothing, note_held=_nothing)
        self.watch = GuestWatch(guest, cast("Journal", journal), self.said.append)

    def check_for(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.3
            self.watch.check()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_panic_is_told_and_the_guest_stands_when_all_is_logged(scene: Scene) -> None:
    scene.watch.begin(Options(hang_timeout_s=10))
    assert (scene.stub.breakpoints, scene.stub.hardware) == ({PANIC}, [True])
    assert scene.stub.is_running

    scene.stub.stops_at = [(2, PANIC), (2, DUMP)]
    with pytest.raises(GuestCrashedError, match="the guest panicked"):
        scene.check_for(1)

    assert scene.stub.registers_of[2]["rip"] == DUMP
    assert (scene.stub.is_running, scene.stub.breakpoints) == (False, set())
    with pytest.raises(GuestCrashedError, match="the guest panicked"):
        scene.watch.check()


def test_an_orderly_end_is_told_before_it_comes(scene: Scene) -> None:
    scene.watch.begin(Options(until_shutdown=True))
    assert scene.stub.breakpoints == {SHUTDOWN}

    scene.stub.stops_at = [(1, SHUTDOWN)]
    with pytest.raises(GuestShutDownError, match="the guest shuts down"):
        scene.check_for(1)

    assert (scene.stub.is_running, scene.stub.breakpoints) == (False, set())
    scene.watch.begin(Options(until_shutdown=True, hang_timeout_s=10))
    assert scene.stub.breakpoints == {SHUTDOWN, PANIC}


def test_a_stop_elsewhere_is_no_panic_and_the_guest_goes_on(scene: Scene) -> None:
    scene.watch.begin(Options(hang_timeout_s=10))
    scene.stub.stops_at = [(1, WORK)]

    scene.check_for(1)

    assert scene.stub.is_running
    assert scene.watch.crash is None


def test_a_cpu_without_interrupts_for_long_is_a_hang(scene: Scene) -> None:
    scene.watch.begin(Options(hang_timeout_s=10))
    scene.stub.registers_of[2] = {"rip": WORK + 4, "eflags": 0}

    scene.check_for(9)
    with pytest.raises(
        GuestCrashedError, match=r"interrupts off for 1\d s, in stuck_here\+0x4/0x40"
    ):
        scene.check_for(2)

    assert scene.stub.is_running


def test_a_cpu_that_hangs_where_nothing_has_a_name_is_named_by_its_address(scene: Scene) -> None:
    # A module that was loaded later.
    scene.watch.begin(Options(hang_timeout_s=10))
    scene.stub.registers_of[2] = {"rip": 0xFFFF_FFFF_C012_3456, "eflags": 0}

    with pytest.raises(GuestCrashedError, match=r"in 0xffffffffc0123456$"):
        scene.check_for(15)


def test_of_several_that_hang_the_first_is_named(scene: Scene) -> None:
    scene.watch.begin(Options(hang_timeout_s=10))
    scene.stub.registers_of[2] = {"rip": WORK + 4, "eflags": 0}
    scene.check_for(1)
    scene.stub.registers_of[1] = {"rip": PANIC + 8, "eflags": 0}
    scene.check_for(2)

    # Looks are late on a busy machine: both have hung for long by then.
    scene.now += 20
    with pytest.raises(GuestCrashedError, match="in stuck_here"):
        scene.check_for(1)


def test_who_waits_for_a_lock_that_another_one_has_is_not_named(scene: Scene) -> None:
    scene.watch.begin(Options(hang_timeout_s=10))
    scene.stub.registers_of[1] = {"rip": LOCK + 0x20, "eflags": 0}
    scene.stub.registers_of[2] = {"rip": WORK + 4, "eflags": 0}

    with pytest.raises(GuestCrashedError, match="in stuck_here"):
        scene.check_for(15)


@pytest.mark.parametrize(
    "registers",
    [
        {"rip": WORK, "eflags": IRQS_ON},
        {"rip": IDLE, "eflags": IRQS_ON},
        {"rip": PARKED, "eflags": 0},
        {"rip": USER, "eflags": 0},
    ],
)
def test_who_takes_interrupts_is_offline_or_unknown_does_not_hang(
    scene: Scene, registers: dict[str, int]
) -> None:
    scene.watch.begin(Options(hang_timeout_s=10))
    scene.stub.registers_of[1] = registers

    scene.check_for(30)


def test_a_cpu_that_took_an_interrupt_meanwhile_does_not_hang(scene: Scene) -> None:
    scene.watch.begin(Options(hang_timeout_s=10))
    for _ in range(4):
        scene.stub.registers_of[1] = {"rip": WORK, "eflags": 0}
        scene.check_for(8)
        scene.stub.registers_of[1] = {"rip": WORK, "eflags": IRQS_ON}
        scene.check_for(0.3)


def test_a_guest_that_others_have_paused_does_not_hang(scene: Scene) -> None:
    scene.watch.begin(Options(hang_timeout_s=10))
    scene.stub.registers_of[1] = {"rip": WORK, "eflags": 0}
    scene.check_for(8)
    scene.stub.is_held = True

    scene.check_for(30)

    assert scene.said == ["somebody else has paused the guest; events come again when it goes on"]


def test_a_guest_that_runs_elsewhere_now_is_told_whatever_is_looked_for(scene: Scene) -> None:
    scene.watch.begin(Options())
    scene.stub.is_running, scene.stub.is_held = False, True
    scene.check_for(1)

    scene.stub.is_elsewhere = True
    with pytest.raises(GuestMigratedError, match="it has its probes where it runs now"):
        scene.check_for(1)

    with pytest.raises(GuestMigratedError):
        scene.watch.check()


def test_without_a_wish_no_crash_is_looked_for(scene: Scene) -> None:
    scene.watch.begin(Options())
    scene.stub.registers_of[1] = {"rip": WORK, "eflags": 0}

    scene.check_for(60)

    assert scene.stub.breakpoints == set()


def test_the_breakpoint_goes_when_nobody_looks_any_more(scene: Scene) -> None:
    scene.watch.begin(Options(hang_timeout_s=10))
    scene.watch.end()

    assert (scene.stub.breakpoints, scene.stub.is_running) == (set(), True)


def test_a_kernel_without_panic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, panic=None)

    with pytest.raises(TargetError, match="no function `panic`"):
        scene.watch.begin(Options(hang_timeout_s=10))


def test_a_kernel_that_logs_no_end_is_given_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, kmsg_dump=None)
    scene.watch.begin(Options(hang_timeout_s=10))
    scene.stub.stops_at = [(1, PANIC)]

    with pytest.raises(GuestCrashedError):
        scene.check_for(1)

    assert not scene.stub.is_running
