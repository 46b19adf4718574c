"""One hit to the handlers of all probes at its address, and what they want back to the vCPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kprobes.handlers.calling import Outcome, call_handler, changes, why_not
from kprobes.handlers.kprobe import Kprobe
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.place import HandlerPlace
from kprobes.handlers.registers import Hit, Registers
from kprobes.handlers.report import Report
from kprobes.model.upcall import Waiting

_PRE, _POST = "pre_handler", "post_handler"


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
                waiting.registers |= changes(regs)
                if is_elsewhere:
                    waiting.registers["ip"] = regs.ip_
                    return

    def after(self, waiting: Waiting) -> None:
        """Run the post_handlers."""
        for probe in self._asking(_POST):
            behind = self.place.behind
            regs = self._registers(waiting, waiting.registers["ip"] if behind is None else behind)
            outcome = self._call(probe, _POST, regs, 0)
            is_elsewhere = regs.pc_ in regs.changed_
            if outcome.is_well and self._is_possible(probe, _POST, regs, is_elsewhere=is_elsewhere):
                waiting.registers |= changes(regs)
                if is_elsewhere:
                    waiting.registers["ip"] = regs.ip_

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

    def _call(self, probe: Kprobe, word: str, regs: Registers, *rest: int) -> Outcome:
        probe.hits += 1
        handler = probe.fault_handler
        on_fault = None if handler is None else partial(handler, probe, regs)
        return call_handler(self.report, probe, word, probe, regs, *rest, on_fault=on_fault)

    def _is_possible(
        self, probe: Kprobe, word: str, regs: Registers, *, is_elsewhere: bool
    ) -> bool:
        what = why_not(regs, is_elsewhere=is_elsewhere)
        if is_elsewhere and regs.pc_ not in regs.changed_:
            what = (
                f"returned something true, but did not set regs.{regs.pc_}: "
                "where should the CPU go on?"
            )
        if what:
            self.report.wrong(probe, word, what)
        return not what
