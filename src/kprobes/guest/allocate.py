"""The memory of one session in a guest: taken once, and grown.

What compiled code must know of it and of the guest.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from kprobes.guest import arena as arenas
from kprobes.guest.arena import Arena, ArenaSize
from kprobes.guest.clock import AnyClock, GuestClock, clock_function, open_clock
from kprobes.guest.guest import Guest
from kprobes.guest.inject import CallInjector
from kprobes.guest.journal import Journal
from kprobes.guest.kernel_abi import readers, task_abi
from kprobes.guest.link import instance_counts, instances_size
from kprobes.guest.notes import NotesWriter, begin_notes
from kprobes.guest.recorder import Recorder
from kprobes.guest.release import free
from kprobes.model.abi import GuestAbi
from kprobes.model.definition import Definition, Kind
from kprobes.model.plan import Plan
from kprobes.ports import Text
from kprobes.units import MIB, Addr

_CODE_OF_PLAN = 1024
"""Bytes of code that a plan, or a trampoline, takes on average at most."""
_AWAITED_INSTANCES = _SPARE_INSTANCES = 1 * MIB
_UNDOS_OF_PLAN, _SPARE_UNDOS = 2, 1024
"""A site and its ftrace record; what crosses pages, comes late, or has a handler."""


class Allocator:
    """Takes a session's memory from a guest, which runs but while it is asked for it.

    Attributes:
        arena: what was allocated first; None before that, and when it was given back.
        recorder: of its rings; likewise, but kept.
    """

    def __init__(self, journal: Journal, size: ArenaSize, warn: Callable[[str], None]) -> None:
        """Take nothing yet.

        Args:
            journal: of what is allocated.
            size: that is wanted at least.
            warn: is given what is wrong with the guest's clock, for people.
        """
        self.arena: Arena | None = None
        self.recorder: Recorder | None = None
        self._journal = journal
        self._size = size
        self._warn = warn
        self._clock: Addr | None = None

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
            with guest.stub.paused():
                arena = arenas.allocate(
                    self._injector(guest),
                    guest.kernel,
                    size,
                    note=partial(begin_notes, guest.memory, journal=self._journal),
                )
            NotesWriter(guest.memory, arena, self._journal).write()
            # Nobody knows of this memory yet, so the guest may run on meanwhile.
            arenas.reset(arena, guest.memory)
            self.arena = arena
            self._clock = clock_function(guest.memory, guest.kernel)
            self.recorder = Recorder(arena, guest.memory, self._open_clock(guest, arena))
            self.recorder.check = self._journal.check
            self.recorder.warn = self._warn
        return self.arena, self.recorder

    def fits(self, plans: Collection[Plan], room: int) -> bool:
        """Whether so many bytes are enough for the code of some plans, by what plans take."""
        return self._needed(plans, ()).code <= room

    def grow(self, guest: Guest, plans: Collection[Plan]) -> Arena:
        """Return more memory for the code and the calls of some plans; see ``arena.grow``.

        Raises:
            TargetError: the guest has not enough memory, or no task could make the call.
        """
        if self.arena is None:
            raise ValueError("nothing was allocated that could grow")
        size = self._rounded(self._needed(plans, ()))
        with guest.stub.paused():
            return arenas.grow(self._injector(guest), guest.kernel, self.arena, size)

    def give_back(self, guest: Guest, arenas: Sequence[Arena]) -> None:
        """Free the memory of some arenas that were grown, which nothing is in.

        Raises:
            TargetError: no task could make the call.
        """
        places = {addr for each in arenas for addr in each.grown}
        live = [each for each in self._journal.allocations.live if each.addr in places]
        if live:
            with guest.stub.paused(), self._injector(guest).task() as task:
                free(task, guest.kernel, live)

    def abi(self, guest: Guest, code: Sequence[Text], *, is_guarded: bool) -> GuestAbi:
        """Return what code must know.

        Args:
            guest: that runs it.
            code: where trampolines may be.
            is_guarded: whether any probe calls the guest's functions.
        """
        arena = self.arena
        if arena is None:
            raise ValueError("nothing was allocated that code could use")
        return GuestAbi(
            task=task_abi(guest.kernel),
            readers=readers(guest.kernel),
            percpu=arena.percpu,
            missed=arena.missed,
            nmissed=arena.nmissed,
            code=(min(start for start, _ in code), max(stop for _, stop in code)),
            rings=arena.rings,
            texts=arena.texts,
            ring_size=arena.ring_size,
            task_size=guest.task_size,
            thread_size=guest.arch.thread_size,
            clock=self._clock,
            is_guarded=is_guarded,
        )

    def _injector(self, guest: Guest) -> CallInjector:
        return CallInjector(guest.stub, guest.memory, guest.kernel, self._journal.allocations)

    def _rounded(self, needed: ArenaSize) -> ArenaSize:
        code = -(-(needed.code + arenas.NOTIFIER_SIZE) // MIB) * MIB
        instances = needed.instances + _SPARE_INSTANCES
        return replace(needed, code=max(self._size.code, code), instances=instances)

    def _needed(self, plans: Collection[Plan], waiting: Sequence[Definition]) -> ArenaSize:
        # Functions that are waited for may need instances, too.
        awaited = sum(each.kind is Kind.RETURN for each in waiting)
        instances = instances_size(plans) + (_AWAITED_INSTANCES if awaited else 0)
        # A function whose returns are taken over has a trampoline besides.
        pieces = len(plans) + len(instance_counts(plans))
        patches = _UNDOS_OF_PLAN * len(plans) + _SPARE_UNDOS
        return replace(
            self._size, code=pieces * _CODE_OF_PLAN, instances=instances, patches=patches
        )

    def _open_clock(self, guest: Guest, arena: Arena) -> AnyClock:
        if self._clock is not None:
            return GuestClock()
        return open_clock(guest.memory, guest.kernel, arena.bases)
