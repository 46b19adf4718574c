"""A gdb target description: XML that names a stub's registers, in the order of its g packet.

Written down in the GDB manual, appendix "Target Descriptions". QEMU's ``target.xml`` includes one
annex file per feature and does not declare the ``xi:`` prefix, so it is read without namespaces.
"""

from collections.abc import Callable, Mapping
from xml.parsers import expat

from msgspec import Struct, field

from kprobes.errors import FormatError
from kprobes.formats.rsp import from_hex, to_hex

ROOT = "target.xml"
_MAX_FILES = 64
_MAX_REGISTERS = 8192
_MAX_BITS = 1 << 16


class RegisterSlot(Struct, frozen=True, kw_only=True):
    """One register of a stub.

    Attributes:
        number: what ``p`` and ``P`` packets call it.
        size: bytes.
        offset: in the g packet, bytes; beyond its end for a register that only ``p`` reads.
    """

    name: str
    number: int
    size: int
    offset: int


class Description(Struct, frozen=True, kw_only=True):
    """A stub's registers by number, and the name gdb has for their architecture."""

    architecture: str
    slots: tuple[RegisterSlot, ...]

    def slot(self, name: str) -> RegisterSlot | None:
        """Return the register of this name, or None."""
        return next((slot for slot in self.slots if slot.name == name), None)


def parse_description(fetch: Callable[[str], bytes]) -> Description:
    """Read ``target.xml`` and all that it includes.

    Args:
        fetch: returns a file of the description by its name.

    Raises:
        FormatError: no XML, or too much of it.
    """
    reader = _Reader(fetch)
    reader.read(ROOT)
    slots: list[RegisterSlot] = []
    offset = 0
    for number, (name, size) in sorted(reader.registers.items()):
        slots.append(RegisterSlot(name=name, number=number, size=size, offset=offset))
        offset += size
    return Description(architecture=reader.architecture.strip(), slots=tuple(slots))


def decode_registers(description: Description, payload: bytes) -> dict[str, int]:
    """Read a g packet, little endian; registers that it lacks or marks ``x`` are left out."""
    shown = [slot for slot in description.slots if 2 * (slot.offset + slot.size) <= len(payload)]
    if b"x" in payload:
        shown = [slot for slot in shown if b"x" not in _digits(slot, payload)]
        payload = payload.replace(b"x", b"0")
    data = from_hex(payload)
    return {
        slot.name: int.from_bytes(data[slot.offset : slot.offset + slot.size], "little")
        for slot in shown
    }


def _digits(slot: RegisterSlot, payload: bytes) -> bytes:
    return payload[2 * slot.offset : 2 * (slot.offset + slot.size)]


def encode_registers(description: Description, payload: bytes, values: Mapping[str, int]) -> bytes:
    """Return a g packet with some registers replaced, for ``G``.

    Args:
        description: where each register is in the packet.
        payload: the packet, as hexadecimal digits.
        values: numbers by the stub's names; names that it has not are left out.
    """
    out = bytearray(payload)
    for slot in description.slots:
        if slot.name in values:
            digits = _encoded(slot, values[slot.name])
            out[2 * slot.offset : 2 * (slot.offset + slot.size)] = digits
    return bytes(out)


def _encoded(slot: RegisterSlot, value: int) -> bytes:
    """Return a register's digits, little endian; what does not fit is cut off."""
    return to_hex((value & ((1 << 8 * slot.size) - 1)).to_bytes(slot.size, "little"))


class _Reader(Struct):
    fetch: Callable[[str], bytes]
    registers: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    architecture: str = ""
    files: int = 0
    next_number: int = 0
    is_architecture: bool = False

    def read(self, name: str) -> None:
        self.files += 1
        if self.files > _MAX_FILES:
            raise FormatError(f"a target description of more than {_MAX_FILES} files")
        parser = expat.ParserCreate()
        parser.StartElementHandler = self.start
        parser.EndElementHandler = self.end
        parser.CharacterDataHandler = self.text
        parser.EntityDeclHandler = self.entity
        try:
            parser.Parse(self.fetch(name), True)
        except expat.ExpatError as e:
            raise FormatError(f"target description {name}: {e}") from e

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.is_architecture = tag == "architecture"
        if tag == "xi:include" and "href" in attributes:
            # In the middle of its parent: registers are numbered as if the text stood here.
            self.read(attributes["href"])
        elif tag == "reg":
            self.add(attributes)

    def end(self, _tag: str) -> None:
        self.is_architecture = False

    def text(self, data: str) -> None:
        if self.is_architecture and len(self.architecture) < 64:
            self.architecture += data

    def entity(self, *_: object) -> None:
        raise FormatError("a target description with entities")

    def add(self, attributes: dict[str, str]) -> None:
        name = attributes.get("name", "")
        try:
            bits = int(attributes.get("bitsize", ""))
            number = int(attributes.get("regnum", self.next_number))
        except ValueError as e:
            raise FormatError(f"register {name!r} of the target description: {e}") from e
        if not (0 < bits <= _MAX_BITS and number >= 0 and len(self.registers) < _MAX_REGISTERS):
            raise FormatError(f"register {name!r} of the target description: {bits} bits")
        self.next_number = number + 1
        self.registers[number] = (name, (bits + 7) // 8)
