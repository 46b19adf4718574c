"""A function's instructions, whatever its architecture."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from kprobes.arch.aarch64 import decode as aarch64
from kprobes.arch.aarch64.decode import Instruction as Word
from kprobes.arch.x86_64 import decode as x86_64
from kprobes.arch.x86_64.insn import Instruction as Bytes
from kprobes.model.kernel import TextPart, TextTables
from kprobes.units import Addr

Instruction = Bytes | Word


class Decoded(Struct, frozen=True, kw_only=True, eq=False):
    """A decoded function.

    Attributes:
        name: of its symbol.
        addr: of its entry.
        instructions: by address.
        targets: addresses inside that something may go to.
    """

    name: str
    addr: Addr
    instructions: Mapping[int, Instruction]
    targets: frozenset[int]

    def place(self, addr: int) -> str:
        """Return an address as a kprobe event names it."""
        return f"{self.name}+{addr - self.addr:#x}"


def decode(arch: str, name: str, parts: Sequence[TextPart], tables: TextTables) -> Decoded:
    """Decode a function of a kernel of this architecture, by our name of it."""
    return _DECODERS[arch](name, parts, tables)


def _x86_64(name: str, parts: Sequence[TextPart], tables: TextTables) -> Decoded:
    found = x86_64.decode_function(name, parts, tables)
    return Decoded(
        name=name, addr=parts[0].addr, instructions=found.instructions, targets=found.targets
    )


def _aarch64(name: str, parts: Sequence[TextPart], tables: TextTables) -> Decoded:
    found = aarch64.decode_function(name, parts, tables)
    rows = (found.instruction(row) for row in range(len(found.addrs)))
    none = found.data | found.fillers
    return Decoded(
        name=name,
        addr=parts[0].addr,
        instructions={each.addr: each for each in rows if each.addr not in none},
        targets=found.targets,
    )


_DECODERS: Mapping[str, Callable[[str, Sequence[TextPart], TextTables], Decoded]] = {
    "x86_64": _x86_64,
    "aarch64": _aarch64,
}
