"""Locations of variables, read in plain Python."""

from collections.abc import Callable, Mapping

from kprobes.model.source import Location, LocationKind
from kprobes.units import U64
from tests.build.operations import operate

Memory = Callable[[int, int], bytes]
"""An address and a size to what is there."""


def fetched(location: Location, registers: Mapping[str, int], memory: Memory, size: int = 8) -> int:
    """Return what a probe fetches there, of so many bytes, without a sign."""
    match location.kind:
        case LocationKind.REGISTER:
            number = registers[location.register]
        case LocationKind.CONSTANT | LocationKind.ADDRESS:
            number = location.number
        case LocationKind.MEMORY:
            bases = [fetched(each, registers, memory) for each in location.operands]
            base = bases[0] if bases else registers[location.register]
            data = memory(base + location.number & U64, size)
            number = int.from_bytes(data, "little")
        case LocationKind.STATIC | LocationKind.PER_CPU:
            number = int.from_bytes(memory(location.number, size), "little")
        case LocationKind.COMPUTED:
            left, right = (fetched(each, registers, memory) for each in location.operands)
            number = operate(location.operation, left, right)
    return number & (1 << 8 * size) - 1
