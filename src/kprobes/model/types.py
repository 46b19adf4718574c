"""What a kernel's own type information says: structs, members, functions."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a function: its name, its type as C writes it, and that type's number."""

    name: str
    type: str
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prototype:
    """A function's signature.

    Attributes:
        returned: the number of the type that it returns; 0 is void.
    """

    name: str
    returns: str
    parameters: tuple[Parameter, ...]
    returned: int = 0


class TypeKind(StrEnum):
    """What a type is once typedefs and qualifiers are taken off."""

    VOID = "void"
    INT = "int"
    POINTER = "pointer"
    AGGREGATE = "aggregate"
    ARRAY = "array"
    ENUM = "enum"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class CType:
    """One type without its typedefs and qualifiers.

    Attributes:
        kind: AGGREGATE is a struct or a union; OTHER are floats, functions, unknown structs.
        number: by which the types know it.
        name: of an aggregate, an enum or an INT; ``""`` when it has none.
        size: bytes; 0 where the types do not say.
        target: number of what a pointer points to, or an array consists of.
        count: elements of an array.
        bits: that an INT has, which are fewer than its bytes in some old bit-fields.
        bit_offset: of those in the INT's bytes.
        is_signed: of an INT.
    """

    kind: TypeKind
    number: int
    name: str = ""
    size: int = 0
    target: int = 0
    count: int = 0
    bits: int = 0
    bit_offset: int = 0
    is_signed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlace:
    """Where a member is in its aggregate, those of anonymous ones inside included.

    Attributes:
        bit_offset: from the aggregate's beginning.
        bit_size: of a bit-field, else 0.
        number: of the member's type.
    """

    bit_offset: int
    bit_size: int
    number: int


class Types(Protocol):
    """The types of one kernel.

    Numbers name types that have no name of their own; they come from ``function``, ``struct``
    and the answers about other types, and mean nothing to another kernel's.
    """

    def offset(self, struct: str, path: str) -> int:
        """Return the byte offset of ``path`` (``a.b``; anonymous members are transparent).

        Raises:
            UnknownTypeError: no such struct or member, or a bit-field.
        """
        ...

    def member_size(self, struct: str, path: str) -> int:
        """Return the size in bytes of that member; UnknownTypeError as for ``offset``."""
        ...

    def size(self, struct: str) -> int:
        """Return a struct's size in bytes; UnknownTypeError when there is none."""
        ...

    def enumerator(self, name: str) -> int:
        """Return an enumerator's value by its name alone; UnknownTypeError when there is none."""
        ...

    def function(self, name: str) -> Prototype | None:
        """Return a function's signature, or None when the types have none."""
        ...

    def struct(self, name: str) -> int | None:
        """Return the number of the struct of this name, or None when there is none."""
        ...

    def describe(self, number: int) -> CType:
        """Return what a type is."""
        ...

    def member(self, number: int, name: str) -> MemberPlace | None:
        """Return where an aggregate has a member, or None when it has none of this name."""
        ...

    def enumerators(self, number: int) -> tuple[tuple[int, str], ...]:
        """Return value and name of each enumerator of an enum, in their order."""
        ...

    def member_names(self, number: int) -> tuple[str, ...]:
        """Return the names of an aggregate's members, those of anonymous ones inside included."""
        ...

    def named(self, name: str) -> int | None:
        """Return the number of a type by its name in C: ``struct file``, ``size_t``; or None."""
        ...

    def spell(self, number: int) -> str:
        """Return how C writes a type."""
        ...
