"""What a sink must know of where the events come from."""

from collections.abc import Callable
from dataclasses import dataclass


def _number(addr: int) -> str:
    return f"{addr:#x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The traced kernel, as far as its trace file's looks depend on it.

    Attributes:
        version: major and minor of its release.
        cpus: how many it has online.
        entries: how many events there will be, or None while they are still coming.
        symbol_at: an address to what ``%pS`` prints for it, ``sym+0x1/0x40 [mod]``; as a
            number when no symbols are known.
        trampoline: where functions return to that the guest's own return probes have taken over,
            where its trace file has no name for that; else None.
        has_ns: whether times are nanoseconds, as all clocks of guests have them; else they are
            whatever the clock counts, and shown as they are.
        has_wide_numbers: whether JSON has numbers of 64 bits as numbers and not as strings.
        has_enum_names: whether enums are shown by name, where the kernel shows numbers.
    """

    version: tuple[int, int]
    cpus: int
    entries: int | None = None
    symbol_at: Callable[[int], str] = _number
    trampoline: int | None = None
    has_ns: bool = True
    has_wide_numbers: bool = False
    has_enum_names: bool = False
