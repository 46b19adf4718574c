"""Effects of handlers on a vCPU that waits, hit by hit."""

import time
from dataclasses import dataclass, field

import pytest

from kprobes.errors import MemoryFault
from kprobes.handlers.arguments import EntryArguments
from kprobes.handlers.calling import Report
from kprobes.handlers.dispatch import Dispatch
from kprobes.handlers.probe import FaultHandler, Handler, Kprobe, PostHandler
from kprobes.handlers.registers import Registers
from kprobes.model.upcall import WaitingVcpu
from tests.build.handled import RODATA, STACK, Handled, make_handled, make_place
from tests.build.kernel import TEXT

OURS = 0xFFFF_FFFF_C000_0100
"""Where a vCPU goes on if nobody says otherwise."""


@dataclass
class Served:
    """One address with handlers, and a vCPU there."""

    probes: list[Kprobe]
    is_nop: bool = True
    told: list[str] = field(default_factory=list[str])
    made: Handled = field(default_factory=make_handled)

    def __post_init__(self) -> None:
        self.vcpu = self.made.vcpu(ip=OURS)
        place = make_place(is_nop=self.is_nop)
        self.dispatch = Dispatch(
            live=self.made.live,
            place=place,
            arguments=EntryArguments(place, self.made.live),
            probes=self.probes,
            report=Report(self.told.append),
        )

    def before(self) -> WaitingVcpu:
        self.dispatch.before(self.vcpu)
        return self.vcpu

    def after(self) -> WaitingVcpu:
        self.dispatch.after(self.vcpu)
        return self.vcpu


def pre(handler: Handler, *, fault_handler: FaultHandler | None = None) -> Kprobe:
    return Kprobe(symbol_name="vfs_read", pre_handler=handler, fault_handler=fault_handler)


def post(handler: PostHandler) -> Kprobe:
    return Kprobe(symbol_name="vfs_read", post_handler=handler)


def test_changed_registers_go_back_and_ip_does_not_without_a_true_answer() -> None:
    def handler(probe: Kprobe, regs: Registers) -> None:
        assert regs.ip == TEXT + 1
        regs.ax, regs.flags, regs.sp = 5, 0x46, STACK + 8
        regs.ip = TEXT

    vcpu = Served([pre(handler)]).before()

    found = [vcpu.registers[name] for name in ("ax", "flags", "sp", "ip")]
    assert found == [5, 0x46, STACK + 8, OURS]


def test_a_true_answer_sends_the_cpu_to_ip_and_ends_the_round() -> None:
    def handler(probe: Kprobe, regs: Registers) -> bool:
        regs.ip = TEXT + 0x10
        return True

    first, second = pre(handler), pre(handler)
    vcpu = Served([first, second]).before()

    assert vcpu.registers["ip"] == TEXT + 0x10
    assert (first.hits, second.hits) == (1, 0)


def test_the_next_handler_sees_what_the_one_before_has_changed() -> None:
    def handler(probe: Kprobe, regs: Registers) -> None:
        regs.ax += 1

    served = Served([pre(handler), pre(handler)])
    start = served.vcpu.registers["ax"]

    assert served.before().registers["ax"] == start + 2


@pytest.mark.parametrize(("is_nop", "ip"), [(True, TEXT + 5), (False, OURS)])
def test_a_post_handler_sees_where_the_cpu_goes_on(is_nop: bool, ip: int) -> None:
    seen: list[tuple[int, int]] = []
    served = Served([post(lambda p, regs, flags: seen.append((regs.ip, flags)))], is_nop)

    vcpu = served.after()

    assert seen == [(ip, 0)]
    assert vcpu.registers["ip"] == OURS


def test_a_post_handler_may_send_the_cpu_elsewhere() -> None:
    def handler(probe: Kprobe, regs: Registers, flags: int) -> None:
        regs.ip = TEXT + 0x20
        regs.ax = 9

    vcpu = Served([post(handler)]).after()

    assert (vcpu.registers["ip"], vcpu.registers["ax"]) == (TEXT + 0x20, 9)


def _unset(probe: Kprobe, regs: Registers) -> bool:
    regs.ax = 1
    return True


def _data(probe: Kprobe, regs: Registers) -> bool:
    regs.ax, regs.ip = 1, RODATA
    return True


def _user(probe: Kprobe, regs: Registers) -> bool:
    regs.ax, regs.ip = 1, 0x40_0000
    return True


def _wild(probe: Kprobe, regs: Registers) -> bool:
    regs.ax, regs.ip = 1, 1 << 60
    return True


def _lower(probe: Kprobe, regs: Registers) -> None:
    regs.ax, regs.sp = 1, regs.sp - 8


def _broken(probe: Kprobe, regs: Registers) -> None:
    regs.ax = 1
    raise KeyError("x")


def _exiting(probe: Kprobe, regs: Registers) -> None:
    regs.ax = 1
    raise SystemExit


@pytest.mark.parametrize(
    ("handler", "what"),
    [
        (_unset, "did not set regs.ip"),
        (_data, "is not code"),
        (_user, "is not code"),
        (_wild, "is not code"),
        (_lower, "regs.sp may not be lowered"),
        (_broken, "KeyError: 'x'"),
        (_exiting, "SystemExit"),
    ],
)
def test_what_cannot_be_done_changes_nothing_and_is_told_once(handler: Handler, what: str) -> None:
    probe = pre(handler)
    served = Served([probe])
    before = dict(served.vcpu.registers)

    served.before()
    served.before()

    assert served.vcpu.registers == before
    assert (probe.errors, len(served.told)) == (2, 1)
    assert served.told[0].startswith(f"vfs_read: pre_handler at {__file__}:")
    assert what in served.told[0]


def _faulting(probe: Kprobe, regs: Registers) -> None:
    regs.ax = 1
    probe.symbol_name = str(regs.user.read(0x18, 8))


def test_a_fault_that_is_handled_is_no_error() -> None:
    faults: list[int] = []

    def handled(probe: Kprobe, regs: Registers, fault: MemoryFault) -> bool:
        faults.append(fault.addr)
        return True

    probe = pre(_faulting, fault_handler=handled)
    served = Served([probe])

    assert served.before().registers["ax"] == 1
    assert (faults, probe.errors, served.told) == ([0x18], 0, [])


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_fault_that_is_not_handled_is_an_error(is_broken: bool) -> None:
    def handled(probe: Kprobe, regs: Registers, fault: MemoryFault) -> bool:
        return bool(1 // (not is_broken))

    def unwilling(probe: Kprobe, regs: Registers, fault: MemoryFault) -> bool:
        return False

    probe = pre(_faulting, fault_handler=handled if is_broken else unwilling)
    served = Served([probe])

    assert served.before().registers["ax"] != 1
    assert probe.errors == 1
    word = "fault_handler" if is_broken else "pre_handler"
    assert served.told[0].startswith(f"vfs_read: {word} at {__file__}:")


def test_what_is_disabled_is_not_called() -> None:
    probe = pre(_broken)
    probe.is_enabled = False

    Served([probe]).before()

    assert (probe.hits, probe.errors) == (0, 0)


def test_a_handler_that_took_too_long_is_told_of() -> None:
    probe = Kprobe(
        symbol_name="vfs_read", pre_handler=lambda probe, regs: time.sleep(0.02), timeout_s=0.01
    )
    served = Served([probe])

    served.before()

    assert probe.errors == 0
    assert "took longer than 0.01 s" in served.told[0]
