"""Registers of the vCPUs in packets, by the names of the stub's target description."""

import time
from collections.abc import Mapping

from kprobes.errors import FormatError, TargetError
from kprobes.formats import rsp
from kprobes.formats.target_xml import (
    Description,
    RegisterSlot,
    decode_registers,
    encode_registers,
    parse_description,
)
from kprobes.transport.wire import Wire, check_ok

_MAX_FILE = 1 << 20


class StubRegisters:
    """``g``, ``G``, ``p`` and ``P`` packets on a wire, while the guest is stopped.

    Attributes:
        selected: the vCPU that requests go to, or None when the stub may have chosen another.
    """

    def __init__(self, wire: Wire, *, packet_size: int) -> None:
        self.packet_size = packet_size
        self.selected: int | None = None
        self._wire = wire
        self._description: Description | None = None

    @property
    def description(self) -> Description:
        """What the stub says of its registers; read once."""
        if self._description is None:
            self._description = parse_description(self._file)
        return self._description

    def select(self, cpu: int) -> None:
        """Direct requests, those for virtual memory too, to one vCPU."""
        if self.selected != cpu:
            check_ok(self._wire.ask(b"Hg%x" % cpu), f"vCPU {cpu}")
            self.selected = cpu

    def read(self, cpu: int) -> dict[str, int]:
        """Return all registers of the g packet."""
        description = self.description
        self.select(cpu)
        return decode_registers(description, self._all(cpu))

    def read_one(self, cpu: int, name: str) -> int:
        """Return one register."""
        slot = self._slot(name)
        self.select(cpu)
        answer = self._wire.ask(b"p%x" % slot.number)
        if len(answer) != 2 * slot.size or b"x" in answer:
            raise TargetError(f"the gdb stub does not know register {name} of vCPU {cpu}")
        return int.from_bytes(rsp.from_hex(answer), "little")

    def write(self, cpu: int, values: Mapping[str, int]) -> None:
        """Write some registers of the g packet: all of them, or none.

        One packet, though each could have its own: a task whose registers are changed in part,
        because whoever changes them is killed, does anything.
        """
        description = self.description
        for name in values:
            self._slot(name)
        self.select(cpu)
        answer = self._wire.ask(b"G" + encode_registers(description, self._all(cpu), values))
        check_ok(answer, f"new values for {', '.join(values)} of vCPU {cpu}")

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
