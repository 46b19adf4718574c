"""Return probes of functions to what is done at which of their addresses."""

from collections.abc import Collection, Sequence
from functools import cached_property

from kprobes.errors import RefusedError
from kprobes.guest.places import FindSite, Places
from kprobes.guest.text import Prover
from kprobes.model.plan import Exits, Returning, ReturnMethod, Returns, Strategy
from kprobes.model.resolved import Resolved
from kprobes.model.upcall import Upcall
from kprobes.plan.strategy import (
    Wish,
    at_exits,
    change_returns,
    choose_return_method,
    forced_return_method,
    make_returns,
    roles,
)
from kprobes.units import Addr


class ReturnPlanner:
    """Decides how returns are probed, by the text at one time.

    Attributes:
        text: as it was then.
    """

    def __init__(
        self,
        places: Places,
        *,
        return_method: ReturnMethod | None,
        strategy: Strategy | None,
        overridden: Collection[Addr] = (),
    ) -> None:
        """Plan so.

        Args:
            places: of the guest.
            return_method: forced unless it is None.
            strategy: likewise.
            overridden: entries of functions whose calls may be skipped.
        """
        self.text = places.instructions()
        self._places = places
        self._return_method = forced_return_method(return_method, strategy)
        self._strategy = strategy
        self._overridden = overridden

    def plan(
        self,
        entry: Addr,
        probes: Sequence[Resolved],
        upcalls: Sequence[Upcall] = (),
        before: Returns | None = None,
        *,
        is_fresh: bool = True,
    ) -> tuple[Returns, list[tuple[Addr, Returning]]]:
        """Return the return probes of one function, and what is done at which address for them.

        Args:
            entry: the address of the function's probe.
            probes: newest first.
            upcalls: what Python does at its returns.
            before: what they were until now, where calls may be in progress.
            is_fresh: whether the method is chosen anew where they were probed before.

        Raises:
            RefusedError: the returns cannot be probed, or not as it is forced.
        """
        function = self._places.kernel.symbols.at(probes[0].function if probes else entry)
        if function is None:
            raise RefusedError(f"{entry:#x}: no function is known there")
        exits = self._prover.classify(function).exits
        name = probes[0].layout.function if probes else function.name
        if entry in self._overridden:
            return_method = self._choose_overridden(name, exits)
        elif before is None or is_fresh:
            return_method = self._choose(name, exits)
        else:
            return_method = before.return_method
        if before is not None:
            returns = change_returns(before, name, return_method, probes, upcalls)
        else:
            returns = make_returns(entry, return_method, probes, upcalls)
        return returns, list(roles(returns, exits))

    def _choose_overridden(self, name: str, exits: Exits) -> ReturnMethod:
        # A call that is skipped comes to no return instruction; its return is the override's value.
        if (wish := self._return_method) not in (None, ReturnMethod.RETHOOK):
            raise RefusedError(
                f"{name}: not by {wish}: its calls may be skipped, and come to no return "
                f"instruction then; {ReturnMethod.RETHOOK} works"
            )
        return choose_return_method(name, exits, ReturnMethod.RETHOOK)

    def _choose(self, name: str, exits: Exits) -> ReturnMethod:
        return_method = choose_return_method(name, exits, self._return_method)
        if (
            return_method is not ReturnMethod.RETHOOK
            and (why := self._in_the_way(exits)) is not None
        ):
            if self._return_method is not None:
                raise RefusedError(f"{name}: not by {self._return_method}: {why}")
            return_method = ReturnMethod.RETHOOK
        return return_method

    @cached_property
    def _prover(self) -> Prover:
        # It reads tables that probes at entries do not need.
        return Prover(self._places.text, self._places.arch.patch)

    def _in_the_way(self, exits: Exits) -> str | None:
        others = {exit_.addr for exit_ in exits.exits}
        wish = Wish(strategy=at_exits(self._strategy), others=others)
        find_site = self._places.find_site(wish, self.text)
        return next(
            (why for addr in others if (why := _refusal(find_site, addr)) is not None), None
        )


def _refusal(find_site: FindSite, addr: Addr) -> str | None:
    try:
        find_site(addr)
    except RefusedError as error:
        return str(error)
    return None
