"""The strategy for an instruction that is not an ftrace site: the cheapest that is safe.

How the returns of a function are probed: the cheapest way that is proven, and what it keeps.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kprobes.errors import RefusedError
from kprobes.model.kernel import Symbols, place_of
from kprobes.model.plan import (
    Displaced,
    ExitKind,
    Exits,
    PatchOptions,
    Returning,
    ReturnMethod,
    Returns,
    Role,
    Site,
    Strategy,
)
from kprobes.model.resolved import EntryCounter, EntryValue, Operand, Resolved, base_of
from kprobes.model.upcall import Upcall
from kprobes.ports import Memory
from kprobes.units import Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What planning has to respect besides the text itself.

    Attributes:
        strategy: that the user forces, or None.
        others: addresses that other patches of the session begin at.
    """

    strategy: Strategy | None = None
    others: AbstractSet[int] = frozenset()


def choose(place: str, options: PatchOptions, memory: Memory, wish: Wish) -> Site:
    """Return how an instruction is probed.

    Args:
        place: its name, for messages.
        options: that there are.
        memory: its bytes as they are now.
        wish: of the user and the session.

    Raises:
        RefusedError: no strategy is safe there, or not the one that is forced.
    """
    jump = _beside(options.jump, wish.others)
    match wish.strategy:
        case Strategy.FTRACE:
            raise RefusedError(
                f"{place} is no ftrace site; {_what_works(options.breakpoint, jump)}"
            )
        case Strategy.JUMP if isinstance(jump, str):
            raise RefusedError(f"{place}: no jump: {jump}; {_what_works(options.breakpoint, jump)}")
        case Strategy.BREAKPOINT if (
            isinstance(options.breakpoint, str) and options.breakpoint != jump
        ):
            why = f"no breakpoint: {options.breakpoint}"
            raise RefusedError(f"{place}: {why}; {_what_works(options.breakpoint, jump)}")
        case Strategy.BREAKPOINT:
            jump = "breakpoints are forced"
        case _:
            pass
    if not isinstance(jump, str):
        return _site(Strategy.JUMP, jump, memory, why="it is no ftrace site")
    if isinstance(options.breakpoint, str):
        raise RefusedError(f"{place} cannot be probed: {options.breakpoint}")
    return _site(Strategy.BREAKPOINT, options.breakpoint, memory, why=jump)


def check_alone(symbols: Symbols, first: Site, second: Site) -> None:
    """Check that two places of the user's are not patched at the same instruction.

    After the guest's own call there may be others, which have that place's address; and on arm64 a
    function's ftrace site is after its start, where a probe of its entry is all the same.

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


_ORDER = tuple(ReturnMethod)


def choose_return_method(place: str, exits: Exits, wish: ReturnMethod | None) -> ReturnMethod:
    """Return how a function's returns are probed.

    Args:
        place: its name, for messages.
        exits: its ways out.
        wish: of the user: the way, or None for the cheapest.

    Raises:
        RefusedError: its returns cannot be probed, or not the way that is wished for.
    """
    if exits.return_method is ReturnMethod.REFUSED:
        raise RefusedError(f"{place}: its returns cannot be probed: {exits.refusal}")
    if wish is None or _ORDER.index(wish) >= _ORDER.index(exits.return_method):
        return exits.return_method if wish is not ReturnMethod.RETHOOK else wish
    raise RefusedError(f"{place}: not by {wish}: {_why_not(exits)}; {exits.return_method} works")


def make_returns(
    entry: Addr,
    return_method: ReturnMethod,
    probes: Sequence[Resolved],
    upcalls: Sequence[Upcall] = (),
) -> Returns:
    """Return all return probes of one function with what they need of its entry."""
    operands = [operand for probe in probes for operand in _operands(probe)]
    kept = [operand.base for operand in operands if isinstance(operand, EntryValue)]
    return Returns(
        entry=entry,
        return_method=return_method,
        probes=tuple(probes),
        kept=tuple(dict.fromkeys(kept)),
        is_timed=any(isinstance(operand, EntryCounter) for operand in operands),
        upcalls=tuple(upcalls),
    )


def roles(returns: Returns, exits: Exits) -> Iterable[tuple[Addr, Returning]]:
    """Yield what is done where, at addresses of the function; the trampoline left aside."""
    if returns.return_method is ReturnMethod.RETHOOK:
        yield returns.entry, Returning(role=Role.HOOK, returns=returns)
        return
    if returns.keeps:
        yield returns.entry, Returning(role=Role.ENTER, returns=returns)
    for exit_ in exits.exits:
        if exit_.kind is ExitKind.RETURN:
            yield exit_.addr, Returning(role=Role.RETURN, returns=returns)
        else:
            is_conditional = exit_.kind is ExitKind.BRANCH
            yield (
                exit_.addr,
                Returning(role=Role.TAIL, returns=returns, is_conditional=is_conditional),
            )


def forced_return_method(
    return_method: ReturnMethod | None, strategy: Strategy | None
) -> ReturnMethod | None:
    """Return the way that follows from what the user forces: only entries are ftrace sites."""
    return (
        ReturnMethod.RETHOOK
        if return_method is None and strategy is Strategy.FTRACE
        else return_method
    )


def at_exits(strategy: Strategy | None) -> Strategy | None:
    """Return what is forced on exits, where there is no ftrace site."""
    return None if strategy is Strategy.FTRACE else strategy


def _operands(probe: Resolved) -> Iterable[Operand]:
    for fetch in probe.fetches:
        operand: Operand | None = fetch.operand
        while operand is not None:
            yield operand
            if isinstance(operand, EntryValue):
                break
            operand = base_of(operand)


def _why_not(exits: Exits) -> str:
    if exits.why_not is not None:
        return f"its exits are not proven: {exits.why_not.why}"
    return "it is left by jumps into other functions"
