"""Which functions of a guest can be probed by name, and what their arguments are."""

from collections import Counter
from dataclasses import dataclass

from kprobes.arch.facts import SiteFacts
from kprobes.errors import TargetError
from kprobes.model.kernel import Kernel
from kprobes.model.symbol import Symbol
from kprobes.model.types import Prototype
from kprobes.plan.ftrace import known_sites
from kprobes.ports import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that a definition may name.

    Attributes:
        symbol: where it is.
        prototype: its signature, or None when the kernel's types have none, or nobody asked.
    """

    symbol: Symbol
    prototype: Prototype | None


def probeable(
    memory: Memory, kernel: Kernel, facts: SiteFacts, *, pattern: str, is_typed: bool = True
) -> list[Function]:
    """Return the functions that match a shell pattern and can be probed, by name.

    Where the kernel has no ftrace sites: all that match, though none can be probed.

    Args:
        memory: of the guest.
        kernel: that runs there.
        facts: of its architecture's sites.
        pattern: a name or a shell pattern.
        is_typed: whether with prototypes, which take the longest.

    Raises:
        TargetError: none is left; says how many match that cannot be probed.
    """
    sites = frozenset(known_sites(memory, kernel).addrs.tolist())
    every = kernel.symbols.glob(pattern)
    found = {s.name: s for s in every if s.is_text}
    # A name of two symbols says too little; all that have it match.
    counts = Counter(s.name for s in every)
    chosen = [
        found[name]
        for name in sorted(found)
        if counts[name] == 1
        and (not sites or any(found[name].addr + off in sites for off in facts.offsets))
    ]
    if not chosen:
        raise TargetError(_none(kernel, pattern, found))
    return [
        Function(symbol=symbol, prototype=_prototype(kernel, symbol) if is_typed else None)
        for symbol in chosen
    ]


def _prototype(kernel: Kernel, symbol: Symbol) -> Prototype | None:
    types = kernel.types_for(symbol.module)
    return types.function(symbol.name) if types else None


def _none(kernel: Kernel, pattern: str, found: dict[str, Symbol]) -> str:
    text = f"no function that can be probed matches {pattern!r} in {kernel.release}"
    if not found:
        return text
    return f"{text}: {len(found)} match, but have no ftrace site or share their name with others"
