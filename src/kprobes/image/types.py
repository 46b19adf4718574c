"""The kernel's own types, from BTF: an implementation of ``model.kernel.Types``."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import FormatError, UnknownTypeError
from kprobes.formats import btf_index
from kprobes.formats.btf import AGGREGATES, Btf, Member, Type, parameter_types, type_name
from kprobes.formats.btf_index import Kind
from kprobes.model.kernel import CType, MemberPlace, Parameter, Prototype, TypeKind

_KINDS = {
    Kind.VOID: TypeKind.VOID,
    Kind.INT: TypeKind.INT,
    Kind.PTR: TypeKind.POINTER,
    Kind.ARRAY: TypeKind.ARRAY,
    Kind.STRUCT: TypeKind.AGGREGATE,
    Kind.UNION: TypeKind.AGGREGATE,
    Kind.ENUM: TypeKind.ENUM,
    Kind.ENUM64: TypeKind.ENUM,
}
_TAGGED = {
    "struct": (Kind.STRUCT,),
    "union": (Kind.UNION,),
    "enum": (Kind.ENUM, Kind.ENUM64),
}
_UNTAGGED = (Kind.TYPEDEF, Kind.INT)
_NAMED = (TypeKind.AGGREGATE, TypeKind.ENUM, TypeKind.INT)
_MAX_MEMBERS = 1 << 15
"""Looked at for one path: a hostile struct may contain itself."""


class BtfTypes:
    """Types by name. Several of one name: the first complete one counts.

    Every method raises FormatError when what it needs is damaged.
    """

    def __init__(self, btf: Btf) -> None:
        self.btf = btf
        self._aggregates: dict[str, Type] = {}
        self._functions: dict[str, Prototype | None] = {}
        self._members: dict[tuple[str, str], tuple[int, int]] = {}
        # A handler asks for the same few at each hit.
        self._described: dict[int, CType] = {}
        self._places: dict[tuple[int, str], MemberPlace | None] = {}
        self._enumerators: dict[int, tuple[tuple[int, str], ...]] = {}
        self._named: dict[str, int | None] = {}

    def offset(self, struct: str, path: str) -> int:
        """Return the byte offset of ``path`` (``a.b``; anonymous members are transparent).

        Raises:
            UnknownTypeError: no such struct or member, or a bit-field.
        """
        return self._member(struct, path)[0]

    def member_size(self, struct: str, path: str) -> int:
        """Return the size in bytes of that member; UnknownTypeError as for ``offset``."""
        return self.btf.size(self._member(struct, path)[1])

    def size(self, struct: str) -> int:
        """Return a struct's size in bytes; UnknownTypeError when there is none."""
        return self.btf.size(self._aggregate(struct).number)

    def enumerator(self, name: str) -> int:
        """Return an enumerator's value by its name alone; UnknownTypeError when there is none."""
        found = self.btf.find_enumerator(name)
        if found is None:
            raise UnknownTypeError(f"no enumerator {name} in this kernel's types")
        return found[1]

    def function(self, name: str) -> Prototype | None:
        """Return a function's signature, or None when the types have none."""
        if name not in self._functions:
            self._functions[name] = self._find_function(name)
        return self._functions[name]

    def struct(self, name: str) -> int | None:
        """Return the number of the struct of this name, or None when there is none."""
        return next(iter(self.btf.numbers(name, Kind.STRUCT)), None)

    def describe(self, number: int) -> CType:
        """Return what a type is behind typedefs and qualifiers."""
        if number not in self._described:
            self._described[number] = self._describe(number)
        return self._described[number]

    def member(self, number: int, name: str) -> MemberPlace | None:
        """Return where an aggregate has a member, or None when it has none of this name."""
        key = number, name
        if key not in self._places:
            self._places[key] = self._find_place(number, name)
        return self._places[key]

    def enumerators(self, number: int) -> tuple[tuple[int, str], ...]:
        """Return value and name of each enumerator of an enum, in their order."""
        if number not in self._enumerators:
            self._enumerators[number] = tuple(self.btf.enumerators(self.btf.strip(number)))
        return self._enumerators[number]

    def member_names(self, number: int) -> tuple[str, ...]:
        """Return the names of an aggregate's members, those of anonymous ones inside included."""
        found = self.btf.strip(number)
        names = (member.name for member in self._flat(found)) if found.kind in AGGREGATES else ()
        return tuple(name for name in islice(names, _MAX_MEMBERS) if name)

    def named(self, name: str) -> int | None:
        """Return the number of a type by its name in C: ``struct file``, ``size_t``; or None."""
        if name not in self._named:
            self._named[name] = self._find_named(name)
        return self._named[name]

    def type_name(self, number: int) -> str:
        """Return how C writes a type."""
        return type_name(self.btf, number)

    def _describe(self, number: int) -> CType:
        found = self.btf.strip(number)
        kind = _KINDS.get(found.kind, TypeKind.OTHER)
        encoding = self.btf.encoding(found)
        return CType(
            kind=kind,
            number=found.number,
            name=found.name if kind in _NAMED else "",
            size=self.btf.size(found.number),
            target=self.btf.target(found),
            count=self.btf.length(found),
            bits=encoding.bits,
            bit_offset=encoding.bit_offset,
            is_signed=encoding.is_signed,
        )

    def _find_named(self, name: str) -> int | None:
        tag, _, own = name.rpartition(" ")
        kinds = _TAGGED.get(tag)
        if kinds is not None:
            return next(iter(self.btf.numbers(own, *kinds)), None)
        # As in C++, a tag may be left out where nothing else has the name.
        every = (self.btf.numbers(name, *kinds) for kinds in (_UNTAGGED, *_TAGGED.values()))
        return next((number for found in every for number in found), None)

    def _find_place(self, number: int, name: str) -> MemberPlace | None:
        found = self.btf.strip(number)
        member = self._find(found, name) if found.kind in AGGREGATES and name else None
        if member is None:
            return None
        return MemberPlace(
            bit_offset=member.bit_offset, bit_size=member.bit_size, number=member.type
        )

    def _find_function(self, name: str) -> Prototype | None:
        for number in self.btf.numbers(name, Kind.FUNC):
            proto = self.btf.type(self.btf.type(number).value)
            if proto.kind == Kind.FUNC_PROTO:
                return self._prototype(name, proto)
        return None

    def _prototype(self, name: str, proto: Type) -> Prototype:
        declaration = parameter_types(self.btf, proto)
        found = zip(self.btf.parameters(proto), declaration, strict=True)
        return Prototype(
            name=name,
            returns=type_name(self.btf, proto.value),
            parameters=tuple(Parameter(name=n, type=t, number=k) for (n, k), t in found),
            returned=proto.value,
        )

    def _aggregate(self, name: str) -> Type:
        if name not in self._aggregates:
            self._aggregates[name] = self._find_aggregate(name)
        return self._aggregates[name]

    def _find_aggregate(self, name: str) -> Type:
        for number in self.btf.numbers(name, Kind.STRUCT, Kind.UNION):
            return self.btf.type(number)
        for number in self.btf.numbers(name, Kind.TYPEDEF):
            found = self.btf.strip(number)
            if found.kind in AGGREGATES or found.kind == Kind.INT:
                return found
        raise UnknownTypeError(f"no struct {name} in this kernel's types")

    def _member(self, struct: str, path: str) -> tuple[int, int]:
        # (byte offset, type id)
        if (struct, path) not in self._members:
            self._members[struct, path] = self._find_member(struct, path)
        return self._members[struct, path]

    def _find_member(self, struct: str, path: str) -> tuple[int, int]:
        found, bits, number = self._aggregate(struct), 0, 0
        walked = struct
        for name in path.split("."):
            member = self._find(found, name) if found.kind in AGGREGATES else None
            if member is None:
                raise UnknownTypeError(f"{walked} has no member {name}")
            walked += f".{name}"
            if member.bit_size or member.bit_offset % 8:
                raise UnknownTypeError(f"{walked} is a bit-field")
            bits, number = bits + member.bit_offset, member.type
            found = self.btf.strip(number)
        return bits // 8, number

    def _find(self, aggregate: Type, name: str) -> Member | None:
        # Breadth first, so that a named member is found before one inside anonymous ones.
        for count, member in enumerate(self._flat(aggregate)):
            if member.name == name:
                return member
            if count == _MAX_MEMBERS:
                raise FormatError(f"BTF: struct {aggregate.name} contains itself")
        return None

    def _flat(self, aggregate: Type) -> Iterator[Member]:
        pending = [(aggregate, 0)]
        for found, base in pending:
            for member in self.btf.members(found):
                inner = self.btf.strip(member.type) if not member.name else None
                moved = base + member.bit_offset
                yield Member(
                    name=member.name,
                    type=member.type,
                    bit_offset=moved,
                    bit_size=member.bit_size,
                )
                if inner is not None and inner.kind in AGGREGATES:
                    pending.append((inner, moved))


def parse_types(data: bytes, places: NDArray[np.uint32] | None = None) -> BtfTypes | None:
    """Return the types of a BTF, or None when it is damaged or of an unknown kind.

    Args:
        data: the whole BTF.
        places: of its types, shape (types,), as ``btf_index.places_of`` says, where it is known.
    """
    try:
        return BtfTypes(Btf(btf_index.parse(data, places)))
    except FormatError:
        return None
