"""Putting back what a journal says was written to a guest."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kprobes.drivers.journal import Undo
from kprobes.errors import TargetError
from kprobes.units import Phys


class PhysicalMemory(Protocol):
    """Physical memory through a stub, which keeps translated code right."""

    def read_physical_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each (address, size) of a stopped guest's RAM."""
        ...

    def write_physical_many(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Write each (address, data) to a stopped guest's RAM."""
        ...


def roll_back(undos: Sequence[Undo], memory: PhysicalMemory) -> int:
    """Put a stopped guest's bytes back, last write first, and verify them.

    Returns:
        How many places were put back; places that already hold their old bytes are not counted.

    Raises:
        TargetError: a place holds neither the old bytes nor ours; all others were put back.
    """
    count, strange = 0, list[Undo]()
    for group in _groups(undos):
        found = _now(group, memory)
        ours = [u for u, now in zip(group, found, strict=True) if now == u.new != u.old]
        memory.write_physical_many([(undo.phys, undo.old) for undo in ours])
        found = _now(group, memory) if ours else found
        count += len(ours)
        strange += [undo for undo, now in zip(group, found, strict=True) if now != undo.old]
    if strange:
        first = strange[0]
        raise TargetError(
            f"{len(strange)} places hold bytes that are neither ours nor the kernel's, the first "
            f"at {first.addr:#x} ({first.what}): another kernel runs there, or it was changed since"
        )
    return count


def _groups(undos: Sequence[Undo]) -> Iterator[list[Undo]]:
    # From the last to the first, cut so that no group has a place twice: a group goes through
    # the stub at once, and the guest is stopped for a hundredth of the time.
    group: dict[Phys, Undo] = {}
    for undo in reversed(undos):
        if undo.phys in group:
            yield list(group.values())
            group = {}
        group[undo.phys] = undo
    yield list(group.values())


def _now(undos: Sequence[Undo], memory: PhysicalMemory) -> list[bytes]:
    return memory.read_physical_many([(undo.phys, len(undo.old)) for undo in undos])
