"""Which functions of this machine's kernel can be probed by name, and what their arguments are."""

from kprobes.drivers.functions import Function
from kprobes.drivers.host.machine import HostMachine
from kprobes.drivers.host.places import HostPlaces
from kprobes.errors import TargetError


def probeable_here(machine: HostMachine, *, pattern: str) -> list[Function]:
    """Return the functions that match a shell pattern and can be probed, by name.

    Raises:
        TargetError: none is left; says how many match that cannot be probed.
    """
    kernel, places = machine.kernel, HostPlaces(machine)
    found = {s.name: s for s in kernel.symbols.glob(pattern) if s.is_text}
    chosen = [found[name] for name in sorted(found) if places.is_probeable(found[name])]
    # A name of two functions says too little.
    chosen = [symbol for symbol in chosen if len(kernel.symbols.all_named(symbol.name)) == 1]
    if not chosen:
        text = f"no function that can be probed matches {pattern!r} in {kernel.release}"
        why = f": {len(found)} match, but the function tracer knows none of them" if found else ""
        raise TargetError(f"{text}{why}")
    types = kernel.types_for
    return [
        Function(symbol=symbol, prototype=of.function(symbol.name) if of else None)
        for symbol in chosen
        for of in (types(symbol.module),)
    ]
