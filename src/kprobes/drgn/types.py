"""Types of drgn's, made of BTF when they are asked for: what DWARF is to it otherwise.

What BTF does not tell: ``[]`` and ``[0]`` are the same there, and are taken for the former.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from drgn import (
    Object,
    Program,
    Qualifiers,
    Type,
    TypeEnumerator,
    TypeKind,
    TypeKindSet,
    TypeMember,
    TypeParameter,
)

from kprobes.errors import FormatError
from kprobes.formats import btf
from kprobes.formats.btf import Btf
from kprobes.formats.btf_index import Kind

_KINDS: Mapping[TypeKind, tuple[Kind, ...]] = {
    TypeKind.STRUCT: (Kind.STRUCT, Kind.FWD),
    TypeKind.UNION: (Kind.UNION, Kind.FWD),
    TypeKind.ENUM: (Kind.ENUM, Kind.ENUM64),
    TypeKind.TYPEDEF: (Kind.TYPEDEF,),
    TypeKind.INT: (Kind.INT,),
    TypeKind.BOOL: (Kind.INT,),
    TypeKind.FLOAT: (Kind.FLOAT,),
}
_QUALIFIERS = {
    Kind.CONST: Qualifiers.CONST,
    Kind.VOLATILE: Qualifiers.VOLATILE,
    Kind.RESTRICT: Qualifiers.RESTRICT,
}
_DEEPEST = 64
"""Types that one leads to without a member or a parameter between: a hostile BTF has circles."""


class TypeFinder:
    """The types of one BTF, each made once, for one program."""

    def __init__(self, prog: Program, types: Btf) -> None:
        self.btf = types
        self._prog = prog
        self._made: dict[int, Type] = {}
        self._found: dict[tuple[str, TypeKind], Type | None] = {}

    def __call__(
        self, prog: Program, kinds: TypeKindSet, name: str, filename: str | None
    ) -> Type | None:
        """Return the type of one of some kinds and a name; drgn's interface for finders."""
        del prog
        # BTF knows of no files.
        found = () if filename else (self._named(name, kind) for kind in kinds)
        return next((each for each in found if each is not None), None)

    def type(self, number: int, depth: int = 0) -> Type:
        """Return the type of a number, with the qualifiers before it.

        Raises:
            FormatError: the BTF is damaged there.
        """
        made = self._made.get(number)
        if made is None:
            if depth > _DEEPEST:
                raise FormatError(f"BTF: type {number} refers to itself")
            made = self._made[number] = self._make(self.btf.type(number), depth + 1)
        return made

    def nameless(self, members: Sequence[str]) -> Type | None:
        """Return the first struct without a name that has just these members, or None."""
        index = self.btf.index
        for number in np.flatnonzero((index.kinds == Kind.STRUCT) & (index.name_at == 0)).tolist():
            found = self.btf.type(number)
            if found.vlen == len(members) and _names(self.btf, found) == members:
                return self.type(number)
        return None

    def _named(self, name: str, kind: TypeKind) -> Type | None:
        key = name, kind
        if key not in self._found:
            found = map(self.type, self.btf.numbers(name, *_KINDS.get(kind, ())))
            alike = [each for each in found if each.kind == kind]
            # The first complete one, as our own types have it.
            alike.sort(key=lambda each: each.kind in _AGGREGATES and not each.is_complete())
            self._found[key] = alike[0] if alike else None
        return self._found[key]

    def _make(self, found: btf.Type, depth: int) -> Type:
        match found.kind:
            case Kind.ARRAY:
                element = self.type(self.btf.target(found), depth)
                return self._prog.array_type(element, self.btf.length(found) or None)
            case Kind.PTR:
                return self._prog.pointer_type(self.type(found.value, depth))
            case Kind.FUNC_PROTO:
                return self._function(found, depth)
            case Kind.TYPEDEF:
                return self._prog.typedef_type(found.name, self.type(found.value, depth))
            case Kind.VOID | Kind.INT | Kind.FLOAT:
                return self._number(found)
            case Kind.STRUCT | Kind.UNION | Kind.FWD | Kind.ENUM | Kind.ENUM64:
                return self._tagged(found)
            case _:
                # Qualifiers, tags; functions and variables are of the type that they refer to.
                target = self.type(found.value, depth)
                qualifier = _QUALIFIERS.get(found.kind, Qualifiers.NONE)
                return target.qualified(target.qualifiers | qualifier)

    def _number(self, found: btf.Type) -> Type:
        if found.kind is Kind.VOID:
            return self._prog.void_type()
        if found.kind is Kind.FLOAT:
            return self._prog.float_type(found.name, found.value)
        if found.name == "_Bool":
            return self._prog.bool_type(found.name, found.value)
        is_signed = self.btf.encoding(found).is_signed
        return self._prog.int_type(found.name, found.value, is_signed)

    def _tagged(self, found: btf.Type) -> Type:
        prog, tag = self._prog, found.name or None
        if found.kind is Kind.FWD:
            return prog.union_type(tag) if found.flag else prog.struct_type(tag)
        if found.kind is Kind.STRUCT:
            return prog.struct_type(tag, found.value, self._members(found))
        if found.kind is Kind.UNION:
            return prog.union_type(tag, found.value, self._members(found))
        return self._enum(found)

    def _members(self, found: btf.Type) -> list[TypeMember]:
        return [
            TypeMember(self._member(member), member.name or None, member.bit_offset)
            for member in self.btf.members(found)
        ]

    def _member(self, member: btf.Member) -> Callable[[], Type | Object]:
        if not member.bit_size:
            return partial(self.type, member.type)
        size = member.bit_size
        return lambda: Object(self._prog, self.type(member.type), bit_field_size=size)

    def _enum(self, found: btf.Type) -> Type:
        values = [(name, value) for value, name in self.btf.enumerators(found)]
        if not values:
            return self._prog.enum_type(found.name or None)
        is_signed = any(value < 0 for _, value in values)
        bits = 8 * found.value
        name = {32: "int", 64: "long"}.get(bits, f"int{bits}_t")
        base = self._prog.int_type(
            name if is_signed else f"unsigned {name}", found.value, is_signed
        )
        made = [TypeEnumerator(*each) for each in values]
        return self._prog.enum_type(found.name or None, base, made)

    def _function(self, found: btf.Type, depth: int) -> Type:
        parameters = self.btf.parameters(found)
        # The one at the end that is nothing stands for any number more.
        is_variadic = parameters[-1:] == [("", 0)]
        made = [
            TypeParameter(partial(self.type, number), name or None)
            for name, number in parameters[: len(parameters) - is_variadic]
        ]
        return self._prog.function_type(self.type(found.value, depth), made, is_variadic)


_AGGREGATES = (TypeKind.STRUCT, TypeKind.UNION)


def _names(types: Btf, found: btf.Type) -> list[str]:
    return [member.name for member in types.members(found)]
