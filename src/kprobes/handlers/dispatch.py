"""One hit to the handlers of all probes at its address, and what they want back to the vCPU.

One call of a function to the handlers of all its return probes, at its entry and its return.

When Python is called for a probe, and by whom: all probes of one address together.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import cached_property, partial

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import MemoryFault, UsageError
from kprobes.handlers.arguments import Argument, EntryArguments, HandlerPlace
from kprobes.handlers.calling import Outcome, Report, call_handler, changes, why_not
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.probe import Instance, Kprobe, Kretprobe, Probe, TaskName, is_gone, name_task
from kprobes.handlers.registers import Hit, Registers
from kprobes.model.upcall import WaitingVcpu
from kprobes.units import Addr

_PRE, _POST = "pre_handler", "post_handler"


class Dispatch(Struct, kw_only=True, dict=True):
    """Serves the hits of one address.

    A handler that fails changes nothing: the vCPU goes on as if it had not been called.

    Attributes:
        live: the kernel.
        place: of the probes.
        arguments: of the function that is entered.
        probes: in the order of their handlers.
        report: of errors.
    """

    live: LiveKernel
    place: HandlerPlace
    arguments: EntryArguments
    probes: Sequence[Kprobe]
    report: Report

    def before(self, vcpu: WaitingVcpu) -> None:
        """Run the pre_handlers, until one sends the CPU elsewhere."""
        for probe in self.probes:
            if not probe.is_enabled or probe.pre_handler is None:
                continue
            regs = self._registers(vcpu, self._shown)
            outcome = self._call(probe, _PRE, regs)
            is_elsewhere = outcome.is_well and bool(outcome.returned)
            if not outcome.is_well or not (is_elsewhere or regs.is_changed_):
                continue
            if self._is_possible(probe, _PRE, regs, is_elsewhere=is_elsewhere):
                vcpu.registers |= changes(regs)
                if is_elsewhere:
                    vcpu.registers["ip"] = regs.ip_
                    return

    def after(self, vcpu: WaitingVcpu) -> None:
        """Run the post_handlers."""
        for probe in self.probes:
            if not probe.is_enabled or probe.post_handler is None:
                continue
            after_call = self.place.following
            regs = self._registers(vcpu, vcpu.registers["ip"] if after_call is None else after_call)
            outcome = self._call(probe, _POST, regs, 0)
            if not outcome.is_well or not regs.is_changed_:
                continue
            is_elsewhere = regs.pc_ in regs.changed_
            if self._is_possible(probe, _POST, regs, is_elsewhere=is_elsewhere):
                vcpu.registers |= changes(regs)
                if is_elsewhere:
                    vcpu.registers["ip"] = regs.ip_

    @cached_property
    def _shown(self) -> int:
        # The ip of a hit, as the kernel's own probes have it.
        return self.place.addr + self.live.guest.arch.hit_shift

    @cached_property
    def _constants(self) -> Mapping[str, int]:
        return self.place.constants(self.live.guest.arch)

    def _registers(self, vcpu: WaitingVcpu, ip: int) -> Registers:
        hit = Hit(
            live=self.live,
            vcpu=vcpu,
            module=self.place.module,
            constants=self._constants,
            arguments=self.arguments,
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


_ENTRY, _RETURN = "entry_handler", "handler"

CallerOf = Callable[[Addr, Addr], Addr]
"""(slot of a call, its return address) to where it came from, even if that was taken over."""


class ReturnDispatch(Struct, kw_only=True):
    """Serves the entries and returns of one function.

    A handler that fails changes nothing: the vCPU goes on as if it had not been called.

    Attributes:
        live: the kernel.
        place: of the function's entry.
        arguments: of the function that is entered.
        probes: in the order of their handlers.
        report: of errors.
        caller_of: tells where calls came from.
    """

    live: LiveKernel
    place: HandlerPlace
    arguments: EntryArguments
    probes: Sequence[Kretprobe]
    report: Report
    caller_of: CallerOf

    def entered(self, vcpu: WaitingVcpu) -> None:
        """Run the entry_handlers, and keep the calls whose return is to be told of."""
        # Only a guest whose stack or task is not memory faults: nobody has anything to do there.
        with suppress(MemoryFault):
            slot, task = vcpu.registers["sp"], name_task(self.live, vcpu.task)
            for probe in self._enabled():
                if probe.keeps:
                    probe.instances.begin(slot, task, self._begin(probe, vcpu))

    def returned(self, vcpu: WaitingVcpu) -> None:
        """Run the handlers, before the return: they see the registers after it.

        What they leave as ``ip`` is where the function returns to.
        """
        with suppress(MemoryFault):
            slot, task = Addr(vcpu.registers["sp"]), name_task(self.live, vcpu.task)
            arch, held = self.live.guest.arch, self._held(vcpu)
            caller = self.caller_of(slot, held)
            is_last = caller == held
            after_call = {"ip": int(caller), "sp": slot + arch.returns.return_address_size}
            if arch.code.call.link is not None:
                after_call[arch.code.call.link] = int(caller)
            shown = replace(vcpu, registers=vcpu.registers | after_call)
            for probe in self._enabled():
                instance = _instance(probe, slot, task, is_last=is_last)
                if instance is not None:
                    self._return(probe, instance, shown)
            if after_call.items() <= shown.registers.items():
                # By the return itself; else it is skipped.
                shown.registers |= {name: vcpu.registers[name] for name in after_call}
            vcpu.registers |= shown.registers

    def _held(self, vcpu: WaitingVcpu) -> Addr:
        # The return address as it is now, without what protects it.
        arch = self.live.guest.arch
        link, sp = arch.code.call.link, vcpu.registers["sp"]
        held = self.live.read_u64(sp) if link is None else vcpu.registers[link]
        return Addr(arch.returns.stripped(held))

    def _enabled(self) -> list[Kretprobe]:
        return [each for each in self.probes if each.is_enabled]

    def _begin(self, probe: Kretprobe, vcpu: WaitingVcpu) -> Instance | None:
        if not probe.instances.has_room(partial(is_gone, self.live)):
            probe.instances.missed += 1
            return None
        instance = Instance(probe, probe.data_size)
        if probe.entry_handler is None:
            return instance
        regs = self._at_entry(vcpu)
        outcome = call_handler(self.report, probe, _ENTRY, instance, regs)
        if not outcome.is_well or not self._is_possible(probe, _ENTRY, regs):
            return None
        vcpu.registers |= changes(regs)
        return None if outcome.returned else instance

    def _return(self, probe: Kretprobe, instance: Instance, shown: WaitingVcpu) -> None:
        regs = self._at_return(shown)
        probe.hits += 1
        outcome = call_handler(self.report, probe, _RETURN, instance, regs)
        if outcome.is_well and self._is_possible(probe, _RETURN, regs):
            shown.registers |= changes(regs) | {"ip": regs.ip_}

    def _at_entry(self, vcpu: WaitingVcpu) -> Registers:
        arch = self.live.guest.arch
        hit = Hit(
            live=self.live,
            vcpu=vcpu,
            module=self.place.module,
            constants=self.place.constants(arch),
            arguments=self.arguments,
        )
        return Registers(hit, ip=self.place.addr + arch.hit_shift)

    def _at_return(self, shown: WaitingVcpu) -> Registers:
        hit = Hit(
            live=self.live,
            vcpu=shown,
            module=self.place.module,
            constants=self.live.guest.arch.patch.constants,
            arguments=_no_arguments,
            returning=partial(self.place.known_prototype, self.live),
        )
        return Registers(hit, ip=shown.registers["ip"])

    def _is_possible(self, probe: Kretprobe, word: str, regs: Registers) -> bool:
        is_elsewhere = word == _RETURN and regs.pc_ in regs.changed_
        what = why_not(regs, is_elsewhere=is_elsewhere)
        if what:
            self.report.wrong(probe, word, what)
        return not what


def _instance(probe: Kretprobe, slot: int, task: TaskName, *, is_last: bool) -> Instance | None:
    if probe.keeps:
        return probe.instances.end(slot, task, is_last=is_last)
    return Instance(probe, 0)


def _no_arguments() -> Mapping[str, Argument]:
    raise UsageError("arguments are known only at a function's entry: to an entry_handler")


class Side(StrEnum):
    """When Python is called."""

    BEFORE = "before the instruction"
    ENTERED = "when the function is entered"
    AFTER = "after the instruction"
    RETURNED = "when the function returns"


def sides_of(probe: Probe) -> list[Side]:
    """Return when Python is called for a probe."""
    found: list[Side] = []
    if isinstance(probe, Kprobe):
        handlers = ((Side.BEFORE, probe.pre_handler), (Side.AFTER, probe.post_handler))
        found = [side for side, handler in handlers if handler is not None]
    if isinstance(probe, Kretprobe):
        found = [Side.ENTERED, Side.RETURNED] if probe.keeps else [Side.RETURNED]
    return found


def serving(
    live: LiveKernel,
    place: HandlerPlace,
    probes: Sequence[Probe],
    *,
    report: Report,
    caller_of: CallerOf,
) -> Mapping[Side, Callable[[WaitingVcpu], None]]:
    """Return what serves the hits of one address; ``probes`` in the order of their handlers."""
    arguments = EntryArguments(place, live)
    sites = Dispatch(
        live=live,
        place=place,
        arguments=arguments,
        probes=[probe for probe in probes if isinstance(probe, Kprobe)],
        report=report,
    )
    calls = ReturnDispatch(
        live=live,
        place=place,
        arguments=arguments,
        probes=[probe for probe in probes if isinstance(probe, Kretprobe)],
        report=report,
        caller_of=caller_of,
    )
    return {
        Side.BEFORE: sites.before,
        Side.ENTERED: calls.entered,
        Side.AFTER: sites.after,
        Side.RETURNED: calls.returned,
    }
