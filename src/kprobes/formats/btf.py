"""BTF types as facts: sizes, members, enumerators, parameters, and how C spells a type.

Every step from one type to another is bounded: a hostile BTF may have typedefs in a circle,
structs that contain themselves and types that do not exist.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats.btf_index import EACH, BtfIndex, Kind

TRANSPARENT = frozenset(
    {Kind.TYPEDEF, Kind.VOLATILE, Kind.CONST, Kind.RESTRICT, Kind.TYPE_TAG, Kind.DECL_TAG}
)
"""Kinds that stand for the type they refer to."""
AGGREGATES = frozenset({Kind.STRUCT, Kind.UNION})

_MAX_CHAIN = 64
_POINTER = 8
_SIGNED = 1
"""BTF_INT_SIGNED."""


class Type(Struct, frozen=True, kw_only=True):
    """One type's header.

    Attributes:
        number: its id.
        value: its size in bytes, or the id of the type that it refers to.
        vlen: its members, enumerators or parameters.
        flag: the kind_flag: bit-field sizes in member offsets, signed enumerators.
    """

    number: int
    kind: Kind
    name: str
    value: int
    vlen: int
    flag: bool


class Member(Struct, frozen=True, kw_only=True):
    """One member of a struct or union.

    Attributes:
        bit_offset: from the aggregate's beginning.
        bit_size: of a bit-field, else 0.
    """

    name: str
    type: int
    bit_offset: int
    bit_size: int


class Encoding(Struct, frozen=True, kw_only=True):
    """What an INT's own word says; all zero for other kinds."""

    bits: int = 0
    bit_offset: int = 0
    is_signed: bool = False


class Btf:
    """The types of one BTF."""

    def __init__(self, index: BtfIndex) -> None:
        self.index = index

    def __len__(self) -> int:
        """Return the number of types, void included."""
        return len(self.index)

    def numbers(self, name: str, *kinds: Kind) -> list[int]:
        """Return the ids of the types with this name and one of these kinds, ascending."""
        wanted = [int(kind) for kind in kinds]
        found = [
            number
            for offset in self.index.strings_equal(name)
            for number in np.flatnonzero(self.index.name_at == offset).tolist()
            if self.index.kinds[number] in wanted
        ]
        return sorted(found)

    def type(self, number: int) -> Type:
        """Return a type by its id, or raise FormatError when there is none."""
        if not 0 <= number < len(self.index):
            raise FormatError(f"BTF: type {number} of {len(self.index)}")
        if number == 0:
            return Type(number=0, kind=Kind.VOID, name="", value=0, vlen=0, flag=False)
        at = int(self.index.at[number])
        name, info, value = self.index.words[at : at + 3].tolist()
        return Type(
            number=number,
            kind=Kind(info >> 24 & 0x1F),
            name=self.index.string(name),
            value=value,
            vlen=info & 0xFFFF,
            flag=bool(info >> 31),
        )

    def extra(self, kind: Type) -> NDArray[Any]:
        """Return the uint32 words after a type's header: a view of the BTF.

        Its shape is (members, words of each), or (words,) for a kind without members.
        """
        at = int(self.index.at[kind.number]) + 3
        each = EACH.get(kind.kind)
        if each is None:
            return self.index.words[at : at + 3]
        return self.index.words[at : at + each * kind.vlen].reshape(kind.vlen, each)

    def strip(self, number: int) -> Type:
        """Return what a type is behind typedefs and qualifiers."""
        for _ in range(_MAX_CHAIN):
            found = self.type(number)
            if found.kind not in TRANSPARENT:
                return found
            number = found.value
        raise FormatError(f"BTF: type {number} refers to itself")

    def size(self, number: int) -> int:
        """Return a type's size in bytes; of void, functions and incomplete types it is 0."""
        count = 1
        for _ in range(_MAX_CHAIN):
            found = self.strip(number)
            if found.kind == Kind.PTR:
                return count * _POINTER
            if found.kind != Kind.ARRAY:
                return count * found.value if found.kind in _SIZED else 0
            number, _, n = self.extra(found).tolist()
            count *= n
        raise FormatError(f"BTF: array {number} refers to itself")

    def members(self, aggregate: Type) -> Iterator[Member]:
        """Return the members of a struct or union, in their order."""
        for name, number, offset in self.extra(aggregate).tolist():
            yield Member(
                name=self.index.string(name),
                type=number,
                bit_offset=offset & 0xFFFFFF if aggregate.flag else offset,
                bit_size=offset >> 24 if aggregate.flag else self._old_bits(number),
            )

    def _old_bits(self, number: int) -> int:
        # Without the flag, a bit-field has an integer type of its own, with fewer bits.
        found = self.strip(number)
        if found.kind != Kind.INT:
            return 0
        bits = int(self.extra(found)[0]) & 0xFF
        return bits if bits != 8 * found.value else 0

    def encoding(self, found: Type) -> Encoding:
        """Return an INT's encoding: bits 24-27 of its word flags, 16-23 offset, 0-7 size."""
        if found.kind != Kind.INT:
            return Encoding()
        word = int(self.extra(found)[0])
        return Encoding(
            bits=word & 0xFF, bit_offset=word >> 16 & 0xFF, is_signed=bool(word >> 24 & _SIGNED)
        )

    def target(self, found: Type) -> int:
        """Return what a pointer points to or an array consists of; 0 for other kinds."""
        if found.kind == Kind.ARRAY:
            return int(self.extra(found)[0])
        return found.value if found.kind == Kind.PTR else 0

    def length(self, found: Type) -> int:
        """Return the elements of an array; 0 for other kinds."""
        return int(self.extra(found)[2]) if found.kind == Kind.ARRAY else 0

    def parameters(self, proto: Type) -> list[tuple[str, int]]:
        """Return names and types of a prototype's parameters; ("", 0) at the end means more."""
        return [(self.index.string(name), number) for name, number in self.extra(proto).tolist()]

    def places_in_sections(self) -> dict[int, int]:
        """Return where each variable is in its section, in bytes, by its id."""
        found: dict[int, int] = {}
        for number in np.flatnonzero(self.index.kinds == Kind.DATASEC).tolist():
            found |= {var: at for var, at, _ in self.extra(self.type(number)).tolist()}
        return found

    def enumerators(self, enum: Type) -> Iterator[tuple[int, str]]:
        """Return value and name of each enumerator; nothing for other kinds."""
        if enum.kind in (Kind.ENUM, Kind.ENUM64):
            for name, *words in self.extra(enum).tolist():
                yield self._value(enum, words), self.index.string(name)

    def find_enumerator(self, name: str) -> tuple[int, int] | None:
        """Return its enum's id and its value, by its name alone, or None when there is none."""
        for offset in self.index.strings_equal(name):
            for place in np.flatnonzero(self.index.words == offset).tolist():
                found = self._enumerator_at(place)
                if found is not None:
                    return found
        return None

    def _enumerator_at(self, place: int) -> tuple[int, int] | None:
        # The word at ``place`` is an enumerator's name only if an enum's member begins there.
        number = int(np.searchsorted(self.index.at, place, side="right")) - 1
        found = self.type(number)
        if found.kind not in (Kind.ENUM, Kind.ENUM64):
            return None
        row, column = divmod(place - int(self.index.at[number]) - 3, EACH[found.kind])
        if row < 0 or column:
            return None
        return number, self._value(found, self.extra(found)[row, 1:].tolist())

    def _value(self, enum: Type, words: list[int]) -> int:
        low, *high = words
        bits = 32 + 32 * len(high)
        value = low | sum(high) << 32
        return value - (value >> (bits - 1) << bits) if self._is_signed(enum) else value

    def _is_signed(self, enum: Type) -> bool:
        # Before pahole 1.24 no enum had the flag and values were signed, as C has them.
        return enum.flag or (enum.kind == Kind.ENUM and not self._has_enum_flags())

    def _has_enum_flags(self) -> bool:
        enums = self.index.at[self.index.kinds == Kind.ENUM]
        return bool(np.any(self.index.words[enums + 1] >> np.uint32(31)))


_SIZED = AGGREGATES | {Kind.INT, Kind.ENUM, Kind.ENUM64, Kind.FLOAT, Kind.DATASEC}


_MAX_PARAMETERS = 64
_QUALIFIERS = {Kind.CONST: "const", Kind.VOLATILE: "volatile", Kind.RESTRICT: "restrict"}
_TAGS = {Kind.STRUCT: "struct", Kind.UNION: "union", Kind.ENUM: "enum", Kind.ENUM64: "enum"}


def type_name(btf: Btf, number: int, *, nested: bool = False) -> str:
    """Return how C writes a type without a name declared.

    Args:
        btf: the types.
        number: the type's id.
        nested: inside a function pointer's parameters, whose own function pointers are cut
            to ``(...)``: their types may refer to each other without end.

    Raises:
        FormatError: the type refers to itself or to one that does not exist.
    """
    # C reads declarators inside out: ``inner`` is what was read so far, the base comes last.
    inner, qualifiers = "", ""
    for _ in range(_MAX_CHAIN):
        found = btf.type(number)
        if found.kind in _QUALIFIERS:
            qualifiers += f"{_QUALIFIERS[found.kind]} "
        elif found.kind == Kind.PTR:
            inner = _pointer(inner, qualifiers)
            qualifiers = ""
        elif found.kind == Kind.ARRAY:
            inner = f"{_grouped(inner)}[{int(btf.extra(found)[2])}]"
        elif found.kind == Kind.FUNC_PROTO:
            inner = f"{_grouped(inner)}({_parameters(btf, found, nested=nested)})"
        elif found.kind not in (Kind.TYPE_TAG, Kind.DECL_TAG):
            return _joined(qualifiers + _base(found), inner)
        number = int(btf.extra(found)[0]) if found.kind == Kind.ARRAY else found.value
    raise FormatError(f"BTF: type {number} refers to itself")


def _pointer(inner: str, qualifiers: str) -> str:
    # The qualifiers read before a pointer are the pointer's own: ``*const``.
    star = f"*{qualifiers.rstrip()}"
    return f"{star} {inner}" if qualifiers and inner.startswith("*") else f"{star}{inner}"


def _grouped(inner: str) -> str:
    return f"({inner})" if inner.startswith("*") else inner


def _joined(base: str, inner: str) -> str:
    return base + inner if not inner or inner.startswith("[") else f"{base} {inner}"


def _base(found: Type) -> str:
    match found.kind:
        case Kind.VOID:
            return "void"
        case Kind.FWD:
            return f"{'union' if found.flag else 'struct'} {found.name}"
        case Kind.STRUCT | Kind.UNION | Kind.ENUM | Kind.ENUM64:
            return f"{_TAGS[found.kind]} {found.name or '{...}'}"
        case _:
            return found.name


def _parameters(btf: Btf, proto: Type, *, nested: bool) -> str:
    if nested or proto.vlen > _MAX_PARAMETERS:
        return "..."
    return ", ".join(parameter_types(btf, proto, nested=True)) or "void"


def parameter_types(btf: Btf, proto: Type, *, nested: bool = False) -> list[str]:
    """Return how C writes the type of each parameter; a final ``...`` for any number more.

    Args:
        btf: that the types are in.
        proto: the function's prototype.
        nested: as for ``type_name``.
    """
    if proto.vlen > _MAX_PARAMETERS:
        raise FormatError(f"BTF: a function of {proto.vlen} parameters")
    return [
        type_name(btf, number, nested=nested) if number or name else "..."
        for name, number in btf.parameters(proto)
    ]
