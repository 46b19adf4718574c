"""The memory of one session in a guest: taken once, grown, and kept where calls still return to.

What compiled code must know of it and of the guest.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kprobes.errors import TargetError
from kprobes.guest import arena as arenas
from kprobes.guest.arena import Arena, ArenaSize
from kprobes.guest.arm import silence
from kprobes.guest.clock import AnyClock, GuestClock, clock_function, open_clock
from kprobes.guest.guest import Guest
from kprobes.guest.inject import CallInjector
from kprobes.guest.journal import Journal
from kprobes.guest.kernel_abi import readers, task_abi
from kprobes.guest.link import Trampoline, instance_counts, instances_size
from kprobes.guest.notes import begin_notes, write_notes
from kprobes.guest.recorder import Recorder
from kprobes.guest.release import await_leaving, free, unused
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
        arena: what was allocated; None before the first time, and when it was given back.
        recorder: of its rings; likewise, but kept.
        trampolines: that calls in progress may return to, of whatever recording.
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
        self.trampolines: Sequence[Trampoline] = ()
        self._journal = journal
        self._size = size
        self._warn = warn
        self._clock: Addr | None = None

    def keep_calls(
        self, guest: Guest, plans: Sequence[Plan], waiting: Sequence[Definition]
    ) -> Sequence[Trampoline]:
        """Return what of the recording before must stay; the rest is about to be overwritten.

        It is the code where tasks sleep in calls that return to us.

        Raises:
            TargetError: somebody stays in other code of ours for seconds.
        """
        arena, allocations = self.arena, self._journal.allocations
        if arena is None:
            return ()
        tables = await_leaving(guest, allocations, otherwise="new probes cannot be armed yet")
        kept = [each for each in self.trampolines if each.instances in tables]
        new = [each.silenced for each in kept if not each.is_silent]
        if new:
            silence(guest, arena, self.abi(guest, arena, plans, waiting), new)
        self.trampolines = [each.silenced for each in kept]
        # Before their memory goes: there is nothing more to be looked for.
        allocations.keep_instances([each.instances for each in self.trampolines])
        self._free_unused(guest, arena)
        arenas.forget_calls(self._beside_kept(arena), guest.memory)
        return self.trampolines

    def allocate(
        self, guest: Guest, plans: Sequence[Plan], waiting: Sequence[Definition]
    ) -> tuple[Arena, Recorder]:
        """Return room for the code and the calls of some plans, and what reads their records.

        Raises:
            TargetError: the guest has not enough memory, or no task could make the call.
        """
        needed = self._needed(plans, waiting)
        size = self._rounded(needed)
        if self.arena is None or self.recorder is None:
            with guest.stub.paused():
                arena = arenas.allocate(
                    self._injector(guest),
                    guest.kernel,
                    size,
                    note=partial(begin_notes, guest.memory, journal=self._journal),
                )
            write_notes(guest.memory, arena, self._journal)
            # Nobody knows of this memory yet, so the guest may run on meanwhile.
            arenas.reset(arena, guest.memory)
            self.arena = arena
            self._clock = clock_function(guest.memory, guest.kernel)
            self.recorder = Recorder(arena, guest.memory, self._open_clock(guest, arena))
            self.recorder.check = self._journal.check
            self.recorder.warn = self._warn
        if not self._beside_kept(self.arena).has_room(needed):
            with guest.stub.paused():
                self.arena = arenas.grow(self._injector(guest), guest.kernel, self.arena, size)
            write_notes(guest.memory, self.arena, self._journal)
        return self._beside_kept(self.arena), self.recorder

    def abi(
        self, guest: Guest, arena: Arena, plans: Sequence[Plan], waiting: Sequence[Definition]
    ) -> GuestAbi:
        """Return what the code of some plans must know."""
        return GuestAbi(
            task=task_abi(guest.kernel),
            readers=readers(guest.kernel),
            percpu=arena.percpu,
            missed=arena.missed,
            nmissed=arena.nmissed,
            code=_hull([arena.programs[0], *(each.text for each in self.trampolines)]),
            rings=arena.rings,
            texts=arena.texts,
            ring_size=arena.ring_size,
            task_size=guest.task_size,
            thread_size=guest.arch.thread_size,
            clock=self._clock,
            is_guarded=bool(waiting) or any(plan.calls_guest for plan in plans),
        )

    def _free_unused(self, guest: Guest, arena: Arena) -> None:
        allocations = self._journal.allocations
        kept = (addr for each in self.trampolines for addr in (each.text[0], each.instances.addr))
        live = unused(allocations, {*arena.parts, *kept})
        if live:
            # Else next time: no task may be there that could make the call.
            with suppress(TargetError), guest.stub.paused(), self._injector(guest).task() as task:
                free(task, guest.kernel, live)

    def _beside_kept(self, arena: Arena) -> Arena:
        # What of an arena is not kept.
        kept = self.trampolines
        instances = [
            (each.instances.addr, Addr(each.instances.addr + each.instances.size)) for each in kept
        ]
        return arena.beside([*instances, *(each.text for each in kept)])

    def _injector(self, guest: Guest) -> CallInjector:
        return CallInjector(guest.stub, guest.memory, guest.kernel, self._journal.allocations)

    def _rounded(self, needed: ArenaSize) -> ArenaSize:
        code = -(-(needed.code + arenas.NOTIFIER_SIZE) // MIB) * MIB
        instances = needed.instances + _SPARE_INSTANCES
        return replace(needed, code=max(self._size.code, code), instances=instances)

    def _needed(self, plans: Sequence[Plan], waiting: Sequence[Definition]) -> ArenaSize:
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


def _hull(texts: Sequence[Text]) -> Text:
    return min(start for start, _ in texts), max(stop for _, stop in texts)
