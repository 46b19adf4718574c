"""The engine for one guest: definitions to armed text, and text back to what it was."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import SupportsIndex

from kprobes.drain import Drain, hits_of
from kprobes.errors import DefinitionError, KprobesError, RefusedError, UsageError
from kprobes.guest.allocate import Allocator
from kprobes.guest.arena import Arena, ArenaSize
from kprobes.guest.arm import TextPatcher
from kprobes.guest.call import Callee, call_function
from kprobes.guest.ftrace_records import paused_between_changes
from kprobes.guest.guest import Guest
from kprobes.guest.identity import check_stopped
from kprobes.guest.journal import Journal
from kprobes.guest.kernel_abi import kretprobe_trampoline, per_cpu_bases
from kprobes.guest.link import Program
from kprobes.guest.notes import write_notes
from kprobes.guest.override import OverrideResolver, Overrides, read_counts
from kprobes.guest.places import Places, places_of, unchecked
from kprobes.guest.prepare import Asked, Preparer, Wanted, follow
from kprobes.guest.recorder import Recorder, open_drain
from kprobes.guest.release import code_in_use, free_when_idle
from kprobes.guest.stacks import find_caller, free_dead_calls, stopped_outside
from kprobes.guest.upcalls import UpcallControl, can_watch, check, watching
from kprobes.image.module_types import module_ranges, with_loaded_modules
from kprobes.lang.filter import task_filter
from kprobes.lang.parser import parse_statements
from kprobes.model.definition import Definition, Statement
from kprobes.model.events import Counts, Events, Hits
from kprobes.model.kernel import Kernel, place_of
from kprobes.model.options import Options
from kprobes.model.override import OverrideCounts
from kprobes.model.plan import Plan
from kprobes.model.resolved import RecordLayout, Resolved
from kprobes.model.upcall import Upcall, UpcallGroup
from kprobes.ports import Text
from kprobes.sinks.names import TraceSource
from kprobes.units import Addr

_STUB_CHECK_S = 0.25
_POLL_S = 0.5
"""Between looks whether room was missing."""
_COVERED = "a jump cannot take their place yet; --strategy breakpoint does not need to wait"


class GuestDriver:
    """Arms and disarms probes in one guest.

    Every method may be called on a running guest and leaves it running.

    Attributes:
        guest: whose text is patched.
        plans: what is or will be armed.
        recorded: definitions that are armed while a recording runs.
        upcalls: what Python does at hits; for ``prepare``.
        return_upcalls: what it does at all returns of functions, by their entries; likewise.
        overrides: what skips calls.
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
        self.recorded: Sequence[Definition] = ()
        self.upcalls: Sequence[Upcall] = ()
        self.return_upcalls: Sequence[Upcall] = ()
        self._options = Options()
        self._asked: tuple[Sequence[Upcall], Sequence[Upcall]] = ((), ())
        self._is_there: Callable[[Addr], bool] = bool
        self._journal = journal
        self._allocator = Allocator(journal, size, self._warn)
        self._check = check
        self._preparer = Preparer(guest, check)
        self.overrides = Overrides(
            find=self._find_overridden,
            read=self._read_counts,
            arm_again=self._arm_again,
        )
        self._patcher: TextPatcher | None = None
        self._upcall_control: UpcallControl | None = None
        self._nmissed = 0
        self._checked_s = self._stub_checked_s = 0.0
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

    @property
    def kernel(self) -> Kernel:
        """What runs there: release, symbols, types."""
        return self.guest.kernel

    @property
    def source(self) -> TraceSource:
        """What sinks need to know of it."""
        return TraceSource(
            version=self.kernel.version,
            cpus=self.cpus,
            symbol_at=partial(place_of, self.kernel.symbols),
            trampoline=kretprobe_trampoline(self.kernel),
        )

    def parse(self, text: str) -> Sequence[Statement]:
        """Return what a text says.

        Raises:
            DefinitionError: where the kernel would find something wrong first.
        """
        try:
            return parse_statements(text, registers=self.guest.arch.registers)
        except DefinitionError as error:
            raise places_of(self.guest).first_kernel_error(error) from error

    def accept(self, options: Options) -> None:
        """Let these be the options from now on: a guest can be probed in every way."""
        self._options = options

    def prepare(self, definitions: Sequence[Definition]) -> Sequence[Plan]:
        """Resolve and plan, without touching the guest; what Python does besides is put back.

        Raises:
            DefinitionError: a definition names what this kernel has not.
            RefusedError: a function cannot be probed, or Python cannot be asked there.
        """
        if not self._is_live or self.recorded:
            return self._prepare(definitions)
        self.disarm()
        self.upcalls = self.return_upcalls = ()
        try:
            return self._prepare(definitions)
        finally:
            self._ask_again()

    def _prepare(self, definitions: Sequence[Definition]) -> Sequence[Plan]:
        check(self.guest, [*self.upcalls, *self.return_upcalls])
        self.refresh_modules()
        options, tasks = self._options, self._options.tasks
        self._preparer.checkpoint = options.checkpoint
        self.plans = self._preparer.prepare(
            Wanted(
                definitions=tuple(definitions),
                tasks=task_filter(tasks.pids, tasks.comms, tgids=tasks.tgids, follow=tasks.follow),
                strategy=options.strategy,
                return_method=options.return_method,
                asked=Asked(
                    at_sites=self.upcalls, at_returns=self.return_upcalls, watch=self._watch
                ),
                overrides=self.overrides.armed,
            )
        )
        return self.plans

    def begin(self, definitions: Sequence[Definition], *, room: float) -> Drain:
        """Start a recording: arm definitions, all or none, and drain their records.

        Raises:
            DefinitionError, RefusedError: as for ``prepare``.
            TargetError: they could not be armed; nothing is left of any.
        """
        with ExitStack() as undo:
            undo.callback(self._ask_again)
            # Handlers have been live since they were registered.
            self.disarm()
            self._prepare(definitions)
            recorder = self.arm()
            self.recorded = definitions
            undo.pop_all()
        return open_drain(recorder, self.guest, self.free_dead_calls, room=room)

    def end(self) -> None:
        """Disarm what is recorded, and arm anew what else Python does."""
        try:
            self.disarm()
        finally:
            self.recorded = ()
            self._ask_again()

    def rest(self) -> Iterator[Events]:
        """Yield what was recorded and not drained; nothing is armed any more."""
        if self._allocator.recorder is not None:
            yield from self._allocator.recorder.rest()

    def follow(self, pid: int) -> None:
        """Have a task that is held followed from its exec on, with all that descends from it.

        Raises:
            TargetError: there is no such task any more.
        """
        follow(self.guest, pid)

    def ask(
        self,
        at_sites: Sequence[Upcall],
        at_returns: Sequence[Upcall],
        is_there: Callable[[Addr], bool],
    ) -> None:
        """Arm these upcalls and no others, beside what is recorded; those of before on an error.

        Args:
            at_sites: before or after single instructions.
            at_returns: at all returns of functions, by their entries.
            is_there: whether a place still is: its module may have gone.

        Raises:
            RefusedError: no probe can be there, or Python cannot be asked in this guest.
            TargetError: the guest changed a site, or has no memory.
        """
        before, self._is_there = self._asked, is_there
        self.disarm()
        try:
            self._ask(at_sites, at_returns)
        except BaseException:
            self._ask(*before)
            raise

    def call(
        self, function: str, arguments: Sequence[SupportsIndex], *, timeout_s: float
    ) -> int | bool | None:
        """Call a function of the guest, in a task of its that may sleep, and return its result.

        Args:
            function: its name, or ``MODULE:FUNCTION``.
            arguments: numbers, and addresses.
            timeout_s: how long it may take.

        Raises:
            UsageError: the arguments are not its, or a handler asks, while a vCPU waits for it.
            RefusedError: it must not be called.
            TargetError: there is no such function, or it did not come back in time.
        """
        if self._upcall_control is not None and self._upcall_control.is_current:
            raise UsageError("a handler cannot call functions of the guest: a vCPU waits for it")
        self.refresh_modules()
        callee = Callee(self.guest, self.places, function)
        registers = callee.arguments(arguments)
        allocations = self._journal.allocations
        with self._changing:
            return call_function(self.guest, allocations, callee, registers, timeout_s=timeout_s)

    def _find_overridden(self) -> OverrideResolver:
        self.refresh_modules()
        return OverrideResolver(self.guest, self.places)

    def _arm_again(self) -> None:
        self.disarm()
        self._ask(*self._asked)

    @property
    def _is_live(self) -> bool:
        # Whether something is armed besides what is recorded.
        return any(self._asked) or bool(self.overrides.armed)

    def _ask_again(self) -> None:
        if self._is_live:
            # What was recorded is still to be told of.
            plans = self.plans
            self._ask(*self._asked)
            self.plans = plans

    def _ask(self, at_sites: Sequence[Upcall], at_returns: Sequence[Upcall]) -> None:
        # What was in a module that is gone is gone with it, as in the kernel.
        self.refresh_modules()
        self.upcalls = [each for each in at_sites if self._is_there(each.addr)]
        self.return_upcalls = [each for each in at_returns if self._is_there(each.addr)]
        self._asked = (self.upcalls, self.return_upcalls)
        if self._is_live or self.recorded:
            self._prepare(self.recorded)
            self.arm(is_new=False)

    @property
    def waiting(self) -> Sequence[Definition]:
        """What was prepared and waits for modules that are not loaded."""
        return tuple(self._preparer.waiting.values())

    @property
    def left_out(self) -> Sequence[RefusedError]:
        """Why functions that patterns match are not probed at their returns."""
        return self._preparer.left_out

    @property
    def is_paused(self) -> bool:
        """Whether the guest stands still, and probes are armed when it goes on."""
        return self.guest.stub.stands()

    @property
    def pauses(self) -> tuple[float, int]:
        """For how many seconds it was paused in all, and how often."""
        return self.guest.stub.paused_s, self.guest.stub.stops

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
        self._check_ended()
        self._journal.check()
        guest, plans, waiting, allocator = self.guest, self.plans, self.waiting, self._allocator
        kept = allocator.keep_calls(guest, plans, waiting)
        arena, recorder = allocator.allocate(guest, plans, waiting)
        self._journal.check()
        abi = allocator.abi(guest, arena, plans, waiting)
        patcher = TextPatcher(guest, arena, abi, self._journal, kept)
        patcher.note = partial(write_notes, self.guest.memory, arena, self._journal)
        programs = patcher.link(self.plans, self._options.checkpoint)
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
        self._allocator.trampolines = patcher.trampolines
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
        """Raise what was given up for, or what has become of the guest; to be called often.

        Raises:
            GuestGoneError: it has ended.
            GuestReplacedError: it was rebooted, or restored to an earlier state.
        """
        self._check_ended()
        if time.monotonic() > self._stub_checked_s + _STUB_CHECK_S:
            # The guest's memory outlives it; only the stub tells that it is gone.
            self.check_stub()
            self.check_guest()
            self._stub_checked_s = time.monotonic()

    def _check_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _warn(self, problem: str) -> None:
        self._options.warn(problem)

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
            self._warn("somebody else has paused the guest; events come again when it goes on")

    def counts(self) -> Counts:
        """Return what was counted since the recording began, or in the last one."""
        if self._allocator.recorder is None:
            return Counts(recorded={}, missed={}, lost=0, damaged=0)
        return self._allocator.recorder.counts()

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
        patcher, arena, recorder = self._patcher, self._allocator.arena, self._allocator.recorder
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
                    self._warn(
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
        self.overrides.keep_counts()
        self._allocator.arena = self._upcall_control = None
        if not self._journal.allocations.is_empty:
            with self.guest.stub.paused():
                self._check_stopped()
        free_when_idle(self.guest, self._journal.allocations, self._warn)
        self.check_guest()

    def _read_counts(self, number: int) -> OverrideCounts | None:
        arena = self._allocator.arena
        return None if arena is None else read_counts(self.guest.memory, arena, number)

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
            if self._patcher is None or self._allocator.recorder is None or not self.waiting:
                return
            try:
                self._arm_late(self._patcher, self._allocator.recorder)
            except KprobesError as error:
                self._warn(str(error))

    def _arm_late(self, patcher: TextPatcher, recorder: Recorder) -> None:
        kernel = with_loaded_modules(self.guest.kernel, self.guest.memory)
        self.guest = replace(self.guest, kernel=kernel)
        plans, errors = self._preparer.late(self.guest)
        for error in errors:
            self._warn(str(error))
        try:
            programs = patcher.link(plans)
        except KprobesError:
            # Their module may come again, to another place.
            self._preparer.wait_again(plans)
            raise
        recorder.add(_layouts(plans))
        self._recorded += _probes(plans)
        patches = patcher.stage(programs)
        self._allocator.trampolines = patcher.trampolines
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
            self.overrides.forget(ranges)
            if self._patcher is None or not gone:
                return
            try:
                with paused_between_changes(self.guest):
                    self._patcher.disarm_ranges(ranges)
            except KprobesError as error:
                self._warn(str(error))
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


def _groups(programs: Sequence[Program], patcher: TextPatcher) -> list[UpcallGroup]:
    at_sites = [group for program in programs for group in program.groups]
    return [*at_sites, *patcher.trampoline_upcalls]


def _layouts(plans: Sequence[Plan]) -> list[RecordLayout]:
    # A return probe is in as many plans as its function has exits.
    return list({probe.layout.event_id: probe.layout for probe in _probes(plans)}.values())


def _probes(plans: Sequence[Plan]) -> list[Resolved]:
    return [probe for plan in plans for probe in plan.recorded]


def _is_inside(addr: int, ranges: Sequence[Text]) -> bool:
    return any(start <= addr < stop for start, stop in ranges)
