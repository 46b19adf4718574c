"""The strategy for an instruction that is not an ftrace site: the cheapest that is safe.

How the returns of a function are probed: the cheapest way that is proven, and what it keeps.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from msgspec import Struct
from msgspec.structs import replace

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
from kprobes.model.resolved import EntryCounter, EntryValue, Operand, Resolved
from kprobes.model.upcall import Upcall
from kprobes.ports import Memory
from kprobes.units import Addr


class Wish(Struct, frozen=True, kw_only=True):
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
                f"{place} is not an ftrace site; {_what_works(options.breakpoint, jump)}"
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
        return _site(Strategy.JUMP, jump, memory, why="it is not an ftrace site")
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


SPARE_VALUES = 4
"""Values that a function's instances have room for besides those that they need at first."""


def make_returns(
    entry: Addr,
    return_method: ReturnMethod,
    probes: Sequence[Resolved],
    upcalls: Sequence[Upcall] = (),
) -> Returns:
    """Return all return probes of one function with what they need of its entry.

    Args:
        entry: the address of the function's probe.
        return_method: how its returns are probed.
        probes: newest first.
        upcalls: what Python does at every return.
    """
    kept, is_timed = _kept(probes)
    returns = Returns(
        entry=entry,
        return_method=return_method,
        probes=tuple(probes),
        kept=kept,
        is_timed=is_timed,
        upcalls=tuple(upcalls),
    )
    return replace(returns, room=len(kept) + SPARE_VALUES) if returns.has_instances else returns


def change_returns(
    returns: Returns,
    name: str,
    return_method: ReturnMethod,
    probes: Sequence[Resolved],
    upcalls: Sequence[Upcall] = (),
) -> Returns:
    """Return what becomes of a function's return probes when others come or some go.

    Calls in progress stay what they are: what they keep stays where it is.

    Args:
        returns: as they were.
        name: of the function, for messages.
        return_method: how they are probed from now on.
        probes: newest first, from now on.
        upcalls: from now on.

    Raises:
        RefusedError: instances have no room for what new ones need of the entry.
    """
    generation = returns.generation + 1
    if return_method is not returns.return_method or not returns.has_instances:
        # Nothing that calls in progress keep is of use.
        changed = make_returns(returns.entry, return_method, probes, upcalls)
        ids = _kept_for(probes) if returns.has_instances else ()
        return replace(changed, generation=generation, since=tuple((n, generation) for n in ids))
    kept, is_timed = _kept_with(returns, name, probes)
    return replace(
        returns,
        probes=tuple(probes),
        kept=kept,
        is_timed=is_timed,
        upcalls=tuple(upcalls),
        generation=generation,
        since=_since(returns, probes, generation),
    )


def _since(
    returns: Returns, probes: Sequence[Resolved], generation: int
) -> tuple[tuple[int, int], ...]:
    new = set(_kept_for(probes)) - {probe.layout.event_id for probe in returns.probes}
    since = {**dict(returns.since), **dict.fromkeys(new, generation)}
    left = {probe.layout.event_id for probe in probes}
    return tuple((number, at) for number, at in since.items() if number in left)


def _kept_for(probes: Sequence[Resolved]) -> list[int]:
    # Ids of events that tell something of the entry.
    return [probe.layout.event_id for probe in probes if probe.at_entry]


def _kept_with(
    returns: Returns, name: str, probes: Sequence[Resolved]
) -> tuple[tuple[Operand, ...], bool]:
    new, is_timed = _kept(probes)
    kept = tuple(dict.fromkeys((*returns.kept, *new)))
    if len(kept) > max(returns.room, len(returns.kept)):
        raise RefusedError(
            f"{name}: probes of its returns are armed, and what their calls in progress keep has "
            f"no room for {len(kept) - returns.room} more values: delete them first"
        )
    return kept, is_timed or returns.is_timed


def _kept(probes: Sequence[Resolved]) -> tuple[tuple[Operand, ...], bool]:
    operands = [operand for probe in probes for operand in probe.at_entry]
    kept = [operand.base for operand in operands if isinstance(operand, EntryValue)]
    return tuple(dict.fromkeys(kept)), any(isinstance(each, EntryCounter) for each in operands)


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


def _why_not(exits: Exits) -> str:
    if exits.why_not is not None:
        return f"its exits are not proven: {exits.why_not.why}"
    return "it is left by jumps into other functions"
