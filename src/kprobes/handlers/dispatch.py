"""One hit to the handlers of all probes at its address, and what they want back to the vCPU."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kprobes.errors import MemoryFault
from kprobes.handlers.kprobe import Kprobe
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.place import HandlerPlace
from kprobes.handlers.registers import Hit, Registers
from kprobes.handlers.report import Report
from kprobes.model.upcall import Waiting

_PRE, _POST, _FAULT = "pre_handler", "post_handler", "fault_handler"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    # Whether a handler, or its fault_handler, was satisfied, and what the handler returned.
    is_well: bool
    returned: object = None


_FAILED = _Outcome(is_well=False)


@dataclass(slots=True, kw_only=True)
class Dispatch:
    """Serves the hits of one address.

    A handler that fails changes nothing: the vCPU goes on as if it had not been called.

    Attributes:
        live: the kernel.
        place: of the probes.
        probes: in the order of their handlers.
        report: of errors.
    """

    live: LiveKernel
    place: HandlerPlace
    probes: Sequence[Kprobe]
    report: Report

    def before(self, waiting: Waiting) -> None:
        """Run the pre_handlers, until one sends the CPU elsewhere."""
        arch = self.live.guest.arch
        for probe in self._asking(_PRE):
            regs = self._registers(waiting, self.place.addr + arch.hit_shift)
            outcome = self._call(probe, _PRE, regs)
            is_elsewhere = outcome.is_well and bool(outcome.returned)
            if outcome.is_well and self._is_possible(probe, _PRE, regs, is_elsewhere=is_elsewhere):
                _give(regs, waiting)
                if is_elsewhere:
                    waiting.registers["ip"] = regs.ip
                    return

    def after(self, waiting: Waiting) -> None:
        """Run the post_handlers."""
        for probe in self._asking(_POST):
            behind = self.place.behind
            regs = self._registers(waiting, waiting.registers["ip"] if behind is None else behind)
            outcome = self._call(probe, _POST, regs, 0)
            is_elsewhere = "ip" in regs.changed_
            if outcome.is_well and self._is_possible(probe, _POST, regs, is_elsewhere=is_elsewhere):
                _give(regs, waiting)
                if is_elsewhere:
                    waiting.registers["ip"] = regs.ip

    def _asking(self, word: str) -> list[Kprobe]:
        return [each for each in self.probes if each.is_enabled and getattr(each, word) is not None]

    def _registers(self, waiting: Waiting, ip: int) -> Registers:
        place, live = self.place, self.live
        hit = Hit(
            live=live,
            waiting=waiting,
            module=place.module,
            constants=place.constants(live.guest.arch),
            arguments=partial(place.arguments, live),
        )
        return Registers(hit, ip=ip)

    def _call(self, probe: Kprobe, word: str, regs: Registers, *rest: int) -> _Outcome:
        probe.hits += 1
        began = time.monotonic()
        try:
            returned = getattr(probe, word)(probe, regs, *rest)
        except MemoryFault as fault:
            return self._fault(probe, word, regs, fault)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user's: anything
            self.report.error(probe, word, error)
            return _FAILED
        if time.monotonic() - began > probe.timeout_s:
            what = f"took longer than {probe.timeout_s:g} s: the CPU had gone on without it"
            self.report.notice(probe, word, what)
        return _Outcome(is_well=True, returned=returned)

    def _fault(self, probe: Kprobe, word: str, regs: Registers, fault: MemoryFault) -> _Outcome:
        if probe.fault_handler is None:
            self.report.error(probe, word, fault)
            return _FAILED
        try:
            is_well = bool(probe.fault_handler(probe, regs, fault))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user's: anything
            self.report.error(probe, _FAULT, error)
            return _FAILED
        if not is_well:
            self.report.error(probe, word, fault)
        return _Outcome(is_well=is_well)

    def _is_possible(
        self, probe: Kprobe, word: str, regs: Registers, *, is_elsewhere: bool
    ) -> bool:
        what = ""
        if regs.sp < regs.hit_.waiting.registers["sp"]:
            what = "regs.sp may not be lowered: what is below belongs to interrupts"
        elif is_elsewhere and "ip" not in regs.changed_:
            what = "returned something true, but did not set regs.ip: where should the CPU go on?"
        elif is_elsewhere and not self.live.is_code(regs.ip):
            what = f"regs.ip = {regs.ip:#x} is no code: the instruction was run instead"
        if what:
            self.report.wrong(probe, word, what)
        return not what


def _give(regs: Registers, waiting: Waiting) -> None:
    for name in regs.changed_ - {"ip"}:
        waiting.registers[name] = regs[name]
