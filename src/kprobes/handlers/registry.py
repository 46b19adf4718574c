"""All probes with handlers of one session: registered together or not at all, and armed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Protocol

from msgspec import Struct

from kprobes.errors import UsageError
from kprobes.handlers.arguments import HandlerPlace
from kprobes.handlers.calling import Report
from kprobes.handlers.dispatch import Side, serving, sides_of
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.probe import Kretprobe, Probe
from kprobes.model.upcall import Upcall, WaitingVcpu
from kprobes.units import Addr


class Engine(Protocol):
    """What arms upcalls in a guest."""

    @property
    def cpus(self) -> int:
        """How many CPUs it may have."""
        ...

    def find_place(self, text: str) -> HandlerPlace:
        """Return the place that a text names, or raise DefinitionError or RefusedError."""
        ...

    def arm_upcalls(self, at_sites: Sequence[Upcall], at_returns: Sequence[Upcall]) -> None:
        """Arm these and no others; those of before when this fails."""
        ...

    def missed_upcall(self, number: int) -> int:
        """Return how many hits went on without an upcall, whoever had its number."""
        ...

    def caller_of(self, slot: Addr, held: Addr) -> Addr:
        """Return where a call came from, by its slot and what its return address is now."""
        ...


class _Entry(Struct, frozen=True, kw_only=True):
    # One probe, its place, and what its upcalls had missed before: numbers are used again.
    probe: Probe
    place: HandlerPlace
    numbers: Sequence[int]
    missed_before: int


class Registry:
    """Probes with handlers, by address.

    Attributes:
        live: the kernel that they are in.
        report: of their errors.
    """

    def __init__(self, engine: Engine, live: LiveKernel) -> None:
        self.live = live
        self.report = Report()
        self._engine = engine
        self._entries: dict[Probe, _Entry] = {}
        self._numbers: dict[tuple[Addr, Side], int] = {}
        self._lock = threading.RLock()
        self._server: int | None = None

    def __repr__(self) -> str:
        """Return what it is: what is registered."""
        return f"<Registry of {list(self._entries)}>"

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What is registered, oldest first."""
        return tuple(self._entries)

    def find_place(self, text: str) -> HandlerPlace:
        """Return the place that a text names, or raise DefinitionError or RefusedError."""
        return self._engine.find_place(text)

    def register(self, probes: Sequence[Probe]) -> None:
        """Arm probes: all of them, or none.

        Raises:
            DefinitionError: there is no such place.
            RefusedError: no probe can be there.
            UsageError: one is registered already, or this is called by a handler.
        """
        self._check_not_serving("register probes")
        with self._lock:
            before, numbers = self._entries, self._numbers
            self._entries, self._numbers = dict(before), dict(numbers)
            try:
                for probe in probes:
                    self._add(probe)
                self._arm()
            except BaseException:
                self._entries, self._numbers = before, numbers
                raise
            for probe in probes:
                probe.bind(self, addr=self._entries[probe].place.addr)

    def unregister(self, *probes: Probe) -> None:
        """Disarm probes for good.

        Raises:
            UsageError: one is not registered, or this is called by a handler.
        """
        self._check_not_serving("unregister probes; it can disable them")
        with self._lock:
            for probe in probes:
                self._entry(probe)
            for probe in probes:
                missed = self.missed(probe)
                del self._entries[probe]
                probe.bind(None, addr=None, missed=missed)
            addrs = self._addrs()
            self._numbers = {key: n for key, n in self._numbers.items() if key[0] in addrs}
            self._arm()

    def enable(self, probe: Probe, *, is_enabled: bool) -> None:
        """Arm a probe, or disarm it and keep it.

        What a handler disables is called no more; its place is put back with the next change.
        """
        if self._is_serving():
            probe.is_enabled = is_enabled
            return
        with self._lock:
            probe.is_enabled = is_enabled
            self._arm()

    def missed(self, probe: Probe) -> int:
        """Return how often a probe's handlers were due and were not run."""
        entry = self._entry(probe)
        return self._missed(entry.numbers) - entry.missed_before

    def _entry(self, probe: Probe) -> _Entry:
        if probe not in self._entries:
            raise UsageError(f"the {probe.kind} on {probe.place} is not registered")
        return self._entries[probe]

    def _missed(self, numbers: Sequence[int]) -> int:
        return sum(map(self._engine.missed_upcall, numbers))

    def _add(self, probe: Probe) -> None:
        if probe.is_registered or probe in self._entries:
            raise UsageError(f"the {probe.kind} on {probe.place} is registered already")
        place = self._engine.find_place(probe.place)
        if isinstance(probe, Kretprobe):
            place.check_entry()
            probe.start(self._engine.cpus)
        numbers = [self._number(place.addr, side) for side in sides_of(probe)]
        self._entries[probe] = _Entry(
            probe=probe, place=place, numbers=numbers, missed_before=self._missed(numbers)
        )

    def _number(self, addr: Addr, side: Side) -> int:
        # As small as can be: the guest has a table of them.
        taken = set(self._numbers.values())
        free = next(number for number in count() if number not in taken)
        return self._numbers.setdefault((addr, side), free)

    def _arm(self) -> None:
        found = [each for addr in self._addrs() for each in self._upcalls(addr)]
        at_sites = [upcall for side, upcall in found if side is not Side.RETURNED]
        at_returns = [upcall for side, upcall in found if side is Side.RETURNED]
        self._engine.arm_upcalls(at_sites, at_returns)

    def _addrs(self) -> Sequence[Addr]:
        return list(dict.fromkeys(entry.place.addr for entry in self._entries.values()))

    def _upcalls(self, addr: Addr) -> Iterator[tuple[Side, Upcall]]:
        there = [entry for entry in self._entries.values() if entry.place.addr == addr]
        # add_new_kprobe() puts the new one before the others.
        probes = [entry.probe for entry in reversed(there) if entry.probe.is_enabled]
        serves = serving(
            self.live,
            there[0].place,
            probes,
            report=self.report,
            caller_of=self._engine.caller_of,
        )
        for side, serve in serves.items():
            timeouts = [probe.timeout_s for probe in probes if side in sides_of(probe)]
            if timeouts:
                yield (
                    side,
                    Upcall(
                        number=self._numbers[addr, side],
                        addr=addr,
                        is_after=side is Side.AFTER,
                        timeout_s=max(timeouts),
                        serve=self._noting(serve),
                    ),
                )

    def _noting(self, serve: Callable[[WaitingVcpu], None]) -> Callable[[WaitingVcpu], None]:
        def noted(vcpu: WaitingVcpu) -> None:
            self._server = threading.get_ident()
            try:
                serve(vcpu)
            finally:
                self._server = None

        return noted

    def _is_serving(self) -> bool:
        # Whether a handler is calling us.
        return self._server == threading.get_ident()

    def _check_not_serving(self, what: str) -> None:
        if self._is_serving():
            raise UsageError(f"a handler cannot {what}: its CPU waits in the code to be replaced")
