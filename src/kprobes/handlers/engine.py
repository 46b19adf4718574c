"""Upcalls to armed sites of one guest, beside the definitions that are being recorded."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from kprobes.errors import RefusedError, UsageError
from kprobes.guest.driver import GuestDriver
from kprobes.handlers.arguments import HandlerPlace
from kprobes.lang.parser import parse
from kprobes.model.definition import Definition
from kprobes.model.kernel import Symbol
from kprobes.model.upcall import Upcall
from kprobes.units import Addr


class GuestEngine:
    """Arms upcalls by a guest's driver. Implements ``registry.Engine``.

    Every change puts all sites back and arms what is wanted anew: hits in between, some tens of
    milliseconds, are those of a kernel without probes.

    Attributes:
        recorded: definitions that are armed besides, while a recording runs.
    """

    def __init__(self, driver: GuestDriver) -> None:
        self.recorded: Sequence[Definition] = ()
        self._driver = driver
        self._asked: tuple[Sequence[Upcall], Sequence[Upcall]] = ((), ())
        self._functions: dict[Addr, Symbol] = {}

    def find_place(self, text: str) -> HandlerPlace:
        """Return the place that a text names.

        Raises:
            DefinitionError: there is none.
            RefusedError: no probe can be there.
            UsageError: it is a pattern.
        """
        driver = self._driver
        driver.refresh_modules()
        arch, places = driver.guest.arch, driver.places
        definition = parse(f"p {text}", registers=arch.registers)
        if definition.place.is_glob:
            raise UsageError(f"{text} names many functions: a probe with handlers is at one place")
        addr = places.resolve(definition, event_id=1).layout.ip
        function = self._functions[addr] = self._function(addr, definition.place.symbol)
        is_site = places.ftrace_site(addr) is not None
        return HandlerPlace(
            addr=addr,
            function=function,
            is_entry=addr == function.addr or addr == self._entry(function),
            following=Addr(addr + arch.site.size) if is_site else None,
        )

    @property
    def cpus(self) -> int:
        """How many CPUs the guest may have."""
        return self._driver.cpus

    def arm_upcalls(self, at_sites: Sequence[Upcall], at_returns: Sequence[Upcall]) -> None:
        """Arm these and no others; those of before when this fails.

        Args:
            at_sites: before or after single instructions.
            at_returns: at all returns of functions, by their entries.

        Raises:
            RefusedError: no probe can be there, or Python cannot be asked in this guest.
            TargetError: the guest changed a site, or has no memory.
        """
        before = self._asked
        self._driver.disarm()
        try:
            self._arm(at_sites, at_returns)
        except BaseException:
            self._arm(*before)
            raise

    def resume(self) -> None:
        """Arm what a recording that has ended has left of them."""
        self.recorded = ()
        if any(self._asked):
            # What was recorded is still to be told of.
            plans = self._driver.plans
            self._arm(*self._asked)
            self._driver.plans = plans

    @contextmanager
    def resting(self) -> Generator[None]:
        """Put sites back as long as text is planned for, unless a recording runs."""
        if not any(self._asked) or self.recorded:
            yield
            return
        self._driver.disarm()
        self._driver.upcalls = self._driver.return_upcalls = ()
        try:
            yield
        finally:
            self.resume()

    def missed_upcall(self, number: int) -> int:
        """Return how many hits went on without an upcall, whoever had its number."""
        return self._driver.missed_upcall(number)

    def caller_of(self, slot: Addr, held: Addr) -> Addr:
        """Return where a call came from, by its slot and what its return address is now."""
        return self._driver.caller_of(slot, held)

    def _arm(self, at_sites: Sequence[Upcall], at_returns: Sequence[Upcall]) -> None:
        # What was in a module that is gone is gone with it, as in the kernel.
        self._driver.refresh_modules()
        driver = self._driver
        driver.upcalls = [each for each in at_sites if self._is_there(each.addr)]
        driver.return_upcalls = [each for each in at_returns if self._is_there(each.addr)]
        self._asked = (driver.upcalls, driver.return_upcalls)
        if any(self._asked) or self.recorded:
            self._driver.prepare(self.recorded)
            self._driver.arm(is_new=False)

    def _function(self, addr: Addr, name: str) -> Symbol:
        symbols = self._driver.guest.kernel.symbols
        function = symbols.at(addr)
        if function is None:
            raise RefusedError(f"{addr:#x} is in no function that is there now")
        # Of several names the types may know only the one that was given.
        given = (each for each in symbols.all_named(name) if each.addr == function.addr)
        return next(given, function)

    def _is_there(self, addr: Addr) -> bool:
        named = self._driver.guest.kernel.symbols.all_named(self._functions[addr].name)
        return self._functions[addr] in named

    def _entry(self, function: Symbol) -> Addr | None:
        try:
            return self._driver.places.locate(function)
        except RefusedError:
            return None
