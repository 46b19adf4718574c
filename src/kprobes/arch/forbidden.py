"""Places of a kernel's text that may carry no probe, whatever instruction is there."""

import bisect
from collections.abc import Sequence

from kprobes.model.text import TextPart, TextTables

_PREAMBLES = ("__pfx_", "__cfi_")


def forbidden_place(
    name: str, parts: Sequence[TextPart], addr: int, tables: TextTables
) -> str | None:
    """Return why a place of a function may carry no probe, or None.

    Args:
        name: of the function.
        parts: its pieces, the one with its entry first.
        addr: the place.
        tables: what is known of the kernel's text.
    """
    if tables.missing:
        return f"which instructions a probe would break is not known: {tables.missing} not found"
    if name.startswith(_PREAMBLES):
        return "it is padding before a function, which the kernel keeps for itself"
    entry = parts[0].addr
    # A .cold part is forbidden with its function, as the kernel looks both names up.
    is_cold = not entry <= addr < parts[0].stop
    for place in (addr, entry) if is_cold else (addr,):
        after = bisect.bisect_right(tables.forbidden, place, key=lambda range_: range_.start)
        if after and place < tables.forbidden[after - 1].stop:
            return tables.forbidden[after - 1].why
    # within_kprobe_blacklist() looks up what is before the first dot.
    base, dot, _ = name.partition(".")
    if dot and base in tables.forbidden_names:
        return f"it was split from {base}, which the kernel forbids to probe"
    return None


def probed_place(addr: int, tables: TextTables) -> str | None:
    """Return why the kernel's own kprobes leave no room for one of ours, or None."""
    return next((each.why for each in tables.probed if each.start <= addr < each.stop), None)


def in_alternative(start: int, stop: int, tables: TextTables) -> bool:
    """Return whether some bytes overlap with an alternative that boot still rewrites."""
    last = bisect.bisect_left(tables.alternatives, (stop,)) - 1
    return last >= 0 and start < tables.alternatives[last][1]
