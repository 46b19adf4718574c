"""Which strategy probes an instruction that is no ftrace site: the cheapest that is safe."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kprobes.errors import RefusedError
from kprobes.model.plan import Displaced, Site, Strategy, Ways
from kprobes.model.symbol import Symbols, place_of
from kprobes.ports import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What planning has to respect besides the text itself.

    Attributes:
        strategy: that the user forces, or None.
        others: addresses that other patches of the session begin at.
    """

    strategy: Strategy | None = None
    others: AbstractSet[int] = frozenset()


def choose(place: str, ways: Ways, memory: Memory, wish: Wish) -> Site:
    """Return how an instruction is probed.

    Args:
        place: its name, for messages.
        ways: that there are.
        memory: its bytes as they are now.
        wish: of the user and the session.

    Raises:
        RefusedError: no strategy is safe there, or not the one that is forced.
    """
    jump = _beside(ways.jump, wish.others)
    match wish.strategy:
        case Strategy.FTRACE:
            raise RefusedError(f"{place} is no ftrace site; {_what_works(ways.breakpoint, jump)}")
        case Strategy.JUMP if isinstance(jump, str):
            raise RefusedError(f"{place}: no jump: {jump}; {_what_works(ways.breakpoint, jump)}")
        case Strategy.BREAKPOINT if isinstance(ways.breakpoint, str) and ways.breakpoint != jump:
            why = f"no breakpoint: {ways.breakpoint}"
            raise RefusedError(f"{place}: {why}; {_what_works(ways.breakpoint, jump)}")
        case Strategy.BREAKPOINT:
            jump = "breakpoints are forced"
        case _:
            pass
    if not isinstance(jump, str):
        return _site(Strategy.JUMP, jump, memory, why="it is no ftrace site")
    if isinstance(ways.breakpoint, str):
        raise RefusedError(f"{place} cannot be probed: {ways.breakpoint}")
    return _site(Strategy.BREAKPOINT, ways.breakpoint, memory, why=jump)


def check_alone(symbols: Symbols, first: Site, second: Site) -> None:
    """Check that two places of the user's are not patched at the same instruction.

    Behind the guest's own call there may be others, which have that place's address; and on arm64 a
    function's ftrace site is behind its start, where a probe of its entry is all the same.

    Raises:
        RefusedError: they are.
    """
    if first.addr == second.addr and first.ip != second.ip:
        one, other = (place_of(symbols, site.ip) for site in (first, second))
        raise RefusedError(
            f"{one} and {other} would be patched at the same instruction, "
            f"{place_of(symbols, first.addr)}: probe one of them at a time"
        )


def _beside(jump: Displaced | str, others: AbstractSet[int]) -> Displaced | str:
    # The displaced instructions run elsewhere: a patch among them would never be hit.
    if isinstance(jump, Displaced) and not others.isdisjoint(range(jump.addr + 1, jump.stop)):
        return "its bytes would cover another probe"
    return jump


def _what_works(breakpoint_: Displaced | str, jump: Displaced | str) -> str:
    if not isinstance(jump, str):
        return "a jump works"
    return breakpoint_ if isinstance(breakpoint_, str) else "a breakpoint works"


def _site(strategy: Strategy, displaced: Displaced, memory: Memory, *, why: str) -> Site:
    return Site(
        strategy=strategy,
        addr=displaced.addr,
        old=memory.read(displaced.addr, displaced.stop - displaced.addr),
        displaced=displaced,
        why=why,
    )
