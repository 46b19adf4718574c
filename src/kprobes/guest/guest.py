"""An attached guest: everything that the engine needs to know and touch of it.

Kernel virtual memory of a guest: its RAM seen through its page tables.
"""

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext

from msgspec import Struct

from kprobes.arch.arch import Arch
from kprobes.errors import GuestReplacedError, MemoryFault
from kprobes.model.kernel import Kernel
from kprobes.model.source import OpenSource, no_source
from kprobes.ports import MappedRun, Memory, Ram, Tables, Translator
from kprobes.transport.ram import ProcessPlace, StubRam
from kprobes.transport.stub import Stub
from kprobes.units import U64, Addr, Phys

Code = tuple[Addr, bytes]
"""An address, and the code that is to be there."""
_PAGE = 4096
_UNCHECKED = 16
"""Pieces of code that are written between two looks at whose memory it is: some 50 us."""
_REGION = 1 << 27


class GuestMemory:
    """Reads and writes by kernel address. Implements ``ports.Memory``.

    Every page of an access is translated on its own: neighbours need not lie together.
    """

    def __init__(self, ram: Ram, tables: Translator) -> None:
        self.ram = ram
        self.tables = tables

    def physical(self, addr: int) -> Phys:
        """Return where an address lies in RAM, or raise MemoryFault."""
        return self.tables.physical(addr)

    def pieces(self, addr: int, size: int) -> list[tuple[Phys, int, int]]:
        """Return (physical address, offset, size) for each page of a range."""
        if 0 < size <= _PAGE - addr % _PAGE:
            return [(self.physical(addr), 0, size)]
        found: list[tuple[Phys, int, int]] = []
        at = 0
        while at < size:
            step = min(size - at, _PAGE - (addr + at) % _PAGE)
            found.append((self.physical(addr + at), at, step))
            at += step
        return found

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        if 0 < size <= _PAGE - addr % _PAGE:
            # Nearly always, and in two thirds of the time.
            return self.ram.read(self.physical(addr), size)
        return b"".join(self.ram.read(phys, step) for phys, _, step in self.pieces(addr, size))

    def write(self, addr: int, data: bytes) -> None:
        """Write data, never code, or raise MemoryFault."""
        for phys, at, step in self.pieces(addr, len(data)):
            self.ram.write(phys, data[at : at + step])

    def u64(self, addr: int) -> int:
        """Return the little-endian u64 at an address."""
        return int.from_bytes(self.read(addr, 8), "little")

    def set_u64(self, addr: int, value: int) -> None:
        """Write a little-endian u64."""
        self.write(addr, value.to_bytes(8, "little"))


class PageCache:
    """A memory's pages, each as it was when it was read first. Implements ``ports.Memory``.

    For one batch of small reads: it keeps all pages that were read.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pages: dict[int, bytes] = {}

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        number, at = divmod(addr, _PAGE)
        if size > _PAGE - at:
            return self._memory.read(addr, size)
        page = self._pages.get(number)
        if page is None:
            try:
                page = self._pages[number] = self._memory.read(number * _PAGE, _PAGE)
            except MemoryFault:
                # Of what was wanted, and not of its page.
                return self._memory.read(addr, size)
        return page[at : at + size]


def write_code(debugger: Stub, memory: GuestMemory, codes: Iterable[Code]) -> None:
    """Write code to a stopped guest: past QEMU it would go on with what it has translated."""
    writes = [
        (phys, code[at : at + step])
        for addr, code in codes
        for phys, at, step in memory.pieces(addr, len(code))
    ]
    if writes:
        debugger.write_physical_many(writes)


def write_new_code(
    memory: GuestMemory, codes: Iterable[Code], filler: bytes, check: Callable[[], None]
) -> list[Code]:
    """Write code past the stub where there has been none; the guest may run.

    Where nothing but zeros or fillers is, the guest itself has put them over whatever was there
    before, and QEMU has thrown away then what it had translated.

    Args:
        memory: where RAM is mapped.
        codes: that nothing leads to yet.
        filler: a byte with which a kernel fills memory for code.
        check: raises GuestReplacedError where the memory is another guest's.

    Returns:
        The rest: what is to be written to a guest that stands still.

    Raises:
        GuestReplacedError: as for ``check``; what was written there is gone again.
    """
    rest: list[Code] = []
    pieces = [(a, code, piece) for a, code in codes for piece in memory.pieces(a, len(code))]
    for start in range(0, len(pieces), _UNCHECKED):
        check()
        written: list[tuple[Phys, bytes, bytes]] = []
        for addr, code, (phys, at, size) in pieces[start : start + _UNCHECKED]:
            before, new = memory.ram.read(phys, size), code[at : at + size]
            if before[:1] in (b"\0", filler) and before == before[:1] * size:
                written.append((phys, before, new))
                memory.ram.write(phys, new)
            else:
                rest.append((Addr(addr + at), new))
        try:
            check()
        except GuestReplacedError:
            for phys, before, new in written:
                if memory.ram.read(phys, len(new)) == new:
                    memory.ram.write(phys, before)
            raise
    return rest


def remembering(memory: GuestMemory) -> GuestMemory:
    """Return the same memory, its page tables read in bulk and only once.

    For one batch of accesses: to a guest that stands still, or to what stays where it is.
    """
    return GuestMemory(memory.ram, _Remembered(memory.tables))


class _Remembered:
    # A walk of the tables takes 10 us; so does a lookup here for every ten addresses.
    def __init__(self, tables: Translator) -> None:
        self._tables = tables
        self._regions: dict[int, tuple[list[int], Sequence[MappedRun]]] = {}

    def physical(self, addr: int) -> Phys:
        number = addr // _REGION
        if number not in self._regions:
            start = number * _REGION
            runs = self._tables.mapped_runs(start, min(start + _REGION, U64 + 1))
            self._regions[number] = [run.virt for run in runs], runs
        starts, runs = self._regions[number]
        index = bisect_right(starts, addr) - 1
        if index < 0 or addr >= runs[index].virt + runs[index].size:
            # It may be mapped by now: a guest that frees code unmaps pages for a moment.
            return self._tables.physical(addr)
        return Phys(runs[index].phys + addr - runs[index].virt)

    def mapped_runs(self, start: int, stop: int) -> Sequence[MappedRun]:
        return self._tables.mapped_runs(start, stop)


INITIALISING = range(2)
"""Of ``system_state``: SYSTEM_BOOTING, SYSTEM_SCHEDULING (linux/kernel.h)."""


class InitText(Struct, frozen=True, kw_only=True):
    """Text that boot frees, and what tells whether it has.

    The kernel's ``system_state`` says so. Before v5.16 it does not until a moment after, in which
    the first of the text, which is freed first, is overwritten: ``free_reserved_area()``.

    Attributes:
        start, stop: addresses of it.
        state: the physical address of ``system_state``.
        phys, head: where its beginning is, and what was there.
    """

    start: Addr
    stop: Addr
    state: Phys
    phys: Phys
    head: bytes

    def is_freed(self, read: Callable[[int, int], bytes]) -> bool:
        """Whether boot has freed it; ``read`` returns bytes of the guest's physical memory."""
        if int.from_bytes(read(self.state, 4), "little") not in INITIALISING:
            return True
        # Some of it the kernel, or a probe, may have changed.
        same = sum(map(int.__eq__, read(self.phys, len(self.head)), self.head))
        return 2 * same < len(self.head)


class Guest(Struct, frozen=True, kw_only=True, eq=False):
    """One guest under a stub.

    Attributes:
        address: of the stub, as a user would give it again.
        stub: connected.
        memory: kernel memory by virtual address.
        kernel: what runs there.
        arch: its architecture.
        task_size: addresses below are user space's, with this guest's paging.
        tables: its kernel's page tables.
        host: where its RAM is in QEMU's memory, or None where that is not known.
        init_text: what only its boot uses, as long as that is there.
        open_source: as ``model.source.OpenSource``.
    """

    address: str
    stub: Stub
    memory: GuestMemory
    kernel: Kernel
    arch: Arch
    task_size: int
    tables: Tables
    host: ProcessPlace | None = None
    init_text: InitText | None = None
    open_source: OpenSource = no_source

    @contextmanager
    def readable(self) -> Generator[None]:
        """Have its memory as it is at one moment where the stub is the only way to it, stopped."""
        with self.stub.paused() if isinstance(self.memory.ram, StubRam) else nullcontext():
            yield
