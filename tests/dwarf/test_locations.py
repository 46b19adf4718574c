"""Locations of values: DWARF's operations against a machine that runs them."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import cast

import pytest

from kprobes.dwarf.libdw import Die, Dwarf, Op
from kprobes.dwarf.locations import LocationReader
from kprobes.model.definition import Operation
from kprobes.model.source import Location, LocationKind
from kprobes.units import U64, signed
from tests.build.locations import fetched
from tests.build.operations import operate

REGISTERS = ("ax", "dx", "cx", "bx", "si", "di", "bp", "sp")
_CFA, _VALUE, _FBREG = 0x9C, 0x9F, 0x91
_SHIFTS = {0x24: Operation.SHL, 0x25: Operation.LSHR, 0x26: Operation.ASHR}
UNKNOWN = 0x6666
"""An address in a section that may be anywhere."""
_OTHERS = {
    0x1A: Operation.AND,
    0x1C: Operation.SUB,
    0x1E: Operation.MUL,
    0x21: Operation.OR,
    0x22: Operation.ADD,
    0x27: Operation.XOR,
    0x29: Operation.EQ,
    0x2A: Operation.SGE,
    0x2B: Operation.SGT,
    0x2C: Operation.SLE,
    0x2D: Operation.SLT,
    0x2E: Operation.NE,
}
_BINARY = _SHIFTS | _OTHERS
_MOVES: Mapping[int, Callable[[list[int]], None]] = {
    0x12: lambda stack: stack.append(stack[-1]),
    0x13: lambda stack: stack.__delitem__(-1),
    0x14: lambda stack: stack.append(stack[-2]),
    0x16: lambda stack: stack.__setitem__(slice(-2, None), stack[:-3:-1]),
}
_UNARY: Mapping[int, Callable[[int, int], int]] = {
    0x06: lambda top, _: memory(top),
    0x1F: lambda top, _: -top,
    0x20: lambda top, _: ~top,
    0x23: lambda top, number: top + number,
    0x94: lambda top, number: memory(top) & (1 << 8 * number) - 1,
}


class FakeDwarf:
    """A frame of 48 bytes, whose base is the frame's or a register."""

    def __init__(self, base: Sequence[Op] = (Op(_CFA),)) -> None:
        self.base = base

    def location(self, _: Die, attribute: int, addr: int) -> list[Op]:
        assert (attribute, addr) == (0x40, 0x1000)
        return list(self.base)

    def is_loaded(self, addr: int) -> bool:
        return addr != UNKNOWN

    def frame(self, addr: int) -> list[Op]:
        assert addr == 0x1000
        return [Op(0x77, 48)]


def reader(dwarf: FakeDwarf | None = None) -> LocationReader:
    return LocationReader(
        cast("Dwarf", dwarf or FakeDwarf()), REGISTERS, range(0x9000, 0x9100), Die(), 0x1000
    )


def memory(addr: int) -> int:
    """Return what is at an address: some number of its own."""
    return Random(addr & U64).getrandbits(64)


def run(ops: Sequence[Op], registers: Mapping[str, int]) -> int:
    """Run operations as the standard has them; return the number on top, signed."""
    stack: list[int] = []
    for op in ops:
        if op.atom in _BINARY:
            right, left = stack.pop(), stack.pop()
            stack.append(operate(_BINARY[op.atom], left, right))
        elif op.atom in _MOVES:
            _MOVES[op.atom](stack)
        elif op.atom in _UNARY:
            stack.append(_UNARY[op.atom](stack.pop(), op.number))
        else:
            stack.append(_leaf(op, registers))
        stack[-1:] = [signed(each & U64) for each in stack[-1:]]
    (top,) = stack
    return top


def _leaf(op: Op, registers: Mapping[str, int]) -> int:
    if op.atom == _FBREG:
        return registers["sp"] + 48 + op.number
    if 0x70 <= op.atom < 0x90:
        return registers[REGISTERS[op.atom - 0x70]] + op.number
    return op.atom - 0x30 if op.atom >= 0x30 else op.number


def value(location: Location, registers: Mapping[str, int]) -> int:
    """Return what a probe fetches there, signed."""
    return signed(fetched(location, registers, _bytes_at))


def _bytes_at(addr: int, size: int) -> bytes:
    return memory(addr).to_bytes(size, "little")


def random_ops(random: Random) -> list[Op]:
    """Return operations that leave one number, of which none goes wrong."""
    ops: list[Op] = []
    depth = 0
    while depth != 1 or (random.random() < 0.8 and len(ops) < 12):
        kind = random.random()
        if depth >= 2 and kind < 0.6:
            atom = random.choice([*_OTHERS, 0x16, 0x13])
            depth -= atom != 0x16
            ops.append(Op(atom))
        elif depth and kind < 0.75:
            narrow = Op(0x94, random.choice((1, 2, 4, 8)))
            plus = Op(0x23, random.randrange(99))
            ops.append(random.choice([Op(0x1F), Op(0x20), plus, Op(6), narrow]))
        elif depth and kind < 0.85:
            ops += [Op(0x30 + random.randrange(32)), Op(random.choice(list(_SHIFTS)))]
        else:
            depth += 1
            number = random.randrange(-300, 300) & U64
            ops.append(random.choice([Op(0x70 + random.randrange(8), number), Op(_FBREG, number)]))
            if random.random() < 0.2:
                depth += 1
                ops.append(Op(0x12))
    return ops


@pytest.mark.parametrize("seed", range(300))
def test_what_is_computed_is_what_the_operations_make(seed: int) -> None:
    random = Random(seed)
    ops = random_ops(random)
    registers = {name: random.getrandbits(64) for name in REGISTERS}

    there, made = reader().location(ops), reader().location([*ops, Op(_VALUE)])

    assert isinstance(made, Location)
    assert value(made, registers) == run(ops, registers)
    assert isinstance(there, Location)
    assert value(there, registers) == signed(memory(run(ops, registers)))


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ([Op(0x55)], Location(kind=LocationKind.REGISTER, register="di")),
        ([Op(0x90, 3)], Location(kind=LocationKind.REGISTER, register="bx")),
        ([Op(0x75, 0), Op(_VALUE)], Location(kind=LocationKind.REGISTER, register="di")),
        ([Op(0x75, 8)], Location(kind=LocationKind.MEMORY, register="di", number=8)),
        ([Op(0x92, 5, 8)], Location(kind=LocationKind.MEMORY, register="di", number=8)),
        ([Op(_FBREG, U64 - 63)], Location(kind=LocationKind.MEMORY, register="sp", number=-16)),
        ([Op(0x03, 0x7000)], Location(kind=LocationKind.STATIC, number=0x7000)),
        ([Op(0x03, 0x7000), Op(_VALUE)], Location(kind=LocationKind.ADDRESS, number=0x7000)),
        (
            [Op(0x03, 0x7000), Op(0x23, 8), Op(_VALUE)],
            Location(kind=LocationKind.ADDRESS, number=0x7008),
        ),
        ([Op(0x03, 0x9010)], Location(kind=LocationKind.PER_CPU, number=0x9010)),
        (
            [Op(0x03, 0x9010), Op(0x23, 0x100)],
            Location(kind=LocationKind.STATIC, number=0x9110),
        ),
        ([Op(0x31), Op(_VALUE)], Location(kind=LocationKind.CONSTANT, number=1)),
        ([Op(0x09, U64), Op(_VALUE)], Location(kind=LocationKind.CONSTANT, number=-1)),
    ],
)
def test_what_is_simple_stays_so(ops: list[Op], expected: Location) -> None:
    assert reader().location(ops) == expected


def test_a_frame_base_may_be_a_register() -> None:
    found = reader(FakeDwarf([Op(0x56)])).location([Op(_FBREG, 16)])

    assert found == Location(kind=LocationKind.MEMORY, register="bp", number=16)


@pytest.mark.parametrize(
    ("ops", "why"),
    [
        ([], "it is optimised out"),
        ([Op(0x03, UNKNOWN)], "where its section was loaded is not known"),
        ([Op(0x55), Op(0x93, 8), Op(0x54), Op(0x93, 8)], "it is in several places at once"),
        ([Op(0xA3, 1), Op(_VALUE)], "only its value at the function's entry is known"),
        ([Op(0xA0, 1)], "it points to what is optimised out"),
        ([Op(0x61)], "it is in a register that probes do not have"),
        ([Op(0x75, 0), Op(0xA8, 1), Op(_VALUE)], "it is computed by what probes do not have"),
        ([Op(0x75, 0), Op(0x1B), Op(_VALUE)], "it is computed by what probes do not have"),
        ([Op(0x22), Op(_VALUE)], "it is computed by what probes do not have"),
        ([Op(0x75, 0), Op(0x75, 0)], "it is computed by what probes do not have"),
        ([Op(0x75, 0), Op(0x74, 0), Op(0x24)], "it is computed by what probes do not have"),
        ([Op(0x75, 0), Op(0x09, U64), Op(0x24)], "it is computed by what probes do not have"),
        ([Op(0x75, 0), *[Op(0x12), Op(0x22)] * 12], "it is computed by what probes do not have"),
        ([Op(_VALUE)], "it is computed by what probes do not have"),
    ],
)
def test_what_cannot_be_read_says_why(ops: list[Op], why: str) -> None:
    assert reader().location(ops) == why


def test_what_is_in_several_places_has_those_that_can_be_read() -> None:
    piece = [Op(0x55), Op(0x93, 8), Op(0x93, 4), Op(0x74, 16), Op(_VALUE), Op(0x93, 4)]

    first, last = reader().pieces(piece)

    assert (first.offset, first.size) == (0, 8)
    assert first.location == Location(kind=LocationKind.REGISTER, register="di")
    assert (last.offset, last.size, last.location.kind) == (12, 4, LocationKind.COMPUTED)
    assert reader().pieces([Op(0x55)]) == ()
    assert reader().pieces([Op(0x55), Op(0x9D, 3, 0)]) == ()


def test_a_frame_that_is_not_known_is_told() -> None:
    class Without(FakeDwarf):
        def frame(self, addr: int) -> list[Op]:
            return super().frame(addr)[1:]

    assert reader(Without()).location([Op(_FBREG, 8)]) == "its frame is not known there"
