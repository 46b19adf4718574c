"""How the returns of a function are probed: the cheapest way that is proven, and what it keeps."""

from collections.abc import Iterable, Sequence

from kprobes.errors import RefusedError
from kprobes.model.exits import ExitKind, Exits, ReturnWay
from kprobes.model.plan import Strategy
from kprobes.model.resolved import EntryCounter, EntryValue, Operand, Resolved, base_of
from kprobes.model.returns import Returning, Returns, Role
from kprobes.model.upcall import Upcall
from kprobes.units import Addr

_ORDER = tuple(ReturnWay)


def choose_way(place: str, exits: Exits, wish: ReturnWay | None) -> ReturnWay:
    """Return how a function's returns are probed.

    Args:
        place: its name, for messages.
        exits: its ways out.
        wish: of the user: the way, or None for the cheapest.

    Raises:
        RefusedError: its returns cannot be probed, or not the way that is wished for.
    """
    if exits.way is ReturnWay.REFUSED:
        raise RefusedError(f"{place}: its returns cannot be probed: {exits.refusal}")
    if wish is None or _ORDER.index(wish) >= _ORDER.index(exits.way):
        return exits.way if wish is not ReturnWay.RETHOOK else wish
    raise RefusedError(f"{place}: not by {wish}: {_why_not(exits)}; {exits.way} works")


def make_returns(
    entry: Addr, way: ReturnWay, probes: Sequence[Resolved], upcalls: Sequence[Upcall] = ()
) -> Returns:
    """Return all return probes of one function with what they need of its entry."""
    operands = [operand for probe in probes for operand in _operands(probe)]
    kept = [operand.base for operand in operands if isinstance(operand, EntryValue)]
    return Returns(
        entry=entry,
        way=way,
        probes=tuple(probes),
        kept=tuple(dict.fromkeys(kept)),
        is_timed=any(isinstance(operand, EntryCounter) for operand in operands),
        upcalls=tuple(upcalls),
    )


def roles(returns: Returns, exits: Exits) -> Iterable[tuple[Addr, Returning]]:
    """Yield what is done where, at addresses of the function; the trampoline left aside."""
    if returns.way is ReturnWay.RETHOOK:
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


def forced_way(way: ReturnWay | None, strategy: Strategy | None) -> ReturnWay | None:
    """Return the way that follows from what the user forces: only entries are ftrace sites."""
    return ReturnWay.RETHOOK if way is None and strategy is Strategy.FTRACE else way


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
