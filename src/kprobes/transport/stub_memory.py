"""Guest memory in packets: chunks that fit, many under way at once, virtual or physical."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from kprobes.errors import TargetError
from kprobes.formats import rsp
from kprobes.transport.wire import Wire, check_ok, memory_fault
from kprobes.units import MIB

_PIECE = 4 * MIB
"""Read at a time: bounds what requests and answers take here."""
_HEADER = 32
"""Bytes of a packet that are no data: ``M<16 digits>,<8 digits>:`` and the frame."""


class StubMemory:
    """``m`` and ``M`` packets on a wire, while the guest is stopped."""

    def __init__(self, wire: Wire, *, packet_size: int) -> None:
        self.packet_size = packet_size
        self._wire = wire
        self._can_physical = False

    def prepare_physical(self) -> None:
        """Find out whether there is a physical mode, and leave it.

        A client that was killed can have left the stub in it.
        """
        self._can_physical = self._wire.ask(b"qqemu.PhyMemMode") in (b"0", b"1")
        if self._can_physical:
            check_ok(self._wire.ask(b"Qqemu.PhyMemMode:0"), "virtual addresses")

    @contextmanager
    def physical(self) -> Generator[None]:
        """Addresses are guest-physical inside, and virtual again afterwards."""
        if not self._can_physical:
            raise TargetError("the gdb stub has no access to physical memory: not QEMU's?")
        try:
            # Waited for: writes that follow must not go to virtual addresses instead.
            check_ok(self._wire.ask(b"Qqemu.PhyMemMode:1"), "physical addresses")
            yield
        finally:
            if not self._wire.is_gone:
                check_ok(self._wire.ask(b"Qqemu.PhyMemMode:0"), "virtual addresses")

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        return self.read_many([(addr, size)])[0]

    def read_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each (address, size), or raise MemoryFault."""
        largest = self.packet_size // 2
        chunks = [chunk for addr, size in spans for chunk in _chunks(addr, size, largest)]
        data = bytearray()
        per_piece = max(_PIECE // largest, 1)
        for start in range(0, len(chunks), per_piece):
            self._fetch(chunks[start : start + per_piece], data)
        return _cut(data, [size for _, size in spans])

    def write(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Write each (address, data); raise MemoryFault for the first that failed."""
        largest = (self.packet_size - _HEADER) // 2
        chunks = [
            (start, data[start - addr : start - addr + size])
            for addr, data in writes
            for start, size in _chunks(addr, len(data), largest)
        ]
        requests = [b"M%x,%x:%s" % (a, len(data), rsp.to_hex(data)) for a, data in chunks]
        for (addr, data), answer in zip(chunks, self._wire.exchange(requests), strict=True):
            if answer != b"OK":
                raise memory_fault((addr, len(data)), answer, "write")

    def _fetch(self, chunks: Sequence[tuple[int, int]], data: bytearray) -> None:
        answers = self._wire.exchange([b"m%x,%x" % chunk for chunk in chunks])
        for chunk, answer in zip(chunks, answers, strict=True):
            if rsp.is_error(answer) or len(answer) != 2 * chunk[1]:
                raise memory_fault(chunk, answer, "read")
            data += rsp.from_hex(answer)


def _chunks(addr: int, size: int, largest: int) -> Iterator[tuple[int, int]]:
    for start in range(addr, addr + size, largest):
        yield start, min(largest, addr + size - start)


def _cut(data: bytearray, sizes: Sequence[int]) -> list[bytes]:
    parts: list[bytes] = []
    at = 0
    for size in sizes:
        parts.append(bytes(data[at : at + size]))
        at += size
    return parts
