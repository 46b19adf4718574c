"""Every instruction of a function with a counter, one function after the other, under load."""

import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import RefusedError
from kprobes.guest.places import Places, places_of
from kprobes.guest.text import Instructions
from kprobes.image.tables import read_function
from kprobes.model.events import Counts, Events
from kprobes.model.plan import Strategy
from kprobes.open import GuestSession
from kprobes.plan.strategy import Wish
from kprobes.units import Addr
from tests.build.blocks import runs
from tests.build.decoded import Decoded, decode
from tests.build.defined import delete_all, plans_of, recorded_by_event


class Nothing:
    """A sink for events that only count."""

    def write(self, events: Events) -> None:
        del events

    def close(self) -> None:
        pass


def lasting(seconds: float) -> Callable[[], bool]:
    """Return what says when so long has passed since it was first asked."""
    until: list[float] = []

    def is_over() -> bool:
        if not until:
            until.append(time.monotonic() + seconds)
        return time.monotonic() > until[0]

    return is_over


class Swept(Struct, frozen=True, kw_only=True):
    """What probes on some addresses counted.

    Attributes:
        hits: by address.
        strategies: by address.
        counts: all that was counted.
    """

    hits: Mapping[Addr, int]
    strategies: Mapping[Addr, Strategy]
    counts: Counts

    @property
    def is_whole(self) -> bool:
        """Whether every hit was recorded."""
        counts = self.counts
        return not counts.lost and not counts.damaged and not any(counts.missed.values())


class Sweeper:
    """Probes instructions of one session's guest by address."""

    def __init__(self, session: GuestSession) -> None:
        self.session = session
        self.guest = session.driver.guest
        self._places: Places = places_of(self.guest)
        self._text = self._places.text
        self.tables = self._text.tables
        self._at_first = Instructions(self._text, self.guest.arch.patch)

    def function(self, name: str) -> Decoded:
        """Decode a function as it is now."""
        addr = self.guest.kernel.symbols.named(name).addr
        return self.function_at(addr)

    def function_at(self, addr: int) -> Decoded:
        memory, kernel = self.guest.memory, self.guest.kernel
        return decode(kernel.arch, *read_function(memory, kernel, addr), self.tables)

    def acceptable(self, function: Decoded, strategy: Strategy | None) -> list[Addr]:
        """Return the addresses of a function's instructions that can be probed so."""
        insn_verdict = Instructions(self._text, self.guest.arch.patch)
        entry, offsets = function.addr, self.guest.arch.site.offsets
        has_site = any(entry + offset in self.tables.ftrace for offset in offsets)
        wish = Wish(strategy=strategy, others=function.instructions.keys())
        found: list[Addr] = []
        for addr in sorted(function.instructions):
            if addr == entry and has_site and addr not in self.tables.ftrace:
                # Whatever is there, it is the entry: a probe there goes to the site after it.
                continue
            try:
                if addr not in self.tables.ftrace:
                    insn_verdict.site(Addr(addr), wish)
                elif strategy is not None:
                    continue
                found.append(Addr(addr))
            except RefusedError:
                continue
        return found

    def uneven(self, function: Decoded, hits: Mapping[Addr, int], allowed: int) -> list[str]:
        """Return the runs of instructions that were not hit equally often, by name."""
        found: list[str] = []
        for run in runs(function, self.tables.exceptions):
            numbers = [hits[i.addr] for i in run if i.addr in hits]
            if numbers and max(numbers) - min(numbers) > allowed:
                found.append(f"{function.place(run[0].addr)}: {numbers}")
        return found

    def can_carry(self, addr: Addr, strategy: Strategy) -> bool:
        """Whether an instruction can be probed so when nothing else is, by the text at first."""
        try:
            self._at_first.site(addr, Wish(strategy=strategy))
        except RefusedError:
            return False
        return True

    def only_breakpoint(self, function: Decoded) -> list[Addr]:
        """Return where a function can carry a breakpoint, but no jump."""
        places = self.acceptable(function, Strategy.BREAKPOINT)
        return [addr for addr in places if not self.can_carry(addr, Strategy.JUMP)]

    def count(self, addrs: Sequence[Addr], strategy: Strategy | None, *, for_s: float) -> Swept:
        """Count hits of each for a while."""
        session = self.session
        session.options = replace(session.options, strategy=strategy)
        delete_all(session)
        session.probe("\n".join(f"p:e{n} {addr:#x}" for n, addr in enumerate(addrs)))
        counts = session.stream(Nothing(), is_done=lasting(for_s))
        recorded, plans = recorded_by_event(session), plans_of(session)
        hits = {addr: recorded[f"e{n}"] for n, addr in enumerate(addrs)}
        strategies = {Addr(p.probes[0].layout.ip): p.site.strategy for p in plans}
        return Swept(hits=hits, strategies=strategies, counts=counts)
