"""The memory of one session in a guest: taken, grown, used again and given back.

What compiled code must know of it and of the guest.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from kprobes.errors import NoRoomError, TargetError
from kprobes.guest import arena as arenas
from kprobes.guest.arena import Arena, ArenaSize
from kprobes.guest.arm import TextPatcher
from kprobes.guest.clock import X86_TSC, open_clock
from kprobes.guest.guest import Guest
from kprobes.guest.hist_tables import HistTables
from kprobes.guest.identity import check_stopped
from kprobes.guest.inject import CallInjector
from kprobes.guest.journal import Journal
from kprobes.guest.kernel_abi import readers, task_abi
from kprobes.guest.link import Program, instance_counts, instances_size
from kprobes.guest.notes import NotesWriter, begin_notes
from kprobes.guest.planner import Prepared
from kprobes.guest.recorder import Recorder
from kprobes.guest.release import free, trap_text
from kprobes.guest.stacks import are_inside, is_anyone_inside, returned_to
from kprobes.guest.triggers import TriggerWords
from kprobes.histogram import Histogram
from kprobes.model.abi import GuestAbi
from kprobes.model.definition import Definition, Kind
from kprobes.model.options import Wanted
from kprobes.model.plan import Plan
from kprobes.model.trigger import WORDS_SIZE, Trigger
from kprobes.model.upcall import UpcallGroup
from kprobes.sinks.names import TraceSource
from kprobes.units import MIB, Addr

_CODE_OF_PLAN, _CODE_OF_PLAIN = 1024, 448
"""Bytes of code that a plan, or a trampoline, takes on average at most; and one that only records
that it was hit, of which there may be tens of thousands."""
_AWAITED_INSTANCES = _SPARE_INSTANCES = 1 * MIB
_UNDOS_OF_PLAN, _SPARE_UNDOS = 2, 1024
"""A site and its ftrace record; what crosses pages, comes late, or has a handler."""


class Allocator:
    """Takes a session's memory from a guest, which runs but while it is asked for it.

    Attributes:
        arena: what was allocated first; None before that, and when it was given back.
        recorder: of its rings; likewise, but kept.
        counts_hits: whether code counts and times hits.
        is_guarded: whether any probe calls the guest's functions, so that all look at the guard.
        checks_tracing_on: whether tracing may be off at times, so that all look at that.
        tables: of hist triggers.
        words: of other triggers; None before there are any.
    """

    def __init__(
        self,
        journal: Journal,
        size: ArenaSize,
        clock: str | None,
        warn: Callable[[str], None],
    ) -> None:
        """Take nothing yet.

        Args:
            journal: of what is allocated.
            size: that is wanted at least.
            clock: the kernel's name of that of time stamps; None for its trace's.
            warn: is given what is wrong with the guest's clock, for people.
        """
        self.arena: Arena | None = None
        self.recorder: Recorder | None = None
        self.tables = HistTables()
        self.words: TriggerWords | None = None
        self.is_guarded = self.counts_hits = self.checks_tracing_on = False
        self._journal = journal
        self._size = size
        self._warn = warn
        self._clock = clock

    def allocate(
        self, guest: Guest, plans: Collection[Plan], waiting: Sequence[Definition]
    ) -> tuple[Arena, Recorder]:
        """Return the session's memory, taken when it is first asked for, and what reads its rings.

        Args:
            guest: that it is taken from.
            plans: whose code and calls must fit.
            waiting: what may come later.

        Raises:
            TargetError: the guest has not enough memory, or no task could make the call.
        """
        if self.arena is None or self.recorder is None:
            size = self._rounded(self._needed(plans, waiting))
            injector = self._injector(guest)
            with guest.stub.paused():
                arena = arenas.allocate(
                    injector,
                    guest.kernel,
                    size,
                    note=partial(begin_notes, guest.memory, journal=self._journal),
                )
            NotesWriter(guest.memory, arena, self._journal).write()
            # Nobody knows of this memory yet, so the guest may run on meanwhile.
            arenas.reset(arena, guest.memory)
            self.arena = arena
            clock = open_clock(guest.memory, guest.kernel, arena.bases, self._clock)
            self.recorder = Recorder(arena, guest.memory, clock)
            self.recorder.check = self._journal.check
            self.recorder.warn = self._warn
        return self.arena, self.recorder

    @property
    def has_ns(self) -> bool:
        """Whether time stamps are nanoseconds."""
        return self._clock != X86_TSC

    def link(
        self,
        guest: Guest,
        patcher: TextPatcher,
        plans: Sequence[Plan],
        checkpoint: Callable[[], None],
    ) -> tuple[list[Program], list[UpcallGroup]]:
        """Link the code of some plans, as ``Linker.link`` does, in room that is made if need be.

        Args:
            guest: that it is for.
            patcher: whose linker it is.
            plans: whose code it is.
            checkpoint: called for every one; what it raises ends the linking.

        Raises:
            TargetError: the guest has not enough memory, or no task could make the call.
            RefusedError, UsageError: as for ``Linker.link``.
        """
        self._take_tables(guest, patcher, plans)
        pool, needed = patcher.linker.pool, self._needed(plans, ()).code
        if needed > pool.room and pool.retired:
            self._free_retired(guest, patcher)
        if needed > pool.room:
            self._grow(guest, patcher, plans)
        for make_room in (self._free_retired, partial(self._grow, plans=plans)):
            try:
                return patcher.linker.link(plans, checkpoint)
            except NoRoomError:
                make_room(guest, patcher)
        return patcher.linker.link(plans, checkpoint)

    def _take_tables(self, guest: Guest, patcher: TextPatcher, plans: Sequence[Plan]) -> None:
        if self.arena is None:
            raise ValueError("nothing was allocated that tables could be beside")
        found = dict.fromkeys(
            table for plan in plans for probe in plan.recorded for table in probe.tables
        )

        def allocate(size: int) -> Addr:
            with guest.stub.paused():
                return arenas.allocate_table(self._injector(guest), guest.kernel, size)

        for table in found:
            patcher.linker.tables[table.number] = self.tables.take(
                table, guest.memory, self.arena.cpus, allocate
            )

    def histogram(self, guest: Guest, source: TraceSource, number: int) -> Histogram | None:
        """Return what a hist trigger has counted so far; None where there is none.

        Args:
            guest: whose memory it is in.
            source: what sinks need to know of that.
            number: of its table.
        """
        if self.arena is None:
            return None
        with guest.readable():
            return self.tables.histogram(number, source, self.arena.cpus)

    def tidy(self, guest: Guest, patcher: TextPatcher) -> bool:
        """Give memory back that was grown and that nothing is in any more.

        Args:
            guest: whose memory.
            patcher: whose code was in it.

        Returns:
            Whether no call in progress returns to code that nothing leads to.
        """
        pool = patcher.linker.pool
        if len(pool.near) > 1:
            self._free_retired(guest, patcher)
            unused = pool.unused()
            # Else next time: somebody is in a stub, or no task may be there for the call.
            with suppress(TargetError), guest.stub.paused():
                if not is_anyone_inside(guest, [text for each in unused for text in each.programs]):
                    self._free(guest, unused)
                    for each in unused:
                        pool.drop(each)
                    patcher.notes.change((), ())
        return all(each.instances is None for each in pool.retired)

    def begin(
        self, guest: Guest, patcher: TextPatcher | None, prepared: Prepared, wanted: Wanted
    ) -> None:
        """Begin a recording, while nothing is armed: all that is counted begins at zero.

        Args:
            guest: that it is of.
            patcher: whose code was in its memory, or None.
            prepared: what is armed first, as errors are of ``allocate``.
            wanted: what is recorded.
        """
        _, recorder = self.allocate(guest, prepared.new, prepared.waiting)
        recorder.begin()
        if patcher is not None and self.tables.size:
            if any(each.instances is not None for each in patcher.linker.pool.retired):
                self._free_retired(guest, patcher)
            retired = patcher.linker.pool.retired
            self.tables.begin([each for each in retired if each.instances is not None])
        if self.words is not None:
            with guest.readable():
                self.words.begin(tracing_on=wanted.options.tracing_on)

    def adapt(self, guest: Guest, patcher: TextPatcher, prepared: Prepared, wanted: Wanted) -> bool:
        """Have code that is linked from now on suit what is wanted; ``take_back`` undoes it.

        Args:
            guest: that runs it.
            patcher: whose code it is.
            prepared: what is linked next.
            wanted: all that is then.

        Returns:
            Whether what is armed has to be linked anew: it must look at the guard, or count, or
            look whether tracing is on, or need not any more.
        """
        was_armed, before = patcher.is_armed, self.state
        calls_guest = any(plan.calls_guest for plan in prepared.new)
        was_guarded = self.is_guarded and was_armed
        self.is_guarded = was_guarded or bool(prepared.waiting) or calls_guest
        self.counts_hits, self.checks_tracing_on = (
            wanted.options.limits.counts_hits,
            wanted.checks_tracing_on,
        )
        if wanted.soft_enables or self.checks_tracing_on or self.words is not None:
            self._take_words(guest, wanted)
        self.set_abi(guest, patcher)
        return was_armed and self.state != before

    @property
    def state(self) -> tuple[bool, bool, bool]:
        """What all code depends on."""
        return self.is_guarded, self.counts_hits, self.checks_tracing_on

    def take_back(self, guest: Guest, patcher: TextPatcher, state: tuple[bool, bool, bool]) -> None:
        """Have code suit what it did before.

        Args:
            guest: that runs it.
            patcher: whose code it is.
            state: as it was.
        """
        self.is_guarded, self.counts_hits, self.checks_tracing_on = state
        self.set_abi(guest, patcher)

    def soft_enable(self, guest: Guest, wanted: Wanted) -> None:
        """Enable and disable events in soft mode whose state was another one before."""
        if self.words is not None:
            with guest.readable():
                self.words.soft_enable(wanted)

    def left(self, guest: Guest, triggers: Iterable[Trigger]) -> dict[int, int]:
        """Return what ``TriggerWords.left`` does, of those that are armed."""
        if self.words is None:
            return {}
        with guest.readable():
            return self.words.left(triggers)

    def _take_words(self, guest: Guest, wanted: Wanted) -> None:
        if self.words is None:
            with guest.stub.paused():
                addr = arenas.allocate_table(self._injector(guest), guest.kernel, WORDS_SIZE)
            self.words = TriggerWords(guest.memory, addr)
            with guest.readable():
                self.words.begin(tracing_on=wanted.options.tracing_on)
        with guest.readable():
            self.words.add(wanted)
        if self.recorder is not None:
            self.recorder.words = self.words

    def set_abi(self, guest: Guest, patcher: TextPatcher) -> None:
        """Have code that is linked from now on know of the guard, and of what is counted."""
        patcher.linker.set_abi(self.abi(guest))

    def abi(self, guest: Guest) -> GuestAbi:
        """Return what code must know of the guest that runs it."""
        arena, recorder = self.arena, self.recorder
        if arena is None or recorder is None:
            raise ValueError("nothing was allocated that code could use")
        return GuestAbi(
            task=task_abi(guest.kernel),
            readers=readers(guest.kernel),
            percpu=arena.percpu,
            missed=arena.missed,
            nmissed=arena.nmissed,
            loads=arena.loads if self.counts_hits else None,
            text=guest.kernel.text,
            rings=arena.rings,
            texts=arena.texts,
            ring_size=arena.ring_size,
            task_size=guest.task_size,
            thread_size=guest.arch.thread_size,
            clock=recorder.clock.function,
            ns_per_count=round(recorder.clock.tick_s * 10**9 * 2**32) if self.has_ns else 1 << 32,
            words=None if self.words is None else self.words.addr,
            checks_tracing_on=self.checks_tracing_on,
            is_guarded=self.is_guarded or recorder.clock.function is not None,
        )

    def _free_retired(self, guest: Guest, patcher: TextPatcher) -> None:
        # Have the memory again of what nothing leads to, and nobody is inside.
        linker = patcher.linker
        retired = linker.pool.retired
        with guest.stub.paused():
            check_stopped(self._journal, guest.stub, guest.memory.ram)
            on_the_way = trap_text(guest, self._journal.allocations)
            inside = are_inside(guest, [*(each.text for each in retired), *on_the_way])
            if inside[len(retired) :].any():
                return
            tables = [each.instances for each in retired if each.instances is not None]
            in_use = returned_to(guest, tables, linker.live)
            # To look at all stacks takes a while, in which a monitor may have put the guest back.
            self._journal.check()
            for table in linker.free_retired(inside[: len(retired)].tolist(), in_use):
                guest.memory.write(table.addr, bytes(table.size))

    def _grow(self, guest: Guest, patcher: TextPatcher, plans: Collection[Plan]) -> None:
        if self.arena is None:
            raise ValueError("nothing was allocated that could grow")
        size, injector = self._rounded(self._needed(plans, ())), self._injector(guest)
        with guest.stub.paused():
            arena = arenas.grow(injector, guest.kernel, self.arena, size)
        patcher.linker.pool.grow(arena)
        patcher.notes.change((), ())

    def _free(self, guest: Guest, unused: Sequence[Arena]) -> None:
        places = {addr for each in unused for addr in each.grown}
        live = [each for each in self._journal.allocations.live if each.addr in places]
        if live:
            with self._injector(guest).task() as task:
                free(task, guest.kernel, live)

    def _injector(self, guest: Guest) -> CallInjector:
        return CallInjector(guest.stub, guest.memory, guest.kernel, self._journal.allocations)

    def _rounded(self, needed: ArenaSize) -> ArenaSize:
        code = -(-(needed.code + arenas.HEAD_SIZE) // MIB) * MIB
        instances = needed.instances + _SPARE_INSTANCES
        return replace(needed, code=max(self._size.code, code), instances=instances)

    def _needed(self, plans: Collection[Plan], waiting: Sequence[Definition]) -> ArenaSize:
        # Functions that are waited for may need instances, too.
        awaited = sum(each.kind is Kind.RETURN for each in waiting)
        instances = instances_size(plans) + (_AWAITED_INSTANCES if awaited else 0)
        # A function whose returns are taken over has a trampoline besides.
        plain = 0 if self.counts_hits else sum(map(_is_plain, plans))
        pieces = len(plans) - plain + len(instance_counts(plans))
        code = pieces * _CODE_OF_PLAN + plain * _CODE_OF_PLAIN
        patches = _UNDOS_OF_PLAN * len(plans) + _SPARE_UNDOS
        return replace(self._size, code=code, instances=instances, patches=patches)


def _is_plain(plan: Plan) -> bool:
    if plan.upcalls or plan.returning or plan.overrides or len(plan.probes) != 1:
        return False
    (probe,) = plan.probes
    return not (probe.fetches or probe.filter or probe.tables)
