"""Variables at a place: their types, and where they live, as far as a probe can fetch them.

What is computed there, spread over several places, or what a caller had in a register when it
called, is said to be so and where else the variable can be read.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kprobes.dwarf.libdw import Die, Dwarf, Op
from kprobes.dwarf.lines import function_at
from kprobes.model.definition import TypeWord
from kprobes.model.source import Location, LocationKind, Variable
from kprobes.units import signed

_PARAMETER, _VARIABLE = 0x05, 0x34
_BLOCKS = (0x1D, 0x0B)
"""Inlined functions, and blocks."""
_POINTER, _STRUCT, _UNION, _ARRAY, _ENUM, _BASE, _TYPEDEF = 0x0F, 0x13, 0x17, 0x01, 0x04, 0x24, 0x16
_CONST, _VOLATILE, _RESTRICT, _SUBRANGE, _FUNCTION = 0x26, 0x35, 0x37, 0x21, 0x15
_AT_LOCATION, _AT_SIZE, _AT_CONSTANT, _AT_BOUND, _AT_COUNT = 0x02, 0x0B, 0x1C, 0x2F, 0x37
_AT_ENCODING, _AT_FRAME_BASE, _AT_TYPE, _AT_CALL = 0x3E, 0x40, 0x49, 0x59
_OP_ADDR, _OP_REG, _OP_BREG, _OP_REGX, _OP_FBREG, _OP_BREGX = 0x03, 0x50, 0x70, 0x90, 0x91, 0x92
_OP_CFA, _OP_VALUE = 0x9C, 0x9F
_OP_ENTRY = (0xA3, 0xF3)
_OP_PIECES = (0x93, 0x9D)
_OP_CONSTANTS = frozenset((*range(0x08, 0x12), *range(0x30, 0x50)))
_LITERALS = 0x30
_REGISTERS = 32
_UNSIGNED, _SIGNED = (0x02, 0x07, 0x08), (0x05, 0x06)
_SIGNED_CHAR, _UNSIGNED_CHAR = 0x06, 0x08
_QUALIFIERS = {_CONST: "const", _VOLATILE: "volatile", _RESTRICT: "restrict"}
_MAX_CHAIN = 32
_TAGS = {_STRUCT: "struct", _UNION: "union", _ENUM: "enum"}
_WORDS = (1, 2, 4, 8)


class _Type(NamedTuple):
    # What is behind typedefs and qualifiers; size in bytes, 0 if it is not known.
    die: Die | None
    tag: int
    size: int


def read_variables(
    dwarf: Dwarf, registers: Sequence[str], addr: int, line: int = 0
) -> list[Variable]:
    """Return the variables in scope at an address, the innermost first; of a name the first.

    Those of a whole unit are left out.

    Args:
        dwarf: of the kernel.
        registers: pt_regs' names of the registers, in the order of their numbers in DWARF.
        addr: as linked.
        line: that is meant there, or 0: where it calls an inlined function, whose code may begin
            right there, its own variables come before that one's.
    """
    at = function_at(dwarf, addr)
    if at is None:
        return []
    reader = _Reader(dwarf, registers, at[1], addr)
    found = dict[str, Variable]()
    for scope in _innermost_first(dwarf, _nested(dwarf, at[1], addr), line):
        for die in dwarf.children(scope):
            name = dwarf.name(die) if dwarf.tag(die) in (_PARAMETER, _VARIABLE) else ""
            if name and name not in found:
                found[name] = _variable(reader, name, die)
    return list(found.values())


def _innermost_first(dwarf: Dwarf, scopes: list[Die], line: int) -> list[Die]:
    called = (n for n, each in enumerate(scopes) if line and dwarf.number(each, _AT_CALL) == line)
    own = next(called, len(scopes))
    return [*reversed(scopes[:own]), *reversed(scopes[own:])]


def _nested(dwarf: Dwarf, function: Die, addr: int) -> list[Die]:
    # Also what an inlined function is in: its code is among that of its caller.
    found = [function]
    while len(found) < _MAX_CHAIN:
        inner = (die for die in dwarf.children(found[-1]) if dwarf.tag(die) in _BLOCKS)
        inside = next((die for die in inner if dwarf.has(die, addr)), None)
        if inside is None:
            break
        found.append(inside)
    return found


class _Reader(NamedTuple):
    dwarf: Dwarf
    registers: Sequence[str]
    function: Die
    addr: int

    def location(self, ops: Sequence[Op]) -> Location | str:
        """Return where that is, or why it cannot be read."""
        first = ops[0] if ops else Op(0)
        if any(op.atom in _OP_PIECES for op in ops):
            return "it is in several places at once"
        if any(op.atom in _OP_ENTRY for op in ops):
            return "only its value at the function's entry is known"
        if first.atom in _OP_CONSTANTS and len(ops) == 2 and ops[1].atom == _OP_VALUE:
            return Location(kind=LocationKind.CONSTANT, number=_constant(first))
        if len(ops) == 2 and ops[1].atom == _OP_VALUE:
            # What a register would lead to, and nothing else, is what it holds.
            found = self._one(first)
            is_memory = isinstance(found, Location) and found.kind is LocationKind.MEMORY
            if isinstance(found, Location) and is_memory and not found.number:
                return Location(kind=LocationKind.REGISTER, register=found.register)
        if len(ops) != 1:
            return "it is computed" if ops else "it is optimised out"
        return self._one(first)

    def _one(self, op: Op) -> Location | str:
        if op.atom == _OP_ADDR:
            return Location(kind=LocationKind.STATIC, number=op.number)
        if op.atom == _OP_FBREG:
            return self._in_frame(signed(op.number))
        is_memory = _OP_BREG <= op.atom < _OP_BREG + _REGISTERS or op.atom == _OP_BREGX
        if is_memory:
            number = op.number if op.atom == _OP_BREGX else op.atom - _OP_BREG
            offset = op.second if op.atom == _OP_BREGX else op.number
            return self._in(number, LocationKind.MEMORY, signed(offset))
        if _OP_REG <= op.atom < _OP_REG + _REGISTERS or op.atom == _OP_REGX:
            number = op.number if op.atom == _OP_REGX else op.atom - _OP_REG
            return self._in(number, LocationKind.REGISTER, 0)
        return "it is computed"

    def _in(self, number: int, kind: LocationKind, offset: int) -> Location | str:
        if number >= len(self.registers):
            return "it is in a register that probes do not have"
        return Location(kind=kind, register=self.registers[number], number=offset)

    def _in_frame(self, offset: int) -> Location | str:
        base = self.dwarf.location(self.function, _AT_FRAME_BASE, self.addr) or []
        if [op.atom for op in base] == [_OP_CFA]:
            base = self.dwarf.frame(self.addr) or []
        found = self.location(base)
        if isinstance(found, str) or not found.register:
            return "its frame is not known there"
        # Of a register the frame base is what it holds.
        number = found.number + offset
        return Location(kind=LocationKind.MEMORY, register=found.register, number=number)


def _variable(reader: _Reader, name: str, die: Die) -> Variable:
    dwarf = reader.dwarf
    constant = dwarf.number(die, _AT_CONSTANT, is_signed=True)
    ops = dwarf.location(die, _AT_LOCATION, reader.addr)
    if constant is not None:
        place: Location | str = Location(kind=LocationKind.CONSTANT, number=constant)
    else:
        place = reader.location(ops or [])
    type_ = _peeled(dwarf, die)
    pointee = _peeled(dwarf, type_.die) if type_.tag == _POINTER and type_.die else None
    is_struct = pointee is not None and pointee.tag == _STRUCT
    return Variable(
        name=name,
        type=_type_text(dwarf, dwarf.reference(die, _AT_TYPE)),
        location=place if isinstance(place, Location) else None,
        why="" if isinstance(place, Location) else place,
        spec=_spec(dwarf, type_),
        struct=dwarf.name(pointee.die) if is_struct and pointee and pointee.die else "",
        is_pointer=type_.tag == _POINTER,
        ranges=tuple(_ranges(reader, die)),
    )


def _ranges(reader: _Reader, die: Die) -> Iterator[tuple[int, int]]:
    # Those that touch are one.
    last = None
    for start, end, ops in reader.dwarf.locations(die, _AT_LOCATION):
        if start == end or isinstance(reader._replace(addr=start).location(ops), str):
            continue
        if last is not None and last[1] == start:
            last = last[0], end
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last


def _peeled(dwarf: Dwarf, die: Die) -> _Type:
    found = dwarf.reference(die, _AT_TYPE)
    for _ in range(_MAX_CHAIN):
        if found is None:
            break
        tag = dwarf.tag(found)
        if tag not in (_TYPEDEF, *_QUALIFIERS):
            size = dwarf.number(found, _AT_SIZE) or (8 if tag == _POINTER else 0)
            return _Type(found, tag, size)
        found = dwarf.reference(found, _AT_TYPE)
    return _Type(None, 0, 0)


def _spec(dwarf: Dwarf, type_: _Type) -> TypeWord | None:
    if type_.size not in _WORDS or type_.die is None:
        return None
    if type_.tag == _POINTER:
        return TypeWord(base="x64", size=8)
    encoding = dwarf.number(type_.die, _AT_ENCODING) if type_.tag == _BASE else None
    if type_.tag == _ENUM:
        encoding = _UNSIGNED[1]
    if encoding in (_SIGNED_CHAR, _UNSIGNED_CHAR) and dwarf.name(type_.die) == "char":
        return TypeWord(base="char", size=1)
    if encoding not in (*_UNSIGNED, *_SIGNED):
        return None
    return TypeWord(base=f"{'s' if encoding in _SIGNED else 'u'}{8 * type_.size}", size=type_.size)


def _type_text(dwarf: Dwarf, die: Die | None) -> str:
    # As C writes it without a name; void for None.
    after = ""
    for _ in range(_MAX_CHAIN):
        if die is None:
            return f"void{after}"
        tag = dwarf.tag(die)
        if tag == _POINTER:
            after = f"*{after}" if after.startswith("*") else f" *{after}"
            after = after.replace("* *", "**")
        elif tag == _ARRAY:
            after = f"{after} [{_length(dwarf, die)}]".replace("] [", "][")
        elif tag in _QUALIFIERS:
            inner = dwarf.reference(die, _AT_TYPE)
            return f"{_QUALIFIERS[tag]} {_type_text(dwarf, inner)}{after}"
        elif tag == _FUNCTION:
            return f"{_type_text(dwarf, dwarf.reference(die, _AT_TYPE))} ({after.strip()})(...)"
        else:
            word = f"{_TAGS[tag]} " if tag in _TAGS else ""
            return f"{word}{dwarf.name(die) or '{...}'}{after}"
        die = dwarf.reference(die, _AT_TYPE)
    return f"...{after}"


def _length(dwarf: Dwarf, die: Die) -> str:
    for each in dwarf.children(die):
        if dwarf.tag(each) == _SUBRANGE:
            count, bound = dwarf.number(each, _AT_COUNT), dwarf.number(each, _AT_BOUND)
            return str(count if count is not None else bound + 1 if bound is not None else "")
    return ""


def _constant(op: Op) -> int:
    return op.atom - _LITERALS if op.atom >= _LITERALS else signed(op.number)
