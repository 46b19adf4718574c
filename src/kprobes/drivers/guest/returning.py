"""Return probes to what is done at which address of their functions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from kprobes.drivers.exits import Prover
from kprobes.drivers.places import Look, Places
from kprobes.drivers.pump import nothing
from kprobes.errors import RefusedError
from kprobes.lang.listing import is_of_pattern
from kprobes.model.exits import Exits, ReturnWay
from kprobes.model.plan import Strategy
from kprobes.model.resolved import Resolved
from kprobes.model.returns import Returning
from kprobes.model.upcall import Upcall
from kprobes.plan.choose import Wish
from kprobes.plan.returns import at_exits, choose_way, forced_way, make_returns, roles
from kprobes.units import Addr

Roles = dict[Addr, list[Returning]]
"""What return probes do, by address."""


class ReturnPlanner:
    """Decides how returns are probed, by the text at one time.

    Attributes:
        text: as it was then.
        left_out: why functions of patterns, whose returns cannot be probed, are left out.
    """

    def __init__(self, places: Places, *, way: ReturnWay | None, strategy: Strategy | None) -> None:
        """Plan so; ``way`` and ``strategy`` are forced unless they are None."""
        self.text = places.instructions()
        self.left_out: list[RefusedError] = []
        self._places = places
        self._way = forced_way(way, strategy)
        self._strategy = strategy

    def plan(
        self,
        by_entry: Mapping[Addr, Sequence[Resolved]],
        asking: Mapping[Addr, Sequence[Upcall]] = MappingProxyType({}),
        checkpoint: Callable[[], None] = nothing,
    ) -> Roles:
        """Return what is done where for the return probes of some functions.

        Args:
            by_entry: probes by the address of their function's probe, newest first.
            asking: what Python does at returns, likewise.
            checkpoint: called for every function; what it raises ends the planning.

        Raises:
            RefusedError: the returns of a function cannot be probed, or not as it is forced,
                and it was named, or it is the only one.
        """
        found: Roles = {}
        self.left_out = []
        for entry in dict.fromkeys((*by_entry, *asking)):
            checkpoint()
            probes, upcalls = by_entry.get(entry, ()), asking.get(entry, ())
            try:
                function = list(self._function(entry, probes, upcalls))
            except RefusedError as error:
                if upcalls or not all(is_of_pattern(probe.definition) for probe in probes):
                    raise
                self.left_out.append(error)
                continue
            for addr, returning in function:
                found.setdefault(addr, []).append(returning)
        if self.left_out and not found:
            raise self.left_out[0]
        return found

    def _function(
        self, entry: Addr, probes: Sequence[Resolved], upcalls: Sequence[Upcall]
    ) -> Iterator[tuple[Addr, Returning]]:
        function = self._places.kernel.symbols.at(probes[0].function if probes else entry)
        if function is None:
            raise RefusedError(f"{entry:#x}: no function is known there")
        exits = self._prover.classify(function).exits
        name = probes[0].layout.function if probes else function.name
        way = choose_way(name, exits, self._way)
        if way is not ReturnWay.RETHOOK and (why := self._in_the_way(exits)) is not None:
            if self._way is not None:
                raise RefusedError(f"{name}: not by {self._way}: {why}")
            way = ReturnWay.RETHOOK
        yield from roles(make_returns(entry, way, probes, upcalls), exits)

    @cached_property
    def _prover(self) -> Prover:
        # It reads tables that probes at entries do not need.
        return Prover(self._places.text, self._places.arch.patch)

    def _in_the_way(self, exits: Exits) -> str | None:
        others = {exit_.addr for exit_ in exits.exits}
        wish = Wish(strategy=at_exits(self._strategy), others=others)
        look = self._places.look(wish, self.text)
        return next((why for addr in others if (why := _refusal(look, addr)) is not None), None)


def _refusal(look: Look, addr: Addr) -> str | None:
    try:
        look(addr)
    except RefusedError as error:
        return str(error)
    return None
