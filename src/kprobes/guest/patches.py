"""Putting back what a journal says was written to a guest.

The places that probes patch, while the guest stands still: each the quickest way that is right.

Whatever is code is written through the stub, or QEMU would go on with what it has translated.
Reading needs no stub where RAM is mapped, and neither does writing to what is not code.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np

from kprobes.errors import MemoryFault, TargetError
from kprobes.guest.armed import ArmedPatch
from kprobes.ports import Ram
from kprobes.transport.ram import StubRam
from kprobes.transport.stub import Stub
from kprobes.units import Phys


class PhysicalMemory(Protocol):
    """Physical memory through a stub, which keeps translated code right."""

    def read_physical_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each (address, size) of a stopped guest's RAM."""
        ...

    def write_physical_many(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Write each (address, data) to a stopped guest's RAM."""
        ...


def restore_text(patches: Sequence[ArmedPatch], memory: PhysicalMemory) -> int:
    """Put a stopped guest's bytes back, last write first, and verify them.

    Returns:
        How many places were put back; places that already hold their old bytes are not counted.

    Raises:
        TargetError: a place holds neither the old bytes nor ours; all others were put back.
    """
    count, changed = put_back(patches, memory)
    check_unchanged(changed)
    return count


def put_back(patches: Sequence[ArmedPatch], memory: PhysicalMemory) -> tuple[int, list[ArmedPatch]]:
    """Put a stopped guest's bytes back, last write first, where ours are.

    Returns:
        How many places were put back, and those that hold neither the old bytes nor ours.
    """
    count = 0
    for group in _groups(patches):
        found = _now(group, memory)
        ours = [u for u, now in zip(group, found, strict=True) if now == u.new != u.old]
        memory.write_physical_many([(patch.phys, patch.old) for patch in ours])
        count += len(ours)
    # Not before: of several patches of one place only one is there.
    found = _now(patches, memory)
    return count, [patch for patch, now in zip(patches, found, strict=True) if now != patch.old]


def check_unchanged(changed: Sequence[ArmedPatch]) -> None:
    """Refuse places that hold neither the old bytes nor ours, if there are any.

    Raises:
        TargetError: there are some.
    """
    if changed:
        first = changed[0]
        raise TargetError(
            f"{len(changed)} places hold bytes that are neither ours nor the kernel's, the first "
            f"at {first.addr:#x} ({first.what}): another kernel runs there, or it was changed since"
        )


def _groups(patches: Sequence[ArmedPatch]) -> Iterator[list[ArmedPatch]]:
    # From the last to the first, cut so that no group has a place twice: a group goes through
    # the stub at once, and the guest is stopped for a hundredth of the time.
    group: dict[Phys, ArmedPatch] = {}
    for patch in reversed(patches):
        if patch.phys in group:
            yield list(group.values())
            group = {}
        group[patch.phys] = patch
    yield list(group.values())


def _now(patches: Sequence[ArmedPatch], memory: PhysicalMemory) -> list[bytes]:
    return memory.read_physical_many([(patch.phys, len(patch.old)) for patch in patches])


_PAGE = 4096


class StoppedMemory:
    """Physical memory of a stopped guest. Implements ``PhysicalMemory``."""

    def __init__(self, stub: Stub, ram: Ram) -> None:
        self._stub = stub
        self._ram = ram
        self._is_mapped = not isinstance(ram, StubRam)
        self._data: set[int] = set()

    def note_data(self, places: Iterable[Phys]) -> None:
        """Learn of places where no code is."""
        self._data.update(places)

    def read_physical_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each (address, size)."""
        if not self._is_mapped:
            return self._stub.read_physical_many(spans)
        return _read_together(self._ram, spans)

    def write_physical_many(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Write each (address, data), in this order.

        Raises:
            MemoryFault: the first write that failed; all others were tried.
        """
        failure: MemoryFault | None = None
        for is_data, group in groupby(writes, self.is_data):
            try:
                self._write(list(group), is_data=is_data)
            except MemoryFault as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def is_data(self, write: tuple[int, bytes]) -> bool:
        """Whether an (address, data) goes past the stub."""
        return self._is_mapped and write[0] in self._data

    def _write(self, writes: Sequence[tuple[int, bytes]], *, is_data: bool) -> None:
        if is_data:
            for addr, value in writes:
                self._ram.write(addr, value)
        else:
            self._stub.write_physical_many(writes)


def _read_together(ram: Ram, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    # Neighbours are read together: tens of thousands take milliseconds.
    if not spans:
        return []
    starts, sizes = np.array(spans, dtype=np.int64).T
    order = np.argsort(starts)
    first, stops = starts[order], np.maximum.accumulate((starts + sizes)[order])
    # Those in one page as one: what may be no RAM is not read.
    heads = np.flatnonzero(np.r_[True, first[1:] // _PAGE > (stops[:-1] - 1) // _PAGE])
    begins, ends = first[heads], stops[np.r_[heads[1:] - 1, len(stops) - 1]]
    data = b"".join(map(ram.read, begins.tolist(), (ends - begins).tolist()))
    at = np.cumsum(ends - begins) - ends
    places = starts + at[np.searchsorted(begins, starts, side="right") - 1]
    return [data[at : at + size] for at, (_, size) in zip(places.tolist(), spans, strict=True)]
