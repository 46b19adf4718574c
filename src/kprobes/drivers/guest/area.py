"""Code memory that a linker fills, one piece of code behind the other."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kprobes.errors import TargetError
from kprobes.ports import Text
from kprobes.units import Addr

_ALIGN = 16


@dataclass(slots=True, kw_only=True)
class Area:
    """What is where in one piece of code memory. Nothing is written yet.

    Attributes:
        text: [start, stop) that may be filled.
        next: where the next code goes.
        gate: where hits of sites near this go that wait for Python; None before there are any.
        called: where code here calls the guest's own functions, by what it calls them; empty before
            there is any.
        bodies: by functions' entries, what their exits near this share.
        routines: code besides that of plans, by address: to be written before it is called.
    """

    text: Text
    next: Addr = field(init=False)
    gate: Addr | None = None
    called: dict[str, Addr] = field(default_factory=dict[str, Addr])
    bodies: dict[Addr, Addr] = field(default_factory=dict[Addr, Addr])
    routines: list[tuple[Addr, bytes]] = field(default_factory=list[tuple[Addr, bytes]])

    def __post_init__(self) -> None:
        """Begin at its start."""
        self.next = self.text[0]

    def place(self, size: int) -> Addr:
        """Return where so many bytes of code may be.

        Raises:
            TargetError: no room is left.
        """
        place = self.next
        end = aligned(place + size)
        if end > self.text[1]:
            raise TargetError("no room is left for the probes' code; probe fewer functions")
        self.next = end
        return place

    def add(self, code: bytes) -> Addr:
        """Have code here that is no plan's, and return where.

        Raises:
            TargetError: no room is left.
        """
        place = self.place(len(code))
        self.routines.append((place, code))
        return place

    def away(self, addr: Addr) -> int:
        """Return how far a branch must go at most between here and an address, in bytes."""
        return max(abs(end - addr) for end in self.text)


def largest_gap(text: Text, taken: Iterable[Text]) -> Text:
    """Return the largest part of a range that some others leave free."""
    start, stop = text
    gaps = [(start, start)]
    for first, end in sorted(each for each in taken if start <= each[0] < stop):
        gaps.append((start, first))
        start = aligned(end)
    return max([*gaps, (start, max(start, stop))], key=lambda gap: gap[1] - gap[0])


def aligned(addr: int) -> Addr:
    """Return the first address from this one on where code may begin."""
    return Addr(-(-addr // _ALIGN) * _ALIGN)
