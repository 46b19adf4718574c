"""Variables at a place: their types, and where they live, as far as a probe can fetch them.

What is spread over several places, or what a caller had in a register when it called, is said to be
so and where else the variable can be read.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from kprobes.dwarf.libdw import Die, Dwarf
from kprobes.dwarf.lines import FunctionAt, function_at
from kprobes.dwarf.locations import LocationReader
from kprobes.model.definition import TypeWord
from kprobes.model.source import Location, LocationKind, Variable
from kprobes.units import U64, signed

_PARAMETER, _VARIABLE = 0x05, 0x34
_BLOCKS = (0x1D, 0x0B)
"""Inlined functions, and blocks."""
_POINTER, _STRUCT, _UNION, _ARRAY, _ENUM, _BASE, _TYPEDEF = 0x0F, 0x13, 0x17, 0x01, 0x04, 0x24, 0x16
_CONST, _VOLATILE, _RESTRICT, _SUBRANGE, _FUNCTION = 0x26, 0x35, 0x37, 0x21, 0x15
_AT_LOCATION, _AT_SIZE, _AT_CONSTANT, _AT_BOUND, _AT_COUNT = 0x02, 0x0B, 0x1C, 0x2F, 0x37
_AT_DECLARATION, _AT_ENCODING, _AT_TYPE, _AT_CALL = 0x3C, 0x3E, 0x49, 0x59
_UNSIGNED, _SIGNED = (0x02, 0x07, 0x08), (0x05, 0x06)
_SIGNED_CHAR, _UNSIGNED_CHAR = 0x06, 0x08
_QUALIFIERS = {_CONST: "const", _VOLATILE: "volatile", _RESTRICT: "restrict"}
_MAX_CHAIN = 32
_DISCARDED = "__UNIQUE_ID_"
"""What a compiler is told to keep and a kernel's linker drops has an address all the same."""
_UNFOUND = "another file has it, and no symbol its name"
_TAGS = {_STRUCT: "struct", _UNION: "union", _ENUM: "enum"}
_WORDS = (1, 2, 4, 8)


FindElsewhere = Callable[[str], Location | None]
"""Returns where a variable is that another file has, or None."""


class _Type(NamedTuple):
    # What is behind typedefs and qualifiers; size in bytes, 0 if it is not known.
    die: Die | None
    tag: int
    size: int


class Scope(NamedTuple):
    """What is meant at a place.

    Attributes:
        addr: as linked.
        line: or 0: where it calls an inlined function, whose code may begin right there, its own
            variables come before that one's.
        inlined: likewise the function whose copy begins there, or "".
    """

    addr: int
    line: int = 0
    inlined: str = ""


def read_variables(
    dwarf: Dwarf, registers: Sequence[str], per_cpu: range, where: Scope
) -> list[Variable]:
    """Return the variables in scope at an address, the innermost first; of a name the first.

    Those of a whole unit are left out.

    Args:
        dwarf: of the kernel.
        registers: pt_regs' names of the registers, in the order of their numbers in DWARF.
        per_cpu: addresses of what each CPU has, as linked.
        where: the place.
    """
    at = function_at(dwarf, where.addr)
    if at is None:
        return []
    reader = LocationReader(dwarf, registers, per_cpu, at.die, at.addr)
    found = dict[str, Variable]()
    scopes = _nested(dwarf, at, where.inlined)
    meant = next((each for each in scopes if dwarf.name(each) == where.inlined), scopes[0])
    for scope in _innermost_first(dwarf, scopes, where):
        for die in dwarf.children(scope):
            name = dwarf.name(die) if dwarf.tag(die) in (_PARAMETER, _VARIABLE) else ""
            if name and name not in found:
                found[name] = _variable(reader, name, die, is_meant=scope is meant)
    return list(found.values())


def read_externs(
    dwarf: Dwarf, registers: Sequence[str], per_cpu: range, addr: int, elsewhere: FindElsewhere
) -> list[Variable]:
    """Return the variables of the unit that an address is in.

    Args:
        dwarf: of the kernel.
        registers: as for ``read_variables``.
        per_cpu: likewise.
        addr: as linked.
        elsewhere: finds those that the unit only declares.
    """
    at = function_at(dwarf, addr)
    if at is None:
        return []
    reader = LocationReader(dwarf, registers, per_cpu, at.die, at.addr)
    found = dict[str, Variable]()
    for die in dwarf.children(at.unit):
        name = dwarf.name(die) if dwarf.tag(die) == _VARIABLE else ""
        if name.startswith(_DISCARDED):
            continue
        if name and (name not in found or found[name].location is None):
            variable = _variable(reader, name, die, is_meant=False)
            if variable.location is None and dwarf.has_attribute(die, _AT_DECLARATION):
                place = elsewhere(name)
                variable = replace(variable, location=place, why="" if place else _UNFOUND)
            found[name] = variable
    return list(found.values())


def _innermost_first(dwarf: Dwarf, scopes: list[Die], where: Scope) -> list[Die]:
    line, inlined = where.line, where.inlined
    called = (n for n, each in enumerate(scopes) if line and dwarf.number(each, _AT_CALL) == line)
    own = next(called, len(scopes))
    if inlined:
        names = [dwarf.name(each) for each in scopes]
        own = names.index(inlined) + 1 if inlined in names else own
    return [*reversed(scopes[:own]), *reversed(scopes[own:])]


def _nested(dwarf: Dwarf, at: FunctionAt, inlined: str) -> list[Die]:
    # Also what an inlined function is in: its code is among that of its caller.
    found = [at.die]
    while len(found) < _MAX_CHAIN:
        inner = [die for die in dwarf.children(found[-1]) if dwarf.tag(die) in _BLOCKS]
        inside = _inside(dwarf, inner, at.addr, inlined)
        if inside is None:
            break
        found.append(inside)
    return found


def _inside(dwarf: Dwarf, inner: Sequence[Die], addr: int, inlined: str) -> Die | None:
    # To gcc a copy may begin before an instruction that is not among its own (location views).
    begin = [die for die in inner if inlined and dwarf.entry(die) == addr]
    meant = (die for die in begin if dwarf.name(die) == inlined)
    around = (die for die in inner if dwarf.has(die, addr))
    return next(chain(meant, around, begin), None)


def _variable(reader: LocationReader, name: str, die: Die, *, is_meant: bool) -> Variable:
    dwarf = reader.dwarf
    constant = dwarf.number(die, _AT_CONSTANT)
    ops = dwarf.location(die, _AT_LOCATION, reader.addr)
    if constant is not None:
        place: Location | str = Location(kind=LocationKind.CONSTANT, number=signed(constant))
    else:
        place = reader.location(ops or [])
    type_ = _peeled(dwarf, die)
    is_pointer, is_array = type_.tag == _POINTER, type_.tag == _ARRAY
    inner = _peeled(dwarf, type_.die) if (is_pointer or is_array) and type_.die else None
    lengths = [*_lengths(dwarf, type_.die)] if is_array and type_.die else []
    struct = type_ if inner is None else inner
    return Variable(
        name=name,
        type=_type_text(dwarf, dwarf.reference(die, _AT_TYPE)),
        location=place if isinstance(place, Location) else None,
        why="" if isinstance(place, Location) else place,
        pieces=reader.pieces(ops or []) if struct is type_ and struct.tag == _STRUCT else (),
        spec=_spec(dwarf, type_),
        struct=dwarf.name(struct.die) if struct.tag == _STRUCT and struct.die else "",
        enum=dwarf.name(type_.die) if type_.tag == _ENUM and type_.die else "",
        is_pointer=is_pointer,
        is_array=is_array,
        element=None if inner is None else _spec(dwarf, inner),
        element_size=0 if inner is None else inner.size,
        counts=tuple(lengths),
        is_parameter=is_meant and dwarf.tag(die) == _PARAMETER,
        ranges=tuple(_ranges(reader, die)),
    )


def _ranges(reader: LocationReader, die: Die) -> Iterator[tuple[int, int]]:
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
            lengths = "][".join(str(each or "") for each in _lengths(dwarf, die))
            after = f"{after} [{lengths}]".replace("] [", "][")
        elif tag in _QUALIFIERS:
            text, word = _type_text(dwarf, dwarf.reference(die, _AT_TYPE)), _QUALIFIERS[tag]
            if text.endswith("*"):
                return f"{text}{word}{after}"
            # To gcc an array of what is constant is constant, too.
            return f"{text}{after}" if text.startswith(word) else f"{word} {text}{after}"
        elif tag == _FUNCTION:
            return f"{_type_text(dwarf, dwarf.reference(die, _AT_TYPE))} ({after.strip()})(...)"
        else:
            word = f"{_TAGS[tag]} " if tag in _TAGS else ""
            return f"{word}{dwarf.name(die) or '{...}'}{after}"
        die = dwarf.reference(die, _AT_TYPE)
    return f"...{after}"


def _lengths(dwarf: Dwarf, die: Die) -> Iterator[int]:
    # Of each of an array's dimensions; 0 where it is not known.
    for each in dwarf.children(die):
        if dwarf.tag(each) == _SUBRANGE:
            count, bound = dwarf.number(each, _AT_COUNT), dwarf.number(each, _AT_BOUND)
            yield count if count is not None else 0 if bound is None else bound + 1 & U64
