"""Protocols of the outside world as the stages need it, in the fewest methods that work."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.events import Batch, Events
from kprobes.native.lines import Lines
from kprobes.units import Addr, Phys


class Memory(Protocol):
    """Kernel memory of one target, by virtual address. Reads are never cached."""

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        ...


class Ram(Protocol):
    """Guest-physical memory."""

    @property
    def runs(self) -> Sequence[tuple[Phys, int]]:
        """Where RAM is: (start, size) in ascending order, holes between them left out."""
        ...

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        ...

    def view(self, addr: int, size: int) -> NDArray[np.uint8] | None:
        """Return the bytes with no copy, as they change, or None where that is impossible."""
        ...

    def write(self, addr: int, data: bytes) -> None:
        """Write data (never code: see docs/kernel-facts.md), or raise MemoryFault."""
        ...


class MappedRun(Struct, frozen=True, kw_only=True):
    """Addresses that lie in one piece in physical memory, with equal rights.

    Attributes:
        virt: the first address.
        phys: where it lies in RAM.
        size: bytes.
        is_writable, is_executable: whether the guest may do that there.
    """

    virt: Addr
    phys: Phys
    size: int
    is_writable: bool
    is_executable: bool

    @property
    def stop(self) -> Addr:
        """The first address after it."""
        return Addr(self.virt + self.size)


class Translator(Protocol):
    """Virtual to physical, by the guest's page tables."""

    def physical(self, addr: int) -> Phys:
        """Return where a kernel address lies in RAM, or raise MemoryFault."""
        ...

    def mapped_runs(self, start: int, stop: int) -> Sequence[MappedRun]:
        """Return what is mapped of [start, stop), by address, neighbours joined."""
        ...


class Tables(Translator, Protocol):
    """Page tables that were found in a guest."""

    @property
    def ram(self) -> Ram:
        """Where they are."""
        ...

    @property
    def root(self) -> Phys:
        """Where the top one is."""
        ...

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        ...

    def rooted(self, root: int) -> "Tables":
        """Return tables of the same kind whose top one is elsewhere."""
        ...

    def of_user(self, root: int) -> "Tables":
        """Return the tables of a task's own memory, by the register that has them."""
        ...


class Clock(Protocol):
    """Raw cycle counts to the guest's trace clock."""

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return nanoseconds for counts that were read on one CPU."""
        ...


class Sink(Protocol):
    """Where events go."""

    def write(self, events: Events) -> None:
        """Take events, oldest first."""
        ...

    def close(self) -> None:
        """Finish what was written."""
        ...


class LineSink(Sink, Protocol):
    """A sink that writes one line for each event, whatever stands before it."""

    def lines(self, batch: Batch) -> Lines:
        """Return the lines of n events, in their order."""
        ...


Text = tuple[Addr, Addr]
"""Addresses [start, stop) of code."""
