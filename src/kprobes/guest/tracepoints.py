"""Tracepoints that are probed call a function of ours meanwhile, whoever else listens to them.

A tracepoint does nothing until somebody listens. That its iterator, ``__traceiter_NAME``, is called
then is not sure: where only one listens, calls that are static (x86) lead to that one; elsewhere
the iterator may be part of the function that has the tracepoint. So a function of ours listens,
which does nothing but to have a site like those of the function tracer: that is patched as they
are, at the same time as whatever else changes. The kernel's own ``__probestub_NAME`` is not used:
with that its own events of tracepoints come and go.

kernel/tracepoint.c, include/linux/tracepoint-defs.h:

    int tracepoint_probe_register(struct tracepoint *tp, void *probe, void *data);
    int tracepoint_probe_unregister(struct tracepoint *tp, void *probe, void *data);
    struct tracepoint { ...; struct tracepoint_func *funcs; };
    struct tracepoint_func { void *func; void *data; int prio; };     // the last: func is NULL
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack

from kprobes.errors import RefusedError, TargetError
from kprobes.guest.allocations import Allocation, AllocationLog, Kind
from kprobes.guest.arena import LISTENER_SIZE, LISTENERS, Arena
from kprobes.guest.guest import Guest, remembering, write_code
from kprobes.guest.inject import CallInjector, Task
from kprobes.guest.kernel_abi import first_of
from kprobes.guest.release import free
from kprobes.model.kernel import place_of
from kprobes.units import Addr

_INT = 0xFFFF_FFFF


class Tracepoints:
    """Those of one session that are on."""

    def __init__(self, guest: Guest, arena: Arena, allocations: AllocationLog) -> None:
        """Switch nothing on yet."""
        self._guest = guest
        self._arena = arena
        self._allocations = allocations
        self._has_code = False

    def place(self, tracepoint: Addr) -> Addr:
        """Return where the site is that a tracepoint which is on comes to."""
        (listener,) = (each.size for each in self._on if each.addr == tracepoint)
        arch = self._guest.arch
        return Addr(listener + len(arch.patch.landing_pad) + len(arch.site.preamble))

    def switch_on(self, wanted: Collection[Addr]) -> bool:
        """Have tracepoints call us; the guest runs meanwhile. Return whether any did not before.

        Args:
            wanted: addresses of struct tracepoint.

        Raises:
            RefusedError: they are too many.
            TargetError: the guest refuses, or no task could make the call. None is new then.
        """
        on = {each.addr: each.size for each in self._on}
        new = sorted(set(wanted) - on.keys())
        if not new:
            return False
        if (count := len(on) + len(new)) > LISTENERS:
            raise RefusedError(f"{count} tracepoints: at most {LISTENERS} can be on at once")
        guest, unused = self._guest, (each for each in self._each() if each not in on.values())
        points = [
            Allocation(kind=Kind.TRACEPOINT, addr=addr, size=listener)
            for addr, listener in zip(new, unused, strict=False)
        ]
        with guest.stub.paused():
            self._load()
            with self._injector().task() as task, ExitStack() as undo:
                undo.callback(self._free, task, points)
                for point in points:
                    self._switch_on(task, point)
                undo.pop_all()
        return True

    def switch_off(self, gone: Collection[Addr]) -> bool:
        """Have tracepoints call us no more; return whether any did.

        Where nobody else listens, they do nothing again.

        Raises:
            TargetError: no task could make the call.
        """
        found = [each for each in self._on if each.addr in gone]
        if not found:
            return False
        with self._guest.stub.paused(), self._injector().task() as task:
            self._free(task, found)
        return True

    @property
    def _on(self) -> list[Allocation]:
        return [each for each in self._allocations.live if each.kind is Kind.TRACEPOINT]

    def _injector(self) -> CallInjector:
        guest = self._guest
        return CallInjector(guest.stub, guest.memory, guest.kernel, self._allocations)

    def _switch_on(self, task: Task, point: Allocation) -> None:
        kernel, args = self._guest.kernel, (point.addr, point.size, point.size)
        register = first_of(kernel, "tracepoint_probe_register")
        result = task.call(register, *args, allocates=point) & _INT
        if result:
            place = place_of(kernel.symbols, Addr(point.addr))
            raise TargetError(f"the guest refused to switch {place} on: error {-result & _INT}")

    def _free(self, task: Task, points: Collection[Allocation]) -> None:
        live = [each for each in self._on if each in points]
        free(task, self._guest.kernel, live)

    def _each(self) -> Iterator[Addr]:
        for number in range(LISTENERS):
            yield Addr(self._arena.listeners + LISTENER_SIZE * number)

    def _load(self) -> None:
        if self._has_code:
            return
        guest, arch = self._guest, self._guest.arch
        code = arch.patch.landing_pad + arch.site.preamble + arch.site.nops[0] + arch.patch.ret
        codes = [(place, code) for place in self._each()]
        write_code(guest.stub, remembering(guest.memory), codes)
        self._has_code = True
