"""Locations of values at an address: what a probe can fetch, made of DWARF's operations.

DWARF 5, section 2.5: a machine with a stack of numbers of 64 bits. What it leaves is where the
value is in memory, or with DW_OP_stack_value the value itself. Signs count in comparisons and where
a shift says so. Not there: numbers of other types (DW_OP_convert), pieces, and what a caller had.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kprobes.dwarf.libdw import Die, Dwarf, Op
from kprobes.model.definition import Operation
from kprobes.model.source import Location, LocationKind, Piece
from kprobes.units import U64, signed

AT_FRAME_BASE = 0x40
_ADDR, _REG, _BREG, _REGX, _FBREG, _BREGX, _CFA = 0x03, 0x50, 0x70, 0x90, 0x91, 0x92, 0x9C
_VALUE = 0x9F
_DEREF, _DEREF_SIZE, _NEG, _NOT, _ = _UNARY = 0x06, 0x94, 0x1F, 0x20, 0x23
_DUP, _DROP, _, _SWAP = _MOVES = 0x12, 0x13, 0x14, 0x16
_ENTRY, _PIECES, _IMPLICIT_POINTER = (0xA3, 0xF3), (0x93, 0x9D), (0xA0, 0xF2)
_CONSTANTS = frozenset((*range(0x08, 0x12), *range(0x30, 0x50)))
_LITERALS = 0x30
_REGISTERS = 32
_BINARY = {
    0x1A: Operation.AND,
    0x1C: Operation.SUB,
    0x1E: Operation.MUL,
    0x21: Operation.OR,
    0x22: Operation.ADD,
    0x24: Operation.SHL,
    0x25: Operation.LSHR,
    0x26: Operation.ASHR,
    0x27: Operation.XOR,
    0x29: Operation.EQ,
    0x2A: Operation.SGE,
    0x2B: Operation.SGT,
    0x2C: Operation.SLE,
    0x2D: Operation.SLT,
    0x2E: Operation.NE,
}
_SHIFTS = (Operation.SHL, Operation.LSHR, Operation.ASHR)
_WORD = 64
_MAX_SIZE = 64
"""Numbers and operations that one value is made of."""
_UNKNOWN = "it is computed by what probes do not have"


class _Unreadable(Exception):  # noqa: N818 - says why
    pass


class _Item(NamedTuple):
    # Of the stack; size counts what it is made of, as one may be used twice.
    value: Location
    size: int = 1


class LocationReader(NamedTuple):
    """Reads what is where at one address.

    Attributes:
        dwarf: that says so.
        registers: pt_regs' names of the registers, in the order of their numbers in DWARF.
        per_cpu: addresses of what each CPU has, as linked.
        function: that the address is in.
        addr: as linked.
    """

    dwarf: Dwarf
    registers: Sequence[str]
    per_cpu: range
    function: Die
    addr: int

    def location(self, ops: Sequence[Op]) -> Location | str:
        """Return where that is, or why it cannot be read."""
        if not ops:
            return "it is optimised out"
        atoms = [op.atom for op in ops]
        if any(atom in _PIECES for atom in atoms):
            return "it is in several places at once"
        if any(atom in _ENTRY for atom in atoms):
            return "only its value at the function's entry is known"
        if atoms[0] in _IMPLICIT_POINTER:
            return "it points to what is optimised out"
        try:
            register = self._is_register(ops)
            if register is not None:
                return register
            if atoms[-1] == _VALUE:
                return self._computed(ops[:-1])
            return self._memory(self._computed(ops))
        except _Unreadable as error:
            return str(error)

    def pieces(self, ops: Sequence[Op]) -> tuple[Piece, ...]:
        """Return the parts of what is in several places, those that can be read; none of others."""
        found, offset, start = list[Piece](), 0, 0
        for number, op in enumerate(ops):
            if op.atom == _PIECES[1]:
                # Of bits.
                return ()
            if op.atom == _PIECES[0]:
                location = self.location(ops[start:number])
                if isinstance(location, Location):
                    found.append(Piece(offset=offset, size=op.number, location=location))
                offset, start = offset + op.number, number + 1
        return tuple(found)

    def _is_register(self, ops: Sequence[Op]) -> Location | None:
        first = ops[0]
        if len(ops) == 1 and _REG <= first.atom < _REG + _REGISTERS:
            return self._register(first.atom - _REG)
        return self._register(first.number) if len(ops) == 1 and first.atom == _REGX else None

    def _register(self, number: int) -> Location:
        if number >= len(self.registers):
            raise _Unreadable("it is in a register that probes do not have")
        return Location(kind=LocationKind.REGISTER, register=self.registers[number])

    def _computed(self, ops: Sequence[Op]) -> Location:
        stack: list[_Item] = []
        for op in ops:
            try:
                self._step(stack, op)
            except IndexError:
                raise _Unreadable(_UNKNOWN) from None
            if stack and stack[-1].size > _MAX_SIZE:
                raise _Unreadable(_UNKNOWN)
        if len(stack) != 1:
            raise _Unreadable(_UNKNOWN)
        return stack[0].value

    def _step(self, stack: list[_Item], op: Op) -> None:
        # IndexError where the stack has too little.
        if op.atom in _BINARY:
            right, left = stack.pop(), stack.pop()
            stack.append(_made(_BINARY[op.atom], left, right))
        elif op.atom in _UNARY:
            stack.append(self._of_one(op, stack.pop()))
        elif op.atom in _MOVES:
            _move(stack, op.atom)
        else:
            stack.append(self._leaf(op))

    def _of_one(self, op: Op, item: _Item) -> _Item:
        if op.atom == _DEREF:
            return _Item(self._memory(item.value), item.size + 1)
        if op.atom == _DEREF_SIZE:
            # Little endian: the first bytes of eight.
            whole = _Item(self._memory(item.value), item.size + 1)
            return _made(Operation.AND, whole, _number((1 << 8 * op.number) - 1))
        if op.atom == _NEG:
            return _made(Operation.SUB, _number(0), item)
        if op.atom == _NOT:
            return _made(Operation.XOR, item, _number(U64))
        return _made(Operation.ADD, item, _number(op.number))

    def _memory(self, address: Location) -> Location:
        if address.kind is LocationKind.ADDRESS:
            return Location.static(address.number, self.per_cpu)
        base, offset = _split(address)
        if base.kind is LocationKind.REGISTER:
            return Location(kind=LocationKind.MEMORY, register=base.register, number=offset)
        return Location(kind=LocationKind.MEMORY, number=offset, operands=(base,))

    def _leaf(self, op: Op) -> _Item:
        if op.atom in _CONSTANTS:
            return _number(op.atom - _LITERALS if op.atom >= _LITERALS else op.number)
        if op.atom == _ADDR:
            if not self.dwarf.is_loaded(op.number):
                raise _Unreadable("where its section was loaded is not known")
            return _Item(Location(kind=LocationKind.ADDRESS, number=op.number))
        if op.atom == _FBREG:
            return _made(Operation.ADD, self._frame_base(), _number(op.number))
        if op.atom == _CFA:
            return self._frame()
        if _BREG <= op.atom < _BREG + _REGISTERS:
            base = _Item(self._register(op.atom - _BREG))
            return _made(Operation.ADD, base, _number(op.number))
        if op.atom == _BREGX:
            base = _Item(self._register(op.number))
            return _made(Operation.ADD, base, _number(op.second))
        raise _Unreadable(_UNKNOWN)

    def _frame_base(self) -> _Item:
        ops = self.dwarf.location(self.function, AT_FRAME_BASE, self.addr) or []
        if [op.atom for op in ops] == [_CFA]:
            return self._frame()
        # Of a register it is what that holds.
        register = self._is_register(ops) if ops else None
        return _Item(register if register is not None else self._computed(ops))

    def _frame(self) -> _Item:
        ops = self.dwarf.frame(self.addr)
        if not ops or any(op.atom == _CFA for op in ops):
            raise _Unreadable("its frame is not known there")
        return _Item(self._computed([op for op in ops if op.atom != _VALUE]))


def _move(stack: list[_Item], atom: int) -> None:
    if atom == _SWAP:
        stack[-1], stack[-2] = stack[-2], stack[-1]
    elif atom == _DROP:
        stack.pop()
    else:
        stack.append(stack[-1 if atom == _DUP else -2])


def _number(number: int) -> _Item:
    return _Item(Location(kind=LocationKind.CONSTANT, number=signed(number & U64)))


def _made(operation: Operation, left: _Item, right: _Item) -> _Item:
    a, b = left.value, right.value
    is_constant = b.kind is LocationKind.CONSTANT
    if operation in _SHIFTS and not (is_constant and 0 <= b.number < _WORD):
        raise _Unreadable(_UNKNOWN)
    if operation is Operation.ADD and is_constant:
        return _plus(left, b.number)
    size = left.size + right.size + 1
    return _Item(Location(kind=LocationKind.COMPUTED, operation=operation, operands=(a, b)), size)


def _plus(item: _Item, number: int) -> _Item:
    value = item.value
    if value.kind in (LocationKind.ADDRESS, LocationKind.CONSTANT):
        total = value.number + number & U64
        is_address = value.kind is LocationKind.ADDRESS
        kind = value.kind
        return _Item(Location(kind=kind, number=total if is_address else signed(total)))
    base, offset = _split(value)
    offset = signed(offset + number & U64)
    if not offset:
        return _Item(base, item.size)
    constant = Location(kind=LocationKind.CONSTANT, number=offset)
    made = Location(kind=LocationKind.COMPUTED, operation=Operation.ADD, operands=(base, constant))
    return _Item(made, item.size + 2)


def _split(value: Location) -> tuple[Location, int]:
    # Into what a constant is added to, and that.
    if value.kind is LocationKind.COMPUTED and value.operation is Operation.ADD:
        base, other = value.operands
        if other.kind is LocationKind.CONSTANT:
            return base, other.number
    return value, 0
