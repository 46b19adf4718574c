"""Which functions of this machine's kernel can be probed by name, and what their arguments are."""

from collections import Counter

from kprobes.drivers.functions import Function
from kprobes.drivers.host.machine import HostMachine
from kprobes.drivers.host.places import HostPlaces
from kprobes.errors import TargetError


def probeable_here(machine: HostMachine, *, pattern: str, is_typed: bool = True) -> list[Function]:
    """Return the functions that match a shell pattern and can be probed, by name.

    Args:
        machine: whose kernel it is.
        pattern: a name or a shell pattern.
        is_typed: whether with prototypes, which take the longest.

    Raises:
        TargetError: none is left; says how many match that cannot be probed.
    """
    kernel, places = machine.kernel, HostPlaces(machine)
    every = kernel.symbols.glob(pattern)
    found = {s.name: s for s in every if s.is_text}
    # A name of two symbols says too little; all that have it match.
    counts = Counter(s.name for s in every)
    chosen = [
        found[name]
        for name in sorted(found)
        if counts[name] == 1 and places.is_probeable(found[name])
    ]
    if not chosen:
        text = f"no function that can be probed matches {pattern!r} in {kernel.release}"
        why = f": {len(found)} match, but the function tracer knows none of them" if found else ""
        raise TargetError(f"{text}{why}")
    types = kernel.types_for
    return [
        Function(symbol=symbol, prototype=of.function(symbol.name) if of and is_typed else None)
        for symbol in chosen
        for of in (types(symbol.module),)
    ]
