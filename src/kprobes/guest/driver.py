"""The engine for one guest: definitions to armed text, and text back to what it was."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import SupportsIndex

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.drain import Drain, hits_of
from kprobes.errors import (
    DefinitionError,
    GuestGoneError,
    KprobesError,
    RefusedError,
    UsageError,
)
from kprobes.guest.allocate import Allocator
from kprobes.guest.arena import ArenaSize
from kprobes.guest.arm import StagedChange, TextPatcher
from kprobes.guest.call import Callee, Functions, call_function
from kprobes.guest.ftrace_records import paused_between_changes, when_tracers_stay
from kprobes.guest.guest import Guest
from kprobes.guest.journal import Boot, Journal
from kprobes.guest.kernel_abi import per_cpu_bases, trace_source
from kprobes.guest.override import OverrideResolver, Overrides, read_counts
from kprobes.guest.pauses import PacedChange
from kprobes.guest.places import Places, places_of, unchecked
from kprobes.guest.planner import Planner, Prepared
from kprobes.guest.prepare import follow
from kprobes.guest.programs import Programs
from kprobes.guest.recorder import Recorder, open_drain
from kprobes.guest.release import DeadCalls, free_when_idle
from kprobes.guest.stacks import Leaving, restore_callers, stopped_outside
from kprobes.guest.triggers import TriggerPause
from kprobes.guest.upcalls import UpcallControl, can_watch, check, watching
from kprobes.guest.view import GuestView
from kprobes.guest.watch import GuestWatch
from kprobes.histogram import Histogram
from kprobes.image.module_types import module_ranges, with_loaded_modules
from kprobes.lang.parser import each_statement
from kprobes.model.definition import Definition, Statement
from kprobes.model.events import NO_COUNTS, Counts, Events, Hits, Loads
from kprobes.model.kernel import Kernel
from kprobes.model.options import Options, Wanted
from kprobes.model.override import Override
from kprobes.model.plan import Plan
from kprobes.model.resolved import RecordLayout, Resolved
from kprobes.model.trigger import Trigger
from kprobes.model.upcall import UpcallGroup
from kprobes.plan.cost import site_costs
from kprobes.ports import Text
from kprobes.recording_writer import RecordingWriter
from kprobes.sinks.names import TraceSource
from kprobes.units import Addr

_COVERED = "a jump cannot take their place yet; --strategy breakpoint does not need to wait"


class GuestDriver:
    """Arms and disarms probes in one guest.

    Every method may be called on a running guest and leaves it running.

    Attributes:
        guest: whose text is patched.
        wanted: what is armed now.
        options: of what will be armed next.
        overrides: what skips calls.
        view: what others see of the guest, as if nothing of ours were in it.
        programs: what its tasks have mapped.
    """

    def __init__(
        self,
        guest: Guest,
        journal: Journal,
        size: ArenaSize,
        check: Callable[[Guest], None] = unchecked,
        clock: str | None = None,
    ) -> None:
        """Arm nothing yet; ``check`` raises RefusedError where nothing can be probed."""
        self.guest = guest
        self.wanted = Wanted()
        self.options = Options()
        self._journal = journal
        self._allocator = Allocator(journal, size, clock, self._warn)
        self._patched: dict[Addr, bytes] = {}
        self._planner = Planner(guest, check, self._patched)
        self._changing = threading.RLock()
        self.overrides = Overrides(
            find=self._find_overridden,
            read=lambda number: read_counts(self.guest.memory, self._allocator.arena, number),
            arm=self._arm_overrides,
            lock=self._changing,
        )
        self._patcher: TextPatcher | None = None
        self.view = GuestView(lambda: self.guest, journal.allocations, lambda: self._patcher)
        self.programs = Programs(lambda: self.guest)
        self._upcall_control: UpcallControl | None = None
        self._left_out: Sequence[RefusedError] = ()
        self._dead_calls = DeadCalls(journal)
        self._watch = GuestWatch(guest, journal, self._warn)
        self._recorded: dict[int, Resolved] = {}
        self._ended: KprobesError | None = None
        # Seconds of each event's hit besides its code, while nothing changes.
        self._site_costs: NDArray[np.float64] | None = None
        if can_watch(guest):
            steps = self._module_comes, self._module_goes
            self._planner.watch = watching(guest, self.places.locate, steps)

    @property
    def target(self) -> str:
        """The guest's address."""
        return self.guest.address

    @property
    def cpus(self) -> int:
        """How many CPUs the guest may have."""
        return len(per_cpu_bases(self.guest.memory, self.guest.kernel))

    @property
    def places(self) -> Places:
        """What resolves definitions here."""
        return self._planner.places

    @property
    def kernel(self) -> Kernel:
        """What runs there: release, symbols, types."""
        return self.guest.kernel

    @property
    def source(self) -> TraceSource:
        """What sinks need to know of it."""
        return trace_source(self.guest, self.cpus, self.programs, has_ns=self._allocator.has_ns)

    def parse(self, text: str) -> Iterator[Statement]:
        """Yield what the lines of a text say, or raise DefinitionError."""
        return each_statement(text, registers=self.guest.arch.registers)

    def first_kernel_error(self, error: DefinitionError) -> DefinitionError:
        """Return what the kernel finds first in a definition that has an error."""
        return places_of(self.guest).first_kernel_error(error)

    def accept(self, options: Options) -> None:
        """Take any: a guest can be probed in every way."""
        self.options = options

    def prepare(self, wanted: Wanted) -> Prepared:
        """Resolve and plan what would change, without touching the guest.

        Raises:
            DefinitionError: a definition names what this kernel has not.
            RefusedError: a function cannot be probed, or Python cannot be asked there.
        """
        with self._changing:
            check(self.guest, [*wanted.upcalls, *wanted.return_upcalls])
            self.refresh_modules()
            self._planner.resolver.compare_without(wanted.deleted)
            prepared = self._planner.plan(wanted)
            self._left_out = [*self._left_out, *prepared.left_out]
            return prepared

    def forget(self, definition: Definition, *, is_new: bool = False) -> None:
        """Let a definition go that will not be wanted again; a new one never was."""
        self._planner.resolver.forget(definition, is_new=is_new)

    def layout_of(self, definition: Definition, deleted: Sequence[Definition]) -> RecordLayout:
        """Return the layout of a definition's records, of its first place.

        Args:
            definition: whose.
            deleted: definitions that it need not be like.

        Raises:
            DefinitionError, RefusedError: as for ``prepare``; or its module is not loaded.
        """
        with self._changing:
            self.refresh_modules()
            resolver, checkpoint = self._planner.resolver, self.options.checkpoint
            return resolver.layout_of(definition, deleted, checkpoint)

    def left(self, triggers: Iterable[Trigger]) -> dict[int, int]:
        """Return what is left of triggers' counts, and whether hist triggers count, by numbers."""
        with self._changing:
            return self._allocator.left(self.guest, triggers)

    def event_ids(self, definition: Definition) -> list[int]:
        """Return the numbers of a definition's events in what is counted."""
        return self._planner.resolver.numbers_of(definition)

    def replace_definition(self, old: Definition, new: Definition) -> None:
        """Take a definition for one with another filter, or triggers; it goes on counting."""
        self._planner.resolver.replace_definition(old, new)

    def apply(self, change: Callable[[Wanted], Wanted], *, begins: bool = False) -> None:
        """Arm and disarm what differs from what is armed, while the rest goes on; all, or nothing.

        Args:
            change: what is armed to what is wanted; no other thread changes that meanwhile.
            begins: whether a recording begins with it: counting begins at zero.

        Raises:
            DefinitionError, RefusedError: as for ``prepare``.
            TargetError: the guest changed a site, or has no memory. Nothing has changed.
        """
        with self._changing:
            self._check_ended()
            self._journal.check()
            wanted = change(self.wanted)
            if begins:
                self._left_out = ()
            prepared = self.prepare(wanted)
            if begins:
                self._begin(prepared, wanted)
                self._watch.begin(wanted.options)
            self._change(prepared, wanted)
            if begins and self.is_early:
                self.guest.stub.resume()
            if self._ended is not None:
                # Since we began; whoever gave up may have found nothing to disarm.
                self.disarm()
                raise self._ended

    def end(self) -> None:
        """Record nothing of what is defined; errors as for ``apply``."""
        # Whoever has asked for it, by an interrupt say, has asked for nothing to be left undone.
        self.apply(lambda wanted: replace(_unhurried(wanted), definitions=()))
        self._watch.end()

    @property
    def functions(self) -> Functions:
        """What is done to its functions besides probing them."""
        return Functions(overrides=self.overrides, call=self._call)

    def _call(
        self, function: str, arguments: Sequence[SupportsIndex], timeout_s: float
    ) -> int | bool | None:
        if self._upcall_control is not None and self._upcall_control.is_current:
            raise UsageError("a handler cannot call functions of the guest: a vCPU waits for it")
        with self._changing:
            self._journal.check()
            self.refresh_modules()
            callee = Callee(self.guest, self.places, function)
            registers = callee.arguments(arguments)
            allocations = self._journal.allocations
            return call_function(self.guest, allocations, callee, registers, timeout_s=timeout_s)

    def _find_overridden(self) -> OverrideResolver:
        self.refresh_modules()
        return OverrideResolver(self.guest, self.places)

    def _arm_overrides(self, overrides: Sequence[Override]) -> None:
        self.apply(partial(replace, options=self.options, overrides=overrides))

    def drain(self, *, room: float, writer: RecordingWriter | None = None) -> Drain:
        """Drain what is recorded; it began with ``apply``.

        Args:
            room: bytes of events that may wait to be taken.
            writer: gets the rings' bytes instead; then there are no events.
        """
        recorder = self._allocator.recorder
        if recorder is None:
            raise ValueError("nothing is recorded that could be drained")
        recorder.writer = writer
        words, limit_s = recorder.checked_words, self.wanted.options.pause_timeout_s
        pause = TriggerPause(words, self.guest, self.view.leave_own_code, limit_s, self._warn)
        between = self.free_dead_calls, pause.check
        return open_drain(recorder, self.guest, between, pause.end, room=room)

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

    @property
    def plans(self) -> Collection[Plan]:
        """What is armed, by site."""
        return self._planner.plans

    @property
    def waiting(self) -> Sequence[Definition]:
        """What is defined and waits for modules that are not loaded."""
        return tuple(self._planner.resolver.waiting)

    @property
    def layouts(self) -> Sequence[RecordLayout]:
        """Of the records of all that is defined and can be probed."""
        return [probe.layout for probe in self._planner.resolver.probes]

    @property
    def left_out(self) -> Sequence[RefusedError]:
        """Why functions that patterns match are not probed, by what was prepared last."""
        return self._left_out

    @property
    def is_paused(self) -> bool:
        """Whether the guest stands still, and probes are armed when it goes on."""
        return self.guest.stub.stands()

    @property
    def is_stopped(self) -> bool:
        """Whether a trigger ``stop`` has ended the recording."""
        recorder = self._allocator.recorder
        return recorder is not None and recorder.is_stopped

    @property
    def pauses(self) -> tuple[float, int]:
        """For how many seconds it was paused in all, and how often."""
        return self.guest.stub.paused_s, self.guest.stub.stops

    def give_up(self, why: KprobesError) -> None:
        """Disarm for good, from any thread; ``check`` and ``apply`` raise why."""
        self._ended = why
        with suppress(KprobesError):
            # What cannot be put back now is tried, and told, by whoever closes us.
            self.disarm()

    def check(self) -> None:
        """Raise what was given up for, or what has become of the guest; to be called often.

        Raises:
            GuestGoneError: it has ended.
            GuestReplacedError: it was rebooted, or restored to an earlier state.
            GuestCrashedError: it panicked, or hangs, where ``Options.hang_timeout_s`` is given.
            GuestShutDownError: it shuts down, where ``Options.until_shutdown`` is.
        """
        self._check_ended()
        self._watch.check()

    @property
    def boot(self) -> Boot | None:
        """What tells this boot of the guest from others."""
        return self._journal.boot

    @property
    def is_early(self) -> bool:
        """Whether the guest stands before its initcalls, until a recording begins."""
        return not (self.guest.stub.is_running or self.guest.stub.is_held)

    @property
    def has_crashed(self) -> bool:
        """Whether the guest has panicked, or hangs."""
        return self._watch.crash is not None

    def _check_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _warn(self, problem: str) -> None:
        self.options.warn(problem)

    def counts(self) -> Counts:
        """Return what was counted since the recording began, or in the last one."""
        recorder = self._allocator.recorder
        return NO_COUNTS if recorder is None else recorder.counts()

    def hits(self) -> list[Hits]:
        """Return what the last recording counted of every probe; of newer ones nothing yet."""
        defined = {probe.layout.event_id: probe for probe in self._planner.resolver.probes}
        return hits_of({**self._recorded, **defined}, self.counts(), self.wanted.over_limit)

    @property
    def tables_size(self) -> int:
        """Bytes of the guest's memory that hist triggers' tables take; 0 without one."""
        return self._allocator.tables.size

    def histogram(self, number: int = 0) -> Histogram | None:
        """Return what a hist trigger has counted so far, by its table; None without one."""
        with self._changing:
            return self._allocator.histogram(self.guest, self.source, number)

    def loads(self) -> Loads:
        """Return what hits have taken so far, while limits ask for it."""
        recorder = self._allocator.recorder
        if recorder is None:
            raise ValueError("nothing was recorded")
        with self._changing, self.guest.readable():
            hits, code_s = recorder.loads()
            if self._site_costs is None or len(self._site_costs) != len(hits):
                self._site_costs = site_costs(self._planner.plans, len(hits))
            return Loads(hits=hits, code_s=code_s, site_s=self._site_costs)

    def missed_upcall(self, number: int) -> int:
        """Return how many hits went on without Python, for whatever upcall had this number."""
        return 0 if self._upcall_control is None else self._upcall_control.missed(number)

    def free_dead_calls(self) -> None:
        """Have room again for calls in progress, where tasks that died have left too little.

        To be called often while probes are armed: it looks only when room was missing.
        """
        # Whoever arms waits for the guest, and rings must be drained meanwhile.
        if self._dead_calls.is_due() and self._changing.acquire(blocking=False):
            try:
                patcher, recorder = self._patcher, self._allocator.recorder
                if patcher is not None and recorder is not None and patcher.linker.instances:
                    self._dead_calls.free(self.guest, patcher.linker.instances, recorder.nmissed)
            finally:
                self._changing.release()

    def disarm(self) -> None:
        """Put the guest's text back, verified; its records can still be drained.

        Raises:
            TargetError: somebody else changed a patched site.
        """
        with self._changing:
            patcher = self._patcher
            if patcher is not None and patcher.is_armed:
                programs = patcher.programs
                with paused_between_changes(self.guest):
                    self._watch.check_stopped()
                    count = patcher.disarm()
                self._warn_put_back(count)
                patcher.linker.retire(programs, self._planner.reset())
            self.wanted = Wanted(options=self.wanted.options)
        if self._upcall_control is not None:
            self._upcall_control.end()

    def close(self) -> None:
        """Disarm, and give the guest its memory back as soon as nothing runs in it."""
        self._watch.end()
        self.disarm()
        if self.has_crashed:
            # Freeing would wait for a CPU that does not answer, or has nobody who could do it.
            return
        self.overrides.keep_counts()
        self._allocator.arena = self._upcall_control = self._patcher = None
        if not self._journal.allocations.is_empty:
            with self.guest.stub.paused():
                self._watch.check_stopped()
        free_when_idle(self.guest, self._journal.allocations, self._warn)
        self._watch.check_same()

    def refresh_modules(self) -> None:
        """Find out what modules the guest has now, and whether still what only boot uses."""
        kernel = with_loaded_modules(self.guest.kernel, self.guest.memory)
        init_text = self.guest.init_text
        if init_text is not None and init_text.is_freed(self.guest.memory.ram.read):
            kernel, init_text = replace(kernel, init_text=None), None
        if kernel is not self.guest.kernel:
            self.guest = replace(self.guest, kernel=kernel, init_text=init_text)
            self._planner.use(self.guest)

    def _module_comes(self, record: int) -> None:
        del record
        with self._changing:
            if self._planner.waiting:
                self._change_modules()

    def _module_goes(self, record: int) -> None:
        with self._changing:
            lost = module_ranges(self.guest.kernel, record)
            self.overrides.forget(lost)
            self.wanted = replace(self.wanted, overrides=self.overrides.armed)
            self._change_modules(lost)

    def _change_modules(self, lost: Sequence[Text] = ()) -> None:
        # A vCPU waits for it.
        try:
            self.refresh_modules()
            # Nor does an interrupt end it, which is for the thread that records.
            wanted = _unhurried(self.wanted)
            self._change(self._planner.plan(wanted, lost), wanted, lost)
        except KprobesError as error:
            self._warn(str(error))

    def _begin(self, prepared: Prepared, wanted: Wanted) -> None:
        self._allocator.begin(self.guest, self._patcher, prepared, wanted)
        self._recorded = {}
        if self._patcher is None or self._allocator.tidy(self.guest, self._patcher):
            # No call in progress returns to code that still has their numbers.
            self._planner.resolver.reuse_numbers()

    def _change(self, prepared: Prepared, wanted: Wanted, lost: Sequence[Text] = ()) -> None:
        if prepared.new or prepared.gone:
            patcher, recorder = self._opened(prepared)
            before = self._allocator.state
            try:
                if self._allocator.adapt(self.guest, patcher, prepared, wanted):
                    prepared = self._planner.plan(wanted, lost, is_anew=True)
                patcher.switch_on(prepared.new)
                self._patch(patcher, recorder, prepared, wanted.options)
            except BaseException:
                patcher.switch_off(prepared.new, prepared.gone, self._warn)
                self._allocator.take_back(self.guest, patcher, before)
                raise
        self._allocator.soft_enable(self.guest, wanted)
        for error in prepared.errors:
            self._warn(str(error))
        self._recorded |= {probe.layout.event_id: probe for probe in prepared.come}
        self._planner.keep(prepared, wanted.options)
        self.wanted, self._site_costs = wanted, None
        if self._patcher is not None:
            self._patcher.switch_off(prepared.gone, prepared.new, self._warn)

    def _patch(
        self, patcher: TextPatcher, recorder: Recorder, prepared: Prepared, options: Options
    ) -> None:
        patcher.check()
        programs, groups = self._allocator.link(
            self.guest, patcher, prepared.new, options.checkpoint
        )
        stub, most_s = self.guest.stub, options.limits.max_pause_s
        change = PacedChange(
            patcher, stub, self._stopped_for, self._is_of_modules, max_pause_s=most_s
        )
        come = [probe.layout for probe in prepared.come]
        # Hits on their way are recorded, or counted, before no more are.
        ends = prepared.ended or any(plan.overrides for plan in prepared.gone)
        texts = patcher.texts(prepared.gone, prepared.old_returns) if ends else ()
        leaving = Leaving(self.guest, texts)
        finish = partial(self._let_return, patcher, prepared, leaving)
        try:
            # A change that is refused in a later pause has recorded nothing.
            recorder.add(come, are_shown=not change.is_split(programs, prepared.gone))
            patcher.register_notifier(prepared.new, more=bool(prepared.waiting))
            self._serve(groups)
            change.make(programs, prepared.gone, finish)
        except GuestGoneError:
            # Nothing that is there now is ours.
            raise
        except BaseException:
            if change.is_torn or patcher.leads_to(programs):
                # The text has changed, and what follows could not be done.
                self._warn("a change of what is armed could not be undone: everything is disarmed")
                self.disarm()
                raise
            patcher.unstage()
            self._serve_no_more(patcher.linker.retire(programs, prepared.new_returns))
            raise
        recorder.show(layout.event_id for layout in come)
        self._serve_no_more(patcher.linker.retire(change.left, prepared.old_returns))
        leaving.wait()
        recorder.ignore(prepared.ended)
        self._warn_put_back(change.put_back)

    def _opened(self, prepared: Prepared) -> tuple[TextPatcher, Recorder]:
        guest, allocator = self.guest, self._allocator
        arena, recorder = allocator.allocate(guest, prepared.new, prepared.waiting)
        if self._patcher is None:
            abi = allocator.abi(guest)
            self._patcher = TextPatcher(guest, arena, abi, self._journal, self._patched)
        return self._patcher, recorder

    def _is_of_modules(self, plan: Plan) -> bool:
        # A module that goes takes what is armed in it along, as long as that is noticed.
        is_watch = any(any(each is own for own in self._planner.watch) for each in plan.upcalls)
        return is_watch or not self.guest.kernel.has_text(plan.site.addr)

    def _stopped_for(self, change: StagedChange) -> AbstractContextManager[None]:
        stopped = partial(stopped_outside, self.guest, change.covered, otherwise=_COVERED)
        if any(each.flags for each in change.gone):
            return stopped(also=when_tracers_stay(self.guest))
        return stopped()

    def _let_return(self, patcher: TextPatcher, prepared: Prepared, leaving: Leaving) -> None:
        # Calls of functions whose returns are probed no more return to their callers again.
        tables = patcher.linker.tables_of(prepared.left_functions)
        if tables and self.guest.arch.returns.comes_back:
            kept = {t.trampoline for t in patcher.linker.instances if t not in tables}
            restore_callers(self.guest.memory, tables, kept)
        leaving.find()

    def _serve(self, groups: Sequence[UpcallGroup]) -> None:
        # From before the first hit on; not when there will be none.
        arena = self._allocator.arena
        if groups and self._upcall_control is None and arena is not None:
            self._upcall_control = UpcallControl(self.guest, arena, self._journal.check)
        if self._upcall_control is not None:
            self._upcall_control.add(groups)

    def _serve_no_more(self, numbers: Sequence[int]) -> None:
        if self._upcall_control is not None:
            self._upcall_control.remove(numbers)

    def _warn_put_back(self, count: int) -> None:
        if count:
            self._warn(
                f"{count} places held the guest's own bytes again: somebody else has put "
                "them back, and there was no hit from then on"
            )


def _unhurried(wanted: Wanted) -> Wanted:
    return replace(wanted, options=replace(wanted.options, checkpoint=Options().checkpoint))
