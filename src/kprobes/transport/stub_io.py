"""Guest memory in packets: chunks that fit, many under way at once, virtual or physical.

Registers of the vCPUs in packets, by the names of the stub's target description.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kprobes.errors import FormatError, TargetError
from kprobes.formats import rsp
from kprobes.formats.target_xml import (
    Description,
    RegisterSlot,
    decode_registers,
    encode_registers,
    parse_description,
)
from kprobes.transport.connection import Wire, check_ok, memory_fault
from kprobes.units import MIB

_PIECE = 4 * MIB
"""Read at a time: bounds what requests and answers take here."""
_HEADER = 32
"""Bytes of a packet that are not data: ``M<16 digits>,<8 digits>:`` and the frame."""


def forget_breakpoints(wire: Wire, cpus: Sequence[int]) -> None:
    """Have QEMU forget the breakpoints of a client that died: they would hold up the guest.

    Args:
        wire: of a stub, whose guest is stopped.
        cpus: its thread ids, all of them.

    Raises:
        FormatError, GuestGoneError: it answers otherwise than a stub, or not at all.
    """
    # gdbstub.c, handle_target_halt(): of the vCPU that was chosen, under TCG of no other.
    for cpu in reversed(cpus):
        wire.ask(b"Hc%x" % cpu)
        rsp.parse_stop(wire.ask(b"?"))


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
        per_read = max(_PIECE // largest, 1)
        for start in range(0, len(chunks), per_read):
            self._fetch(chunks[start : start + per_read], data)
        return _cut(data, [size for _, size in spans])

    def write(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Write each (address, data); raise MemoryFault for the first that failed."""
        largest = (self.packet_size - _HEADER) // 2
        chunks = writes
        if any(not 0 < len(data) <= largest for _, data in writes):
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


_MAX_FILE = 1 << 20
_PAGING = ("cr0", "cr3", "cr4", "efer")
"""What says where an x86 CPU finds memory."""


class StubRegisters:
    """``g``, ``G``, ``p`` and ``P`` packets on a wire, while the guest is stopped."""

    def __init__(self, wire: Wire, *, packet_size: int) -> None:
        self.packet_size = packet_size
        # The vCPU that requests go to, if that is known.
        self.selected: int | None = None
        # What the selected vCPU's registers were when they were read last.
        self._packet = b""
        self._wire = wire
        self._description: Description | None = None

    @property
    def description(self) -> Description:
        """What the stub says of its registers; read once."""
        if self._description is None:
            self._description = parse_description(self._file)
        return self._description

    def forget(self, selected: int | None = None) -> None:
        """Drop what was read: vCPUs have run. Requests go to the selected one, if that is known."""
        self.selected, self._packet = selected, b""

    def select(self, cpu: int) -> None:
        """Direct requests, those for virtual memory too, to one vCPU."""
        if self.selected != cpu:
            check_ok(self._wire.ask(b"Hg%x" % cpu), f"vCPU {cpu}")
            self.forget(cpu)

    def read(self, cpu: int) -> dict[str, int]:
        """Return all registers of the g packet; one that it lacks is a TargetError when used."""
        description = self.description
        self.select(cpu)
        self._packet = self._all(cpu)
        return _Shown(cpu, decode_registers(description, self._packet))

    def read_one(self, cpu: int, name: str) -> int:
        """Return one register."""
        slot = self._slot(name)
        self.select(cpu)
        answer = self._wire.ask(b"p%x" % slot.number)
        if len(answer) != 2 * slot.size or b"x" in answer:
            raise TargetError(f"the gdb stub does not know register {name} of vCPU {cpu}")
        return int.from_bytes(rsp.from_hex(answer), "little")

    def write(self, cpu: int, values: Mapping[str, int]) -> dict[str, int]:
        """Write some registers of the g packet, all of them or none; return what they were.

        One packet, though each could have its own: a task whose registers are changed in part,
        because whoever changes them is killed, does anything.

        Raises:
            TargetError: a register is not in the g packet, or they were changed by somebody else
                between being read and written; they are as before.
        """
        description = self.description
        for name in values:
            self._slot(name)
        self.select(cpu)
        packet, self._packet = self._packet or self._all(cpu), b""
        shown = decode_registers(description, packet)
        for name in values:
            if name not in shown:
                raise TargetError(
                    f"register {name} of vCPU {cpu} is not in the gdb stub's g packet: "
                    "it cannot be written"
                )
        # In one write, which QEMU handles in one go: no monitor's ``loadvm`` comes in between.
        written = encode_registers(description, packet, values)
        replaced, answer = self._wire.exchange([b"g", b"G" + written])
        check_ok(answer, f"new values for {', '.join(values)} of vCPU {cpu}")
        if replaced != packet:
            self._put_back(cpu, written, replaced)
            raise TargetError(f"somebody else has changed the registers of vCPU {cpu}")
        return {name: shown[name] for name in values}

    def _put_back(self, cpu: int, written: bytes, replaced: bytes) -> None:
        # On x86 QEMU looks up a segment whose selector changes in the guest's tables, and leaves it
        # as it was where these are not mapped: x86_cpu_gdb_load_seg(). CR3 comes after the segments
        # in the packet, and what was written may have one that leads nowhere here: it goes first.
        before = decode_registers(self.description, replaced)
        paging = {name: before[name] for name in _PAGING if name in before}
        packets = [encode_registers(self.description, written, paging)] if paging else []
        for packet in (*packets, replaced):
            check_ok(self._wire.ask(b"G" + packet), f"registers of vCPU {cpu}, put back")

    def _all(self, cpu: int) -> bytes:
        answer = self._wire.ask(b"g")
        if not answer or rsp.is_error(answer):
            raise TargetError(f"the gdb stub does not show the registers of vCPU {cpu}")
        return answer

    def _slot(self, name: str) -> RegisterSlot:
        slot = self.description.slot(name)
        if slot is None:
            raise TargetError(f"the gdb stub has no register {name!r}")
        return slot

    def _file(self, name: str) -> bytes:
        content = b""
        # Fits a packet also when every byte of the answer is escaped.
        size = self.packet_size // 2 - 8
        deadline = time.monotonic() + self._wire.timeout_s
        while len(content) <= _MAX_FILE and time.monotonic() < deadline:
            part = self._wire.ask(
                b"qXfer:features:read:%s:%x,%x" % (name.encode(), len(content), size)
            )
            content += part[1:]
            if part[:1] == b"l":
                return content
            if part[:1] != b"m" or len(part) == 1:
                raise FormatError(f"the gdb stub answers {part[:32]!r} for its {name}")
        raise FormatError(f"{name} of the gdb stub has no end: {len(content)} bytes so far")


class _Shown(dict[str, int]):
    # What a g packet has of one vCPU.

    def __init__(self, cpu: int, values: Mapping[str, int]) -> None:
        super().__init__(values)
        self._cpu = cpu

    def __missing__(self, name: str) -> int:
        raise TargetError(f"the gdb stub does not show register {name} of vCPU {self._cpu}")
