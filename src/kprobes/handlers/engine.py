"""Upcalls to armed sites of one guest, beside the definitions that are being recorded."""

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from kprobes.errors import RefusedError, UsageError
from kprobes.guest.driver import GuestDriver
from kprobes.guest.text import check_text, has_text
from kprobes.handlers.arguments import HandlerPlace
from kprobes.lang.parser import parse
from kprobes.model.kernel import Symbol
from kprobes.model.upcall import Upcall
from kprobes.units import Addr


class GuestEngine:
    """Arms upcalls by a guest's driver. Implements ``registry.Engine``.

    A change arms and disarms the difference: everything else goes on.
    """

    def __init__(self, driver: GuestDriver) -> None:
        self._driver = driver
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
        check_text(driver.guest.kernel, addr)
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
        self._driver.apply(
            partial(
                replace,
                options=self._driver.options,
                upcalls=at_sites,
                return_upcalls=at_returns,
                is_there=self._is_there,
            )
        )

    def missed_upcall(self, number: int) -> int:
        """Return how many hits went on without an upcall, whoever had its number."""
        return self._driver.missed_upcall(number)

    def caller_of(self, slot: Addr, held: Addr) -> Addr:
        """Return where a call came from, by its slot and what its return address is now."""
        return self._driver.view.caller_of(slot, held)

    def _function(self, addr: Addr, name: str) -> Symbol:
        symbols = self._driver.guest.kernel.symbols
        function = symbols.at(addr)
        if function is None:
            raise RefusedError(f"{addr:#x} is in no function that is there now")
        # Of several names the types may know only the one that was given.
        given = (each for each in symbols.all_named(name) if each.addr == function.addr)
        return next(given, function)

    def _is_there(self, addr: Addr) -> bool:
        kernel, function = self._driver.guest.kernel, self._functions[addr]
        return function in kernel.symbols.all_named(function.name) and has_text(kernel, addr)

    def _entry(self, function: Symbol) -> Addr | None:
        try:
            return self._driver.places.locate(function)
        except RefusedError:
            return None
