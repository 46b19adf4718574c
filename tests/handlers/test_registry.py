"""Registering probes over an engine that only notes what it is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kprobes.errors import RefusedError, UsageError
from kprobes.handlers import signature
from kprobes.handlers.arguments import HandlerPlace
from kprobes.handlers.probe import Instance, Kprobe, Kretprobe
from kprobes.handlers.registry import Registry
from kprobes.model.upcall import Upcall
from kprobes.units import Addr
from tests.build.handled import make_handled, make_place


@dataclass
class FakeEngine:
    """Implements ``registry.Engine``.

    Attributes:
        armed: what is armed now at single instructions.
        at_returns: what is at returns of functions.
        refuses: a place that cannot be armed.
        missed: by number.
    """

    armed: Sequence[Upcall] = ()
    refuses: int = 0
    missed: dict[int, int] = field(default_factory=dict[int, int])
    at_returns: Sequence[Upcall] = ()
    cpus: int = 2

    def find_place(self, text: str) -> HandlerPlace:
        name, _, offset = text.partition("+")
        return make_place(name, offset=int(offset or "0", 16), is_nop=not offset)

    def arm_upcalls(self, at_sites: Sequence[Upcall], at_returns: Sequence[Upcall]) -> None:
        if any(upcall.addr == self.refuses for upcall in (*at_sites, *at_returns)):
            raise RefusedError("not there")
        self.armed, self.at_returns = at_sites, at_returns

    def missed_upcall(self, number: int) -> int:
        return self.missed.get(number, 0)

    def caller_of(self, slot: Addr, held: Addr) -> Addr:
        del slot
        return held


def make_registry() -> tuple[Registry, FakeEngine]:
    engine = FakeEngine()
    return Registry(engine, make_handled().live), engine


def make_kprobe(
    name: str = "vfs_read", *, offset: int = 0, has_post: bool = False, timeout_s: float = 1.0
) -> Kprobe:
    return Kprobe(
        symbol_name=name,
        offset=offset,
        pre_handler=lambda probe, regs: None,
        post_handler=(lambda probe, regs, flags: None) if has_post else None,
        timeout_s=timeout_s,
    )


def shown(engine: FakeEngine) -> list[tuple[int, int, bool, float]]:
    base = make_place("vfs_read").addr
    return [(u.number, u.addr - base, u.is_after, u.timeout_s) for u in engine.armed]


def test_probes_of_one_address_share_their_upcalls() -> None:
    registry, engine = make_registry()

    registry.register([make_kprobe(timeout_s=2), make_kprobe(has_post=True), make_kprobe("many")])

    assert shown(engine) == [(0, 0, False, 2), (1, 0, True, 1), (2, 0x300, False, 1)]
    assert len(registry.probes) == 3


def test_the_newest_is_called_first() -> None:
    registry, engine = make_registry()
    calls: list[str] = []
    probes = [
        Kprobe(symbol_name="vfs_read", pre_handler=lambda probe, regs: calls.append("old")),
        Kprobe(symbol_name="vfs_read", pre_handler=lambda probe, regs: calls.append("new")),
    ]

    registry.register(probes)
    engine.armed[0].serve(make_handled().vcpu())

    assert calls == ["new", "old"]


def test_what_is_refused_leaves_all_as_it_was() -> None:
    registry, engine = make_registry()
    registry.register([make_kprobe()])
    before, engine.refuses = engine.armed, make_place("many").addr

    fine, refused = make_kprobe("wordy"), make_kprobe("many")
    with pytest.raises(RefusedError):
        registry.register([fine, refused])

    assert engine.armed is before
    assert (len(registry.probes), fine.is_registered, fine.addr) == (1, False, None)
    registry.register([fine])
    assert [number for number, *_ in shown(engine)] == [0, 1]


def test_a_probe_is_registered_once() -> None:
    registry, _ = make_registry()
    probe = make_kprobe()

    with pytest.raises(UsageError, match="registered already"):
        registry.register([probe, probe])
    registry.register([probe])
    with pytest.raises(UsageError, match="registered already"):
        registry.register([probe])


def test_unregistered_probes_leave_and_may_come_back() -> None:
    registry, engine = make_registry()
    probe, other = make_kprobe(has_post=True), make_kprobe("many")
    registry.register([probe, other])
    addr = probe.addr

    probe.unregister()

    assert shown(engine) == [(2, 0x300, False, 1)]
    assert (probe.is_registered, probe.addr) == (False, addr)
    registry.register([probe])
    assert sorted(number for number, *_ in shown(engine)) == [0, 1, 2]
    with pytest.raises(UsageError, match="is not registered"):
        registry.unregister(probe, make_kprobe())
    assert probe.is_registered


def test_misses_count_from_the_registration_on_and_stay_known() -> None:
    registry, engine = make_registry()
    engine.missed = {0: 5, 1: 7}
    probe = make_kprobe(has_post=True)
    registry.register([probe])
    assert probe.nmissed == 0

    engine.missed = {0: 6, 1: 9}
    assert probe.nmissed == 3
    probe.disable()
    assert probe.nmissed == 3
    probe.unregister()
    engine.missed = {0: 60}
    assert probe.nmissed == 3


def test_disabled_probes_are_not_armed() -> None:
    registry, engine = make_registry()
    probe, other = make_kprobe(), make_kprobe(has_post=True)
    registry.register([probe, other])

    other.disable()
    assert shown(engine) == [(0, 0, False, 1)]
    probe.disable()
    assert shown(engine) == []
    other.enable()
    assert shown(engine) == [(0, 0, False, 1), (1, 0, True, 1)]


def test_a_handler_may_disable_but_not_change_what_is_armed() -> None:
    registry, engine = make_registry()
    errors: list[str] = []

    def handler(probe: Kprobe, regs: object) -> None:
        for act in (probe.unregister, lambda: registry.register([make_kprobe("many")])):
            with pytest.raises(UsageError) as caught:
                act()
            errors.append(str(caught.value))
        probe.disable()

    probe = Kprobe(symbol_name="vfs_read", pre_handler=handler)
    registry.register([probe])
    before = engine.armed
    before[0].serve(make_handled().vcpu())
    before[0].serve(make_handled().vcpu())

    assert engine.armed is before
    assert (probe.hits, probe.is_enabled, probe.errors) == (1, False, 0)
    assert all("a handler cannot" in error for error in errors)
    probe.enable()
    assert engine.armed is not before


def test_a_probe_is_unregistered_when_its_block_ends() -> None:
    registry, engine = make_registry()
    probe = make_kprobe()
    registry.register([probe])

    with probe as entered:
        assert entered.is_registered
    with pytest.raises(UsageError), probe:
        pass

    assert shown(engine) == []


def make_kretprobe(
    name: str = "vfs_read", *, has_entry: bool = False, offset: int = 0
) -> Kretprobe:
    def nothing(instance: Instance, regs: object) -> None: ...

    return Kretprobe(
        symbol_name=name,
        offset=offset,
        handler=nothing,
        entry_handler=nothing if has_entry else None,
    )


def test_a_return_probe_is_asked_at_returns_and_where_it_keeps_calls_at_the_entry() -> None:
    registry, engine = make_registry()

    registry.register([make_kprobe(), make_kretprobe(has_entry=True), make_kretprobe("many")])

    assert [(n, at) for n, at, *_ in shown(engine)] == [(0, 0), (1, 0)]
    assert [(each.number, each.addr) for each in engine.at_returns] == [
        (2, make_place("vfs_read").addr),
        (3, make_place("many").addr),
    ]


def test_return_probes_of_one_function_share_their_upcalls_and_numbers() -> None:
    registry, engine = make_registry()
    first, second = make_kretprobe(has_entry=True), make_kretprobe()
    registry.register([first, second])
    engine.missed = {0: 2, 1: 3}

    assert (len(engine.armed), len(engine.at_returns)) == (1, 1)
    assert (first.nmissed, second.nmissed) == (5, 3)
    first.disable()
    assert (len(engine.armed), len(engine.at_returns)) == (0, 1)


def test_a_return_probe_has_the_kernel_s_number_of_instances_unless_it_says_another() -> None:
    registry, engine = make_registry()
    engine.cpus = 16
    usual, own = make_kretprobe(), make_kretprobe("many")
    own.maxactive = 3

    registry.register([usual, own])

    assert (usual.maxactive, own.maxactive) == (32, 3)
    assert (usual.instances.limit, own.instances.limit) == (32, 3)


def test_calls_that_found_no_instance_are_missed_until_it_is_registered_again() -> None:
    registry, _ = make_registry()
    probe = make_kretprobe(has_entry=True)
    registry.register([probe])
    probe.instances.missed = 4

    assert probe.nmissed == 4
    probe.unregister()
    assert probe.nmissed == 4
    registry.register([probe])
    assert probe.nmissed == 0


def test_returns_are_probed_at_entries_only() -> None:
    registry, engine = make_registry()

    with pytest.raises(RefusedError, match=r"vfs_read\+0x8/0x40 is not where vfs_read is entered"):
        registry.register([make_kretprobe(offset=8)])

    assert (registry.probes, engine.at_returns) == ((), ())


@pytest.mark.parametrize("decorator", [signature.kprobe, signature.entry, signature.returns])
def test_a_decorator_without_the_name_of_a_function_is_told(decorator: Any) -> None:
    registry, engine = make_registry()

    with pytest.raises(
        UsageError, match=r'takes the name of a kernel function, .*: @kernel\.\w+\("'
    ):
        decorator(registry, print, {})

    assert not engine.armed


def test_what_is_registered_is_shown_and_in_which_kernel() -> None:
    registry, _ = make_registry()
    registry.register([make_kprobe("vfs_read")])

    assert repr(registry).startswith("<Registry of [<Kprobe ")
    assert repr(registry.live).startswith("<LiveKernel of Linux ")
