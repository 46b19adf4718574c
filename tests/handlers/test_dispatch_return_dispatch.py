"""Handlers at returns: what they see and do, call by call."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.errors import UsageError
from kprobes.handlers.arguments import EntryArguments
from kprobes.handlers.calling import Report
from kprobes.handlers.dispatch import ReturnDispatch
from kprobes.handlers.probe import Instance, Kretprobe, ReturnHandler
from kprobes.handlers.registers import Registers
from kprobes.model.upcall import WaitingVcpu
from kprobes.units import Addr
from tests.build.handled import DATA, RODATA, STACK, TASK, Handled, make_handled, make_place
from tests.build.kernel import TEXT

RET, CALLER, TRAMPOLINE = TEXT + 0x30, TEXT + 0x900, TEXT + 0x7000
SLOT = STACK


@dataclass
class Served:
    """One function with return probes, and calls of it."""

    probes: list[Kretprobe]
    told: list[str] = field(default_factory=list[str])
    made: Handled = field(default_factory=make_handled)
    callers: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        for probe in self.probes:
            probe.start(1)
        place = make_place()
        self.dispatch = ReturnDispatch(
            live=self.made.live,
            place=place,
            arguments=EntryArguments(place, self.made.live),
            probes=self.probes,
            report=Report(self.told.append),
            caller_of=self.caller_of,
        )

    def caller_of(self, slot: Addr, held: Addr) -> Addr:
        return Addr(self.callers.get(slot, held))

    def enter(self, slot: int = SLOT, **registers: int) -> WaitingVcpu:
        vcpu = self.made.vcpu(sp=slot, ip=make_place().addr, **registers)
        self.dispatch.entered(vcpu)
        return vcpu

    def leave(self, slot: int = SLOT, *, raw: int = CALLER, **registers: int) -> WaitingVcpu:
        self.made.put(slot, raw)
        vcpu = self.made.vcpu(sp=slot, ip=RET, **registers)
        self.dispatch.returned(vcpu)
        return vcpu


def nothing(instance: Instance, regs: Registers) -> None: ...


def probe(handler: ReturnHandler, entry: ReturnHandler | None = None, **fields: Any) -> Kretprobe:
    return Kretprobe(symbol_name="vfs_read", handler=handler, entry_handler=entry, **fields)


def test_the_registers_are_those_after_the_return() -> None:
    seen: list[tuple[int, ...]] = []

    def handler(instance: Instance, regs: Registers) -> None:
        seen.append((regs.ip, regs.sp, regs.orig_ax, regs.cs, regs.retval))

    vcpu = Served([probe(handler)]).leave(ax=7)

    assert seen == [(CALLER, SLOT + 8, (1 << 64) - 1, 0x10, 7)]
    assert (vcpu.registers["ip"], vcpu.registers["sp"]) == (RET, SLOT)


def test_the_true_caller_is_shown_where_the_return_was_taken_over() -> None:
    seen: list[int] = []
    served = Served([probe(lambda instance, regs: seen.append(regs.ip))])
    served.callers[SLOT] = CALLER

    served.leave(raw=TRAMPOLINE)

    assert seen == [CALLER]


def test_where_a_register_has_the_return_address_it_is_read_there() -> None:
    seen: list[tuple[int, ...]] = []
    held: list[int] = []

    def handler(instance: Instance, regs: Registers) -> None:
        seen.append((regs.pc, regs.lr, regs.sp, regs.retval))

    served = Served([probe(handler)], made=make_handled(arch=AARCH64))
    served.dispatch.caller_of = lambda slot, link: Addr(held.append(link) or CALLER)
    # Signed, and taken over.
    vcpu = served.leave(raw=0, x0=7, x30=TRAMPOLINE & ~(0xFF << 48))

    assert held == [TRAMPOLINE]
    assert seen == [(CALLER, CALLER, SLOT, 7)]
    assert (vcpu.registers["ip"], vcpu.registers["sp"]) == (RET, SLOT)
    assert vcpu.registers["x30"] == TRAMPOLINE & ~(0xFF << 48)


def test_arguments_are_not_there_any_more() -> None:
    errors: list[str] = []

    def handler(instance: Instance, regs: Registers) -> None:
        with pytest.raises(UsageError) as caught:
            _ = regs.args
        errors.append(str(caught.value))

    Served([probe(handler)]).leave()

    assert errors == ["arguments are known only at a function's entry: to an entry_handler"]


def test_what_is_returned_is_not_known_at_the_entry() -> None:
    def entry(instance: Instance, regs: Registers) -> None:
        with pytest.raises(UsageError, match="only when it returns"):
            _ = regs.retval
        instance.count = regs.args.count

    seen: list[int] = []
    served = Served([probe(lambda instance, regs: seen.append(instance.count), entry)])
    served.enter(dx=3)
    served.leave(dx=0)

    assert (seen, served.told) == ([3], [])


def _no_types(*_: object) -> None: ...


def test_without_types_what_is_returned_is_a_number_that_can_be_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def handler(instance: Instance, regs: Registers) -> None:
        seen.append(regs.retval)
        regs.retval = -13

    served = Served([probe(handler)])
    monkeypatch.setattr(type(served.made.live.guest.kernel), "types_for", _no_types)

    vcpu = served.leave(ax=5)

    assert (seen, served.told) == ([5], [])
    assert vcpu.registers["ax"] == (1 << 64) - 13


def test_what_the_function_returns_is_changed_and_the_next_handler_sees_it() -> None:
    def handler(instance: Instance, regs: Registers) -> None:
        regs.retval += 1

    vcpu = Served([probe(handler), probe(handler)]).leave(ax=5)

    assert vcpu.registers["ax"] == 7
    assert vcpu.registers["ip"] == RET


def test_a_changed_ip_is_where_the_function_returns_to() -> None:
    def handler(instance: Instance, regs: Registers) -> None:
        regs.ip = TEXT + 0x500

    vcpu = Served([probe(handler)]).leave()

    assert (vcpu.registers["ip"], vcpu.registers["sp"]) == (TEXT + 0x500, SLOT + 8)


def test_a_changed_stack_pointer_counts_too() -> None:
    def handler(instance: Instance, regs: Registers) -> None:
        regs.sp += 16

    vcpu = Served([probe(handler)]).leave()

    assert (vcpu.registers["ip"], vcpu.registers["sp"]) == (CALLER, SLOT + 24)


def _data(instance: Instance, regs: Registers) -> None:
    regs.ax, regs.ip = 1, RODATA


def _lower(instance: Instance, regs: Registers) -> None:
    regs.ax, regs.sp = 1, SLOT


def _broken(instance: Instance, regs: Registers) -> None:
    regs.ax = 1
    raise KeyError("x")


@pytest.mark.parametrize(
    ("handler", "what"),
    [(_data, "is not code"), (_lower, "may not be lowered"), (_broken, "KeyError: 'x'")],
)
def test_what_cannot_be_done_changes_nothing_and_is_told_once(
    handler: ReturnHandler, what: str
) -> None:
    failing = probe(handler)
    served = Served([failing])
    before = dict(served.leave(ax=9).registers)

    assert served.leave(ax=9).registers == before
    assert (before["ax"], before["ip"], before["sp"]) == (9, RET, SLOT)
    assert (failing.hits, failing.errors, len(served.told)) == (2, 2, 1)
    assert served.told[0].startswith(f"vfs_read: handler at {__file__}:")
    assert what in served.told[0]


def test_without_anything_kept_every_return_is_told_of() -> None:
    every = probe(nothing)
    served = Served([every])

    served.leave()
    served.leave()

    assert (every.hits, every.nmissed) == (2, 0)


def test_data_of_the_entry_is_there_at_the_return_of_the_same_call() -> None:
    seen: list[bytes] = []

    def entry(instance: Instance, regs: Registers) -> None:
        instance.data[:] = regs.dx.to_bytes(4, "little")

    def handler(instance: Instance, regs: Registers) -> None:
        seen.append(bytes(instance.data))

    served = Served([probe(handler, entry, data_size=4)])
    served.enter(SLOT, dx=1)
    served.enter(SLOT - 0x80, dx=2)
    served.leave(SLOT - 0x80)
    served.leave(SLOT)

    assert seen == [b"\2\0\0\0", b"\1\0\0\0"]


def test_a_call_that_began_before_its_probe_is_not_told_of_where_something_is_kept() -> None:
    keeping = probe(nothing, data_size=1)
    served = Served([keeping])

    served.leave()

    assert (keeping.hits, keeping.nmissed) == (0, 0)


def test_an_entry_handler_declines_with_something_true() -> None:
    declining = probe(nothing, lambda instance, regs: regs.dx)
    served = Served([declining])
    served.enter(dx=1)
    served.leave()
    served.enter(dx=0)
    served.leave()

    assert (declining.hits, declining.nmissed, declining.errors) == (1, 0, 0)


def test_an_entry_handler_that_fails_leaves_no_instance_and_changes_nothing() -> None:
    def entry(instance: Instance, regs: Registers) -> None:
        regs.di = 0
        raise RuntimeError

    failing = probe(nothing, entry)
    served = Served([failing])
    vcpu = served.enter(di=5)
    served.leave()

    assert vcpu.registers["di"] == 5
    assert (failing.hits, failing.errors) == (0, 1)
    assert served.told[0].startswith(f"vfs_read: entry_handler at {__file__}:")


def test_an_entry_handler_changes_what_the_function_gets_and_not_where_it_is() -> None:
    def entry(instance: Instance, regs: Registers) -> None:
        regs.args.count = 9
        regs.ip = TEXT

    vcpu = Served([probe(nothing, entry)]).enter(dx=1)

    assert vcpu.registers["dx"] == 9
    assert vcpu.registers["ip"] == make_place().addr


def test_more_calls_than_instances_are_missed() -> None:
    asked: list[int] = []
    small = probe(nothing, lambda instance, regs: asked.append(regs.sp), maxactive=1)
    served = Served([small])
    served.enter(SLOT)
    served.enter(SLOT - 0x80)
    served.leave(SLOT - 0x80)
    served.leave(SLOT)

    assert (small.hits, small.nmissed, asked) == (1, 1, [SLOT])


def test_a_task_that_died_inside_makes_room() -> None:
    small = probe(nothing, data_size=1, maxactive=1)
    served = Served([small])
    served.enter(SLOT)
    served.made.put(TASK + 8, 78, 4)
    served.enter(SLOT - 0x80)
    served.leave(SLOT - 0x80)

    assert (small.hits, small.nmissed) == (1, 0)


def test_calls_on_one_slot_return_newest_first() -> None:
    seen: list[int] = []

    def entry(instance: Instance, regs: Registers) -> None:
        instance.count = regs.dx

    served = Served([probe(lambda instance, regs: seen.append(instance.count), entry)])
    served.callers[SLOT] = CALLER
    served.enter(dx=1)
    served.enter(dx=2)
    served.leave(raw=TRAMPOLINE)
    served.leave()

    assert seen == [2, 1]


def test_who_is_disabled_is_not_called() -> None:
    disabled = probe(nothing)
    disabled.is_enabled = False

    Served([disabled]).leave()

    assert disabled.hits == 0


def test_a_stack_that_is_no_memory_is_left_alone() -> None:
    served = Served([probe(nothing)])
    vcpu = served.made.vcpu(sp=DATA + 0x100_0000, ip=RET)
    before = dict(vcpu.registers)

    served.dispatch.returned(vcpu)

    assert vcpu.registers == before
    assert served.told == []
