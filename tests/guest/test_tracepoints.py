"""Tracepoints that call us: one function each, asked for once, and let go before code is freed."""

from contextlib import AbstractContextManager, nullcontext

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import RefusedError, TargetError
from kprobes.guest import tracepoints
from kprobes.guest.allocations import Allocation, AllocationLog, Call, Kind
from kprobes.guest.arena import HEAD_SIZE
from kprobes.guest.guest import GuestMemory
from kprobes.guest.tracepoints import Tracepoints
from kprobes.model.kernel import Kernel
from kprobes.units import Addr
from tests.build.guest import CODE, DATA, make_arena, make_guest
from tests.build.kernel import TEXT, make_kernel, symbol

_FUNCS = 64
_CALLED = (
    *("tracepoint_probe_register", "tracepoint_probe_unregister", "synchronize_rcu"),
    *("synchronize_srcu", "synchronize_rcu_tasks_trace"),
)
_ADDRS = {name: TEXT + 0x100 * n for n, name in enumerate(_CALLED, 1)}
_GRACE = list(_CALLED[2:])
_FIRST, _SECOND = Addr(DATA), Addr(DATA + 0x100)
_LISTS = {_FIRST: DATA + 0x400, _SECOND: DATA + 0x600}
_ARENA = make_arena()


class FakeInjector:
    """Its task keeps the lists of who listens as the kernel's functions do, or refuses."""

    def __init__(self, memory: GuestMemory, allocations: AllocationLog, refused: int = -1) -> None:
        self.memory = memory
        self.allocations = allocations
        self.called: list[str] = []
        self.is_calling = False
        self._refused = refused

    def task(self) -> AbstractContextManager["FakeInjector"]:
        return nullcontext(self)

    def call(self, function: int, *args: int, allocates: Allocation | None = None) -> int:
        name = next(name for name, addr in _ADDRS.items() if addr == function)
        self.allocations.begin(Call(frame=1, trap=2, allocates=allocates))
        result = 0
        if name == _CALLED[0]:
            result = self._register(*args)
        elif name == _CALLED[1]:
            self.memory.set_u64(args[0] + _FUNCS, 0)
        self.called.append(name)
        self.allocations.end(result)
        return result

    def _register(self, tracepoint: int, function: int, data: int) -> int:
        assert function == data
        if len(self.called) == self._refused:
            return -12 & 0xFFFF_FFFF
        at = _LISTS[Addr(tracepoint)]
        self.memory.set_u64(at, function)
        self.memory.set_u64(at + 24, 0)
        self.memory.set_u64(tracepoint + _FUNCS, at)
        return 0


class Scene:
    """A guest with two tracepoints."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, refused: int = -1, has_types: bool = True
    ) -> None:
        made = make_guest(["p f"])
        self.memory, self.allocations = made.guest.memory, AllocationLog()
        self.kernel = kernel(has_types=has_types)
        for tracepoint in _LISTS:
            self.memory.set_u64(tracepoint + _FUNCS, 0)
        self.injector = FakeInjector(self.memory, self.allocations, refused)

        def injector(*_: object) -> FakeInjector:
            return self.injector

        monkeypatch.setattr(tracepoints, "CallInjector", injector)
        guest = replace(made.guest, kernel=self.kernel)
        self.points = Tracepoints(guest, _ARENA, self.allocations)

    @property
    def called(self) -> list[str]:
        return self.injector.called


def kernel(*, has_types: bool) -> Kernel:
    """Return one with the functions that are called."""
    symbols = [symbol(name, addr) for name, addr in _ADDRS.items()]
    symbols += [symbol("tracepoint_srcu", TEXT + 0x8000, type="D")]
    symbols += [symbol("__tracepoint_first", _FIRST, type="D", size=0x80)]
    return make_kernel(symbols, types={"tracepoint.funcs": (_FUNCS, 8)} if has_types else None)


def test_each_calls_a_function_of_its_own_that_does_nothing_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)

    assert scene.points.switch_on([_FIRST, _SECOND])

    places = [scene.points.place(each) for each in (_FIRST, _SECOND)]
    assert places[0] != places[1]
    for place in places:
        assert _ARENA.listeners < place < CODE + HEAD_SIZE
        assert scene.memory.read(place, 6) == X86_64.site.nops[0] + b"\xc3"
        assert scene.memory.read(place - 4, 4) == X86_64.patch.landing_pad
    assert [each.kind for each in scene.allocations.live] == [Kind.TRACEPOINT] * 2


def test_who_calls_us_already_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.points.switch_on([_FIRST])

    assert not scene.points.switch_on([_FIRST])
    assert scene.points.switch_on([_FIRST, _SECOND])

    assert scene.called == [_CALLED[0]] * 2


def test_too_many_are_refused_before_any_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    with pytest.raises(RefusedError, match="33 tracepoints: at most 32"):
        scene.points.switch_on([Addr(DATA + 8 * n) for n in range(33)])

    assert scene.called == []


def test_one_that_the_guest_refuses_is_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, refused=0)

    with pytest.raises(TargetError, match=r"refused to switch __tracepoint_first.* on: error 12"):
        scene.points.switch_on([_FIRST])

    assert _CALLED[1] not in scene.called
    assert scene.allocations.is_empty


def test_all_or_none_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, refused=1)

    with pytest.raises(TargetError):
        scene.points.switch_on([_FIRST, _SECOND])

    assert scene.called.count(_CALLED[1]) == 1
    assert scene.memory.u64(_FIRST + _FUNCS) == 0
    assert scene.allocations.is_empty


def test_when_nobody_is_on_the_way_to_it_a_function_is_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.points.switch_on([_FIRST])
    place = scene.points.place(_FIRST)

    assert scene.points.switch_off([_FIRST])
    assert not scene.points.switch_off([_FIRST])

    assert scene.called[1:] == [_CALLED[1], *_GRACE]
    assert scene.allocations.is_empty
    scene.points.switch_on([_SECOND])
    assert scene.points.place(_SECOND) == place


def test_of_several_all_are_let_go_before_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.points.switch_on([_FIRST, _SECOND])

    assert scene.points.switch_off([_FIRST, _SECOND])

    assert scene.called[2:] == [_CALLED[1], _CALLED[1], *_GRACE]


def test_where_nothing_tells_who_listens_it_is_taken_away_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, has_types=False)
    scene.points.switch_on([_FIRST])
    scene.memory.set_u64(_FIRST + _FUNCS, 0)

    scene.points.switch_off([_FIRST])

    assert _CALLED[1] in scene.called
