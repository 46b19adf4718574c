"""A stopped guest for tests: scattered pages, ftrace sites, an arena, a stub that fails."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kprobes.arch.arch import PREAMBLE_SIZE
from kprobes.arch.x86_64.arch import X86_64
from kprobes.arch.x86_64.machine import TASK_SIZE
from kprobes.arch.x86_64.paging import PageTables
from kprobes.errors import GuestGoneError, MemoryFault
from kprobes.guest.arena import HEAD_SIZE, Arena, data_size
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.release import CodeMemory
from kprobes.model.plan import Plan
from kprobes.plan import ftrace
from kprobes.ports import Tables
from kprobes.transport.stub import Stub
from kprobes.units import Addr, Phys
from tests.build.ftrace import write_list
from tests.build.kernel import TEXT, make_kernel, make_probe, symbol
from tests.build.pages import PAGE, FakeRam, Pages

CODE = 0xFFFF_FFFF_C000_0000
DATA = 0xFFFF_C900_0000_0000
PERCPU = (0xFFFF_8880_0010_0000, 0xFFFF_8880_0020_0000)
LIST = TEXT + 0x6000
NOP = X86_64.site.nops[0]
RING = 1 << 14
CPUS = len(PERCPU)

_RAM = 4 << 20
_TABLES = 3 << 20
_CODE_SIZE = 0x4000


def _nothing(addr: int, data: bytes) -> None:
    del addr, data


@dataclass
class FakeStub:
    """The stub of a stopped guest, as far as the engine uses it.

    Attributes:
        ram: the guest's.
        events: what was asked, in order: ``("write", addr, data)`` and the like.
        fails_at: the n-th write that finds no RAM, from 0.
        dies_at: the n-th write at which the guest is gone, for good.
        before_write: called before every write.
    """

    ram: FakeRam
    events: list[tuple[str, int, bytes]] = field(default_factory=list[tuple[str, int, bytes]])
    fails_at: int | None = None
    dies_at: int | None = None
    before_write: Callable[[int, bytes], None] = _nothing
    writes: int = 0

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read_physical(self, addr: int, size: int) -> bytes:
        self._must_live()
        return self.ram.read(addr, size)

    def read_physical_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read_physical(addr, size) for addr, size in spans]

    def write_physical(self, addr: int, data: bytes) -> None:
        self.write_physical_many([(addr, data)])

    def write_physical_many(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """As the real one: all are tried, and the first failure is told."""
        failure: MemoryFault | None = None
        for addr, data in writes:
            try:
                self.write(addr, data)
            except MemoryFault as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def write(self, addr: int, data: bytes) -> None:
        """One write, whichever way it goes."""
        self._must_live()
        self.before_write(addr, data)
        self.writes += 1
        if self.writes - 1 == self.fails_at:
            raise MemoryFault(addr, len(data), "no RAM", verb="write")
        self.events.append(("write", addr, data))
        self.ram.write(addr, data)

    def _must_live(self) -> None:
        if self.dies_at is not None and self.writes >= self.dies_at:
            raise GuestGoneError("the guest is gone")


class RamBesideStub:
    """The same RAM, mapped: what is written through it is one of the stub's writes too."""

    def __init__(self, stub: FakeStub) -> None:
        self._stub = stub

    @property
    def runs(self) -> Sequence[tuple[Phys, int]]:
        return self._stub.ram.runs

    def read(self, addr: int, size: int) -> bytes:
        return self._stub.ram.read(addr, size)

    def view(self, addr: int, size: int) -> NDArray[np.uint8] | None:
        return self._stub.ram.view(addr, size)

    def write(self, addr: int, data: bytes) -> None:
        self._stub.write(addr, data)


def make_memory() -> GuestMemory:
    """Map text, code, data and per-CPU memory to pages that lie apart and out of order."""
    ram = FakeRam(_RAM)
    pages = Pages(ram, _TABLES)
    regions = [
        (TEXT, 0x10000),
        (CODE, _CODE_SIZE),
        # And the session's notes.
        (DATA, data_size(CPUS, RING) + 2 * PAGE),
        *((base, PAGE) for base in PERCPU),
    ]
    places = [start + at for start, size in regions for at in range(0, size, PAGE)]
    for n, virt in enumerate(places):
        # Three neighbours, then a jump back: joined runs and gaps of both kinds.
        pages.map(virt, (len(places) - n // 3 * 3 + n % 3) * PAGE)
    return GuestMemory(ram, PageTables(ram, _TABLES))


def make_arena() -> Arena:
    """Return the arena that ``make_memory`` has room for."""
    return Arena(
        notifier=Addr(CODE + PREAMBLE_SIZE),
        code=CodeMemory(addr=Addr(CODE + HEAD_SIZE), size=_CODE_SIZE - HEAD_SIZE),
        data=Addr(DATA),
        percpu=0x100,
        bases=PERCPU,
        ring_size=RING,
        instances=Addr(DATA + data_size(CPUS, RING)),
        notes=Addr(-(-(DATA + data_size(CPUS, RING)) // PAGE) * PAGE),
    )


@dataclass
class GuestWithSites:
    """A guest with ftrace sites and probes on them.

    Attributes:
        guest: with ``stub`` as its stub.
        plans: one per probe.
        sites: where.
    """

    guest: Guest
    stub: FakeStub
    sites: list[Addr]
    plans: list[Plan]

    def text(self) -> bytes:
        """The kernel's text, its list of sites included."""
        return self.guest.memory.read(TEXT, 0x10000)


def make_guest(texts: Sequence[str], *, at: int = 0x1000) -> GuestWithSites:
    """Make a guest with one site per definition.

    Args:
        texts: definitions on ``f``, each for a site of its own.
        at: where the first site is, from the text's start.
    """
    memory = make_memory()
    memory.write(TEXT, bytes(range(256)) * 256)
    sites = [Addr(TEXT + at + 0x20 * n) for n in range(len(texts))]
    for site in sites:
        memory.write(site, NOP)
    write_list(memory, LIST, [sites[:2], sites[2:]])
    kernel = make_kernel([symbol("ftrace_pages_start", LIST, type="d")])
    stub = FakeStub(cast("FakeRam", memory.ram))
    guest = Guest(
        address="fake",
        stub=cast("Stub", stub),
        memory=GuestMemory(RamBesideStub(stub), memory.tables),
        kernel=kernel,
        arch=X86_64,
        task_size=TASK_SIZE,
        tables=cast("Tables", memory.tables),
    )
    known = ftrace.read_sites(memory, kernel)
    plans = [
        Plan(
            site=ftrace.inspect(site, memory, known, X86_64.site),
            probes=(make_probe(text, event_id=n + 1, addr=site),),
        )
        for n, (site, text) in enumerate(zip(sites, texts, strict=True))
    ]
    return GuestWithSites(guest, stub, sites, plans)
