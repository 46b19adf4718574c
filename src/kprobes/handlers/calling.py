"""One call of a user's handler: what it raises is told and counted, never passed on."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kprobes.errors import MemoryFault
from kprobes.handlers.probe import Probe
from kprobes.handlers.registers import Registers
from kprobes.handlers.report import Report

FAULT = "fault_handler"

OnFault = Callable[[MemoryFault], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether a handler, or its fault_handler, was satisfied, and what the handler returned."""

    is_well: bool
    returned: object = None


FAILED = Outcome(is_well=False)


def call_handler(
    report: Report, probe: Probe, word: str, *given: object, on_fault: OnFault | None = None
) -> Outcome:
    """Call a handler.

    Args:
        report: of what goes wrong in it.
        probe: whose it is.
        word: which one: the attribute that has it.
        given: to the handler.
        on_fault: is asked about memory that is not there, or None.
    """
    began = time.monotonic()
    try:
        returned = getattr(probe, word)(*given)
    except MemoryFault as fault:
        return _fault(report, probe, word, fault, on_fault)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user's: anything
        report.error(probe, word, error)
        return FAILED
    if time.monotonic() - began > probe.timeout_s:
        what = f"took longer than {probe.timeout_s:g} s: the CPU had gone on without it"
        report.notice(probe, word, what)
    return Outcome(is_well=True, returned=returned)


def why_not(regs: Registers, *, is_elsewhere: bool) -> str:
    """Return why a CPU cannot go on with some registers, or "".

    Args:
        regs: as a handler left them.
        is_elsewhere: whether it is to go on at their instruction pointer.
    """
    if regs.sp < regs.hit_.waiting.registers["sp"]:
        return "regs.sp may not be lowered: what is below belongs to interrupts"
    if is_elsewhere and not regs.hit_.live.is_code(regs.ip_):
        return f"regs.{regs.pc_} = {regs.ip_:#x} is no code: the CPU did not go there"
    return ""


def changes(regs: Registers) -> dict[str, int]:
    """Return the registers that a handler has changed, without the instruction pointer."""
    return {name: regs[name] for name in regs.changed_ - {regs.pc_}}


def _fault(
    report: Report, probe: Probe, word: str, fault: MemoryFault, on_fault: OnFault | None
) -> Outcome:
    if on_fault is None:
        report.error(probe, word, fault)
        return FAILED
    try:
        is_well = bool(on_fault(fault))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user's: anything
        report.error(probe, FAULT, error)
        return FAILED
    if not is_well:
        report.error(probe, word, fault)
    return Outcome(is_well=is_well)
