"""The engine for one guest: definitions to armed text, and text back to what it was."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

from kprobes.drain import hits_of, nothing
from kprobes.errors import KprobesError, RefusedError, TargetError
from kprobes.guest import arena as arenas
from kprobes.guest.arena import Arena, ArenaSize
from kprobes.guest.arm import TextPatcher, silence
from kprobes.guest.clock import AnyClock, GuestClock, clock_function, open_clock
from kprobes.guest.ftrace_records import paused_between_changes
from kprobes.guest.guest import Guest
from kprobes.guest.identity import check_stopped
from kprobes.guest.inject import CallInjector
from kprobes.guest.journal import Journal
from kprobes.guest.kernel_abi import per_cpu_bases, readers, task_abi
from kprobes.guest.link import Program, Trampoline, instance_counts, instances_size
from kprobes.guest.notes import begin_notes, write_notes
from kprobes.guest.places import Places, unchecked
from kprobes.guest.prepare import Asked, Preparer, Wanted
from kprobes.guest.recorder import Recorder
from kprobes.guest.release import await_leaving, code_in_use, free, free_when_idle, unused
from kprobes.guest.stacks import find_caller, free_dead_calls, stopped_outside
from kprobes.guest.upcalls import UpcallControl, can_watch, check, watching
from kprobes.image.module_types import module_ranges, with_loaded_modules
from kprobes.model.abi import GuestAbi
from kprobes.model.definition import Definition, Kind
from kprobes.model.events import Counts, Hits
from kprobes.model.filter import Filter
from kprobes.model.plan import Plan, ReturnMethod, Strategy
from kprobes.model.resolved import RecordLayout, Resolved
from kprobes.model.upcall import Upcall, UpcallGroup
from kprobes.ports import Text
from kprobes.units import MIB, Addr

_CODE_OF_PLAN = 1024
"""Bytes of code that a plan, or a trampoline, takes on average at most."""
_AWAITED_INSTANCES = _SPARE_INSTANCES = 1 * MIB
_UNDOS_OF_PLAN, _SPARE_UNDOS = 2, 1024
"""A site and its ftrace record; what crosses pages, comes late, or has a handler."""
_POLL_S = 0.5
"""Between looks whether room was missing."""
_COVERED = "a jump cannot take their place yet; --strategy breakpoint does not need to wait"


_log = logging.getLogger(__name__)


class GuestDriver:
    """Arms and disarms probes in one guest.

    Every method may be called on a running guest and leaves it running.

    Attributes:
        guest: whose text is patched.
        plans: what is or will be armed.
        recorder: of the records; None before the first ``arm``.
        tasks: what every hit must pass to be recorded, whatever the probe; for ``prepare``.
        upcalls: what Python does at hits; for ``prepare``.
        return_upcalls: what it does at all returns of functions, by their entries; likewise.
        warn: is given what went wrong while nobody was asking, for people.
        checkpoint: called often while probes are planned and linked; it may raise to end that.
        strategy: that is forced on every probe, or None for the cheapest that is safe.
        return_method: that is forced on every return probe, or None for the cheapest one.
    """

    def __init__(
        self,
        guest: Guest,
        journal: Journal,
        size: ArenaSize,
        check: Callable[[Guest], None] = unchecked,
    ) -> None:
        """Arm nothing yet; ``check`` raises RefusedError where nothing can be probed."""
        self.guest = guest
        self.plans: Sequence[Plan] = ()
        self.recorder: Recorder | None = None
        self.tasks: Filter | None = None
        self.upcalls: Sequence[Upcall] = ()
        self.return_upcalls: Sequence[Upcall] = ()
        self.warn: Callable[[str], None] = _log.warning
        self.checkpoint: Callable[[], None] = nothing
        self.strategy: Strategy | None = None
        self.return_method: ReturnMethod | None = None
        self._journal = journal
        self._size = size
        self._check = check
        self._preparer = Preparer(guest, check)
        self._arena: Arena | None = None
        self._patcher: TextPatcher | None = None
        self._clock: Addr | None = None
        self._trampolines: Sequence[Trampoline] = ()
        self._upcall_control: UpcallControl | None = None
        self._nmissed = 0
        self._checked_s = 0.0
        self._is_held = False
        self._jiffies = b""
        self._recorded: list[Resolved] = []
        self._changing = threading.RLock()
        self._ended: KprobesError | None = None
        self._watch = (
            watching(guest, self._preparer.locate, (self._module_comes, self._module_goes))
            if can_watch(guest)
            else ()
        )

    @property
    def cpus(self) -> int:
        """How many CPUs the guest may have."""
        return len(per_cpu_bases(self.guest.memory, self.guest.kernel))

    @property
    def places(self) -> Places:
        """What resolves definitions here."""
        return self._preparer.places

    def prepare(self, definitions: Sequence[Definition]) -> Sequence[Plan]:
        """Resolve and plan, without touching the guest.

        Raises:
            DefinitionError: a definition names what this kernel has not.
            RefusedError: a function cannot be probed, or Python cannot be asked there.
        """
        check(self.guest, [*self.upcalls, *self.return_upcalls])
        self.refresh_modules()
        self._preparer.checkpoint = self.checkpoint
        self.plans = self._preparer.prepare(
            Wanted(
                definitions=tuple(definitions),
                tasks=self.tasks,
                strategy=self.strategy,
                return_method=self.return_method,
                asked=Asked(
                    at_sites=self.upcalls, at_returns=self.return_upcalls, watch=self._watch
                ),
            )
        )
        return self.plans

    @property
    def waiting(self) -> Sequence[Definition]:
        """What was prepared and waits for modules that are not loaded."""
        return tuple(self._preparer.waiting.values())

    @property
    def left_out(self) -> Sequence[RefusedError]:
        """Why functions that patterns match are not probed at their returns."""
        return self._preparer.left_out

    def arm(self, *, is_new: bool = True) -> Recorder:
        """Compile what was prepared and patch its sites: all of them, or none.

        Args:
            is_new: whether a recording begins. Else the one that goes on has the same definitions.

        Raises:
            TargetError: the guest changed a site, or has no memory; nothing is left patched.
        """
        with self._changing:
            return self._arm(is_new=is_new)

    def _arm(self, *, is_new: bool) -> Recorder:
        self.check()
        self._journal.check()
        kept = self._left()
        arena, recorder = self._allocate()
        self._journal.check()
        patcher = TextPatcher(self.guest, arena, self._abi(arena), self._journal, kept)
        patcher.note = partial(write_notes, self.guest.memory, arena, self._journal)
        programs = patcher.link(self.plans, self.checkpoint)
        layouts = _layouts(self.plans)
        if is_new:
            self._recorded.clear()
            recorder.begin(layouts)
        else:
            recorder.add(layouts)
        self._recorded += _probes(self.plans)
        patcher.register_notifier(self.plans, more=bool(self.waiting))
        # Before: what is on the disk is struck from it by whoever disarms, however far we come.
        self._patcher = patcher
        patches = patcher.stage(programs)
        self._trampolines = patcher.trampolines
        covered = [text for plan in self.plans for text in plan.site.covered]
        with (
            self._attended(arena, _groups(programs, patcher)),
            stopped_outside(self.guest, covered, otherwise=_COVERED),
        ):
            patcher.load(programs)
            patcher.arm(patches)
        if self._ended is not None:
            # Since we began; whoever gave up may have found nothing to disarm.
            self.disarm()
            raise self._ended
        return recorder

    def give_up(self, why: KprobesError) -> None:
        """Disarm for good, from any thread; ``check`` and ``arm`` raise why."""
        self._ended = why
        with suppress(KprobesError):
            # What cannot be put back now is tried, and told, by whoever closes us.
            self.disarm()

    def check(self) -> None:
        """Raise what somebody has given up for, if so."""
        if self._ended is not None:
            raise self._ended

    def check_stub(self) -> None:
        """Notice that the guest has ended, or that somebody else has stopped it.

        Raises:
            GuestGoneError: it has ended.
        """
        stub, was_held = self.guest.stub, self._is_held
        stub.wait(0)
        self._is_held = stub.is_held
        if self._is_held != was_held:
            self._journal.note_held(is_held=self._is_held)
        if self._is_held and not was_held:
            self.warn("somebody else has paused the guest; events come again when it goes on")

    def counts(self) -> Counts:
        """Return what was counted since the recording began, or in the last one."""
        if self.recorder is None:
            return Counts(recorded={}, missed={}, lost=0, damaged=0)
        return self.recorder.counts()

    def hits(self) -> list[Hits]:
        """Return what the last recording counted of every probe; of newer ones nothing yet."""
        return hits_of(self._recorded, _probes(self.plans), self.counts())

    def missed_upcall(self, number: int) -> int:
        """Return how many hits went on without Python, for whatever upcall had this number."""
        return 0 if self._upcall_control is None else self._upcall_control.missed(number)

    def free_dead_calls(self) -> None:
        """Have room again for calls in progress, where tasks that died have left too little.

        To be called often while probes are armed: it looks only when room was missing.
        """
        if time.monotonic() < self._checked_s + _POLL_S:
            return
        self._checked_s = time.monotonic()
        # Whoever arms waits for the guest, and rings must be drained meanwhile.
        if self._changing.acquire(blocking=False):
            try:
                self._free_dead_calls()
            finally:
                self._changing.release()

    def _free_dead_calls(self) -> None:
        patcher, arena, recorder = self._patcher, self._arena, self.recorder
        if patcher is None or arena is None or recorder is None or not patcher.instances:
            return
        before, self._nmissed = self._nmissed, recorder.nmissed
        if self._nmissed != before:
            with self.guest.stub.paused():
                self._journal.check()
                ranges = list(code_in_use(self.guest, self._journal.allocations))
                free_dead_calls(self.guest, patcher.instances, ranges)

    def caller_of(self, slot: Addr, held: Addr) -> Addr:
        """Return where a call came from, by its slot and what its return address is now."""
        patcher = self._patcher
        return find_caller(
            self.guest.memory, () if patcher is None else patcher.instances, slot, held
        )

    def disarm(self) -> None:
        """Put the guest's text back, verified; its records can still be drained.

        Raises:
            TargetError: somebody else changed a patched site.
        """
        with self._changing:
            if self._patcher is not None:
                with paused_between_changes(self.guest):
                    self._check_stopped()
                    count = self._patcher.disarm()
                if count:
                    self.warn(
                        f"{count} places held the guest's own bytes again: somebody else has put "
                        "them back, and there was no hit from then on"
                    )
            # Not before: what an exception has left armed is for the next attempt.
            self._patcher = None
        if self._upcall_control is not None:
            self._upcall_control.end()

    def close(self) -> None:
        """Disarm, and give the guest its memory back as soon as nothing runs in it."""
        self.disarm()
        self._arena = self._upcall_control = None
        if not self._journal.allocations.is_empty:
            with self.guest.stub.paused():
                self._check_stopped()
        free_when_idle(self.guest, self._journal.allocations, self.warn)
        self.check_guest()

    def check_guest(self) -> None:
        """Check that the guest is still the one that was attached to; to be called often.

        It stands still for a moment where its time seems to.

        Raises:
            GuestReplacedError: it was rebooted, or restored to an earlier state.
        """
        self._journal.check()
        jiffies = self.guest.kernel.symbols.find("jiffies_64")
        now = self.guest.memory.read(jiffies.addr, 8) if jiffies is not None else b""
        if now == self._jiffies:
            with self.guest.stub.paused():
                self._check_stopped()
        self._jiffies = now

    def _check_stopped(self) -> None:
        check_stopped(self._journal, self.guest.stub, self.guest.memory.ram)

    def refresh_modules(self) -> None:
        """Find out what modules the guest has now."""
        kernel = with_loaded_modules(self.guest.kernel, self.guest.memory)
        if kernel is not self.guest.kernel:
            self.guest = replace(self.guest, kernel=kernel)
            self._preparer = Preparer(self.guest, self._check)

    def _module_comes(self, record: int) -> None:
        del record
        with self._changing:
            if self._patcher is None or self.recorder is None or not self.waiting:
                return
            try:
                self._arm_late(self._patcher, self.recorder)
            except KprobesError as error:
                self.warn(str(error))

    def _arm_late(self, patcher: TextPatcher, recorder: Recorder) -> None:
        kernel = with_loaded_modules(self.guest.kernel, self.guest.memory)
        self.guest = replace(self.guest, kernel=kernel)
        plans, errors = self._preparer.late(self.guest)
        for error in errors:
            self.warn(str(error))
        try:
            programs = patcher.link(plans)
        except KprobesError:
            # Their module may come again, to another place.
            self._preparer.wait_again(plans)
            raise
        recorder.add(_layouts(plans))
        self._recorded += _probes(plans)
        patches = patcher.stage(programs)
        self._trampolines = patcher.trampolines
        # Whoever looks a breakpoint up must not find half of another table.
        covered = [patcher.lookup, *(text for plan in plans for text in plan.site.covered)]
        with stopped_outside(self.guest, covered, otherwise=_COVERED):
            patcher.load(programs)
            patcher.arm(patches)
        self.plans = [*self.plans, *plans]

    def _module_goes(self, record: int) -> None:
        with self._changing:
            ranges = module_ranges(self.guest.kernel, record)
            gone = [plan for plan in self.plans if _is_inside(plan.site.addr, ranges)]
            if self._patcher is None or not gone:
                return
            try:
                with paused_between_changes(self.guest):
                    self._patcher.disarm_ranges(ranges)
            except KprobesError as error:
                self.warn(str(error))
            self.plans = [plan for plan in self.plans if plan not in gone]
            self._preparer.wait_again(gone)

    @contextmanager
    def _attended(self, arena: Arena, groups: Sequence[UpcallGroup]) -> Generator[None]:
        # From before the first hit on; not when there will be none.
        if groups and self._upcall_control is None:
            self._upcall_control = UpcallControl(self.guest, arena, self._journal.check)
        with ExitStack() as undo:
            if self._upcall_control is not None:
                undo.callback(self._upcall_control.end)
                self._upcall_control.begin(groups)
            yield
            undo.pop_all()

    def _left(self) -> Sequence[Trampoline]:
        # What the recording before has left: where tasks sleep in calls that return to us its code
        # stays, and the rest is about to be overwritten.
        arena, guest, allocations = self._arena, self.guest, self._journal.allocations
        if arena is None:
            return ()
        tables = await_leaving(guest, allocations, otherwise="new probes cannot be armed yet")
        kept = [each for each in self._trampolines if each.instances in tables]
        new = [each.silenced for each in kept if not each.is_silent]
        if new:
            silence(guest, arena, self._abi(arena), new)
        self._trampolines = [each.silenced for each in kept]
        # Before their memory goes: there is nothing more to be looked for.
        allocations.keep_instances([each.instances for each in self._trampolines])
        self._free_unused(arena)
        arenas.forget_calls(self._free(arena), guest.memory)
        return self._trampolines

    def _free_unused(self, arena: Arena) -> None:
        guest, allocations = self.guest, self._journal.allocations
        kept = (addr for each in self._trampolines for addr in (each.text[0], each.instances.addr))
        live = unused(allocations, {*arena.parts, *kept})
        if live:
            # Else next time: no task may be there that could make the call.
            with suppress(TargetError), guest.stub.paused(), self._injector().task() as task:
                free(task, guest.kernel, live)

    def _allocate(self) -> tuple[Arena, Recorder]:
        guest, needed = self.guest, self._needed()
        size = self._rounded(needed)
        if self._arena is None or self.recorder is None:
            with guest.stub.paused():
                arena = arenas.allocate(
                    self._injector(), guest.kernel, size, note=self._begin_notes
                )
            write_notes(guest.memory, arena, self._journal)
            # Nobody knows of this memory yet, so the guest may run on meanwhile.
            arenas.reset(arena, guest.memory)
            self._arena = arena
            self._clock = clock_function(guest.memory, guest.kernel)
            self.recorder = Recorder(arena, guest.memory, self._open_clock(arena))
            self.recorder.check = self._journal.check
            self.recorder.warn = self.warn
        if not self._free(self._arena).has_room(needed):
            with guest.stub.paused():
                self._arena = arenas.grow(self._injector(), guest.kernel, self._arena, size)
            write_notes(guest.memory, self._arena, self._journal)
        return self._free(self._arena), self.recorder

    def _free(self, arena: Arena) -> Arena:
        # What of an arena is not kept.
        kept = self._trampolines
        instances = [
            (each.instances.addr, Addr(each.instances.addr + each.instances.size)) for each in kept
        ]
        return arena.beside([*instances, *(each.text for each in kept)])

    def _injector(self) -> CallInjector:
        guest = self.guest
        return CallInjector(guest.stub, guest.memory, guest.kernel, self._journal.allocations)

    def _rounded(self, needed: ArenaSize) -> ArenaSize:
        code = -(-(needed.code + arenas.NOTIFIER_SIZE) // MIB) * MIB
        instances = needed.instances + _SPARE_INSTANCES
        return replace(needed, code=max(self._size.code, code), instances=instances)

    def _begin_notes(self, addr: Addr, allocation: Addr) -> None:
        begin_notes(self.guest.memory, addr, allocation, self._journal)

    def _needed(self) -> ArenaSize:
        # Functions that are waited for may need instances, too.
        awaited = sum(each.kind is Kind.RETURN for each in self.waiting)
        instances = instances_size(self.plans) + (_AWAITED_INSTANCES if awaited else 0)
        # A function whose returns are taken over has a trampoline besides.
        pieces = len(self.plans) + len(instance_counts(self.plans))
        patches = _UNDOS_OF_PLAN * len(self.plans) + _SPARE_UNDOS
        return replace(
            self._size, code=pieces * _CODE_OF_PLAN, instances=instances, patches=patches
        )

    def _open_clock(self, arena: Arena) -> AnyClock:
        if self._clock is not None:
            return GuestClock()
        return open_clock(self.guest.memory, self.guest.kernel, arena.bases)

    def _abi(self, arena: Arena) -> GuestAbi:
        guest = self.guest
        return GuestAbi(
            task=task_abi(guest.kernel),
            readers=readers(guest.kernel),
            percpu=arena.percpu,
            missed=arena.missed,
            nmissed=arena.nmissed,
            code=_hull([arena.programs[0], *(each.text for each in self._trampolines)]),
            rings=arena.rings,
            texts=arena.texts,
            ring_size=arena.ring_size,
            task_size=guest.task_size,
            thread_size=guest.arch.thread_size,
            clock=self._clock,
            is_guarded=bool(self.waiting)
            or any(probe.calls_guest for plan in self.plans for probe in plan.recorded),
        )


def _groups(programs: Sequence[Program], patcher: TextPatcher) -> list[UpcallGroup]:
    at_sites = [group for program in programs for group in program.groups]
    return [*at_sites, *patcher.trampoline_upcalls]


def _layouts(plans: Sequence[Plan]) -> list[RecordLayout]:
    # A return probe is in as many plans as its function has exits.
    return list({probe.layout.event_id: probe.layout for probe in _probes(plans)}.values())


def _probes(plans: Sequence[Plan]) -> list[Resolved]:
    return [probe for plan in plans for probe in plan.recorded]


def _hull(texts: Sequence[Text]) -> Text:
    return min(start for start, _ in texts), max(stop for _, stop in texts)


def _is_inside(addr: int, ranges: Sequence[Text]) -> bool:
    return any(start <= addr < stop for start, stop in ranges)
