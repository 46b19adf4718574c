"""Which functions of a guest can be probed by name, and what their arguments are."""

from dataclasses import dataclass

from kprobes.arch.facts import SiteFacts
from kprobes.errors import TargetError
from kprobes.model.kernel import Kernel
from kprobes.model.symbol import Symbol
from kprobes.model.types import Prototype
from kprobes.plan.ftrace import Sites, known_sites
from kprobes.ports import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that a definition may name.

    Attributes:
        symbol: where it is.
        prototype: its signature, or None when the kernel's types have none.
    """

    symbol: Symbol
    prototype: Prototype | None


def probeable(memory: Memory, kernel: Kernel, facts: SiteFacts, *, pattern: str) -> list[Function]:
    """Return the functions that match a shell pattern and can be probed, by name.

    Where the kernel has no ftrace sites: all that match, though none can be probed.

    Args:
        memory: of the guest.
        kernel: that runs there.
        facts: of its architecture's sites.
        pattern: a name or a shell pattern.

    Raises:
        TargetError: none is left; says how many match that cannot be probed.
    """
    sites = known_sites(memory, kernel)
    found = {s.name: s for s in kernel.symbols.glob(pattern) if s.is_text}
    chosen = [found[name] for name in sorted(found) if _has_site(found[name], sites, facts)]
    # A name of two functions says too little.
    chosen = [symbol for symbol in chosen if len(kernel.symbols.all_named(symbol.name)) == 1]
    if not chosen:
        raise TargetError(_none(kernel, pattern, found))
    return [Function(symbol=symbol, prototype=_prototype(kernel, symbol)) for symbol in chosen]


def _prototype(kernel: Kernel, symbol: Symbol) -> Prototype | None:
    types = kernel.types_for(symbol.module)
    return types.function(symbol.name) if types else None


def _has_site(symbol: Symbol, sites: Sites, facts: SiteFacts) -> bool:
    return not len(sites.addrs) or any(
        sites.find(symbol.addr + offset) is not None for offset in facts.offsets
    )


def _none(kernel: Kernel, pattern: str, found: dict[str, Symbol]) -> str:
    text = f"no function that can be probed matches {pattern!r} in {kernel.release}"
    if not found:
        return text
    return f"{text}: {len(found)} match, but have no ftrace site or share their name with others"
