"""Typed memory: structs, pointers and arrays whose members are read when they are asked for.

Methods of values with members end in an underscore, as drgn's do, so that they hide no member.
Numbers are Python's own integers, read at once. Nothing is cached: two reads may differ.
"""

import difflib
from collections.abc import Callable, Iterator
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kprobes.errors import UnknownTypeError
from kprobes.handlers.memory import (
    MAX_STRING,
    NUMBERS,
    bit_field,
    check_number,
    number,
    pattern,
)
from kprobes.model.kernel import CType, MemberPlace, Symbols, TypeKind, Types, place_of
from kprobes.units import U64

if TYPE_CHECKING:
    # An extra.
    from drgn import Object, Program

_NEAR = 3


class DataMemory(Protocol):
    """Where values are; see ``TaskMemory``."""

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        ...

    def string(self, addr: int, max_size: int = MAX_STRING) -> str:
        """Return the text up to its NUL, or ``max_size`` bytes, or raise MemoryFault."""
        ...

    def write(self, addr: int, data: bytes) -> None:
        """Write data, or raise MemoryFault."""
        ...


class Typed(msgspec.Struct, frozen=True, kw_only=True):
    """Memory, and the types of what is in it.

    Attributes:
        program: returns the kernel as drgn has it, or raises UsageError.
    """

    memory: DataMemory
    types: Types
    symbols: Symbols
    program: "Callable[[], Program]"


class Struct:
    """A struct or union in memory: ``file.f_path.dentry``, also ``file["f_path"]``.

    Attributes:
        typed_: memory and types.
        number_: of its type.
        address_: where it is.
    """

    __slots__ = ("address_", "number_", "typed_")
    typed_: Typed
    number_: int
    address_: int

    def __init__(self, typed: Typed, number: int, address: int) -> None:
        """See the attributes."""
        put = object.__setattr__
        put(self, "typed_", typed)
        put(self, "number_", number)
        put(self, "address_", address)

    @property
    def type_(self) -> str:
        """How C writes its type."""
        return self.typed_.types.type_name(self.number_)

    def __getattr__(self, name: str) -> Any:
        return _load_member(self, _place(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        _store_member(self, _place(self, name), index(value))

    def __getitem__(self, name: str) -> Any:
        return _load_member(self, _place(self, name))

    def __setitem__(self, name: str, value: Any) -> None:
        _store_member(self, _place(self, name), index(value))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.typed_.types.member_names(self.number_)]

    def address_of_(self) -> "Pointer":
        """Return a pointer to it."""
        return pointer_to(self.typed_, self.number_, self.address_)

    def drgn_(self) -> "Object":
        """Return it as drgn has it.

        Raises:
            UsageError: drgn is not installed.
            LookupError: its type has no name.
        """
        return _object(self, address=self.address_)

    def bytes_(self) -> bytes:
        """Return what memory holds of it."""
        size = self.typed_.types.describe(self.number_).size
        return self.typed_.memory.read(self.address_, size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Struct):
            return NotImplemented
        return (self.address_, self.number_) == (other.address_, other.number_)

    def __hash__(self) -> int:
        return hash((self.address_, self.number_))

    def __repr__(self) -> str:
        return f"*({self.type_} *){self.address_:#x}"

    def __str__(self) -> str:
        names = self.typed_.types.member_names(self.number_)
        return f"({self.type_}){{{', '.join(f'.{name} = {self[name]!r}' for name in names)}}}"


class Pointer:
    """A pointer: ``int(p)``, ``p[0]``, and what it points to has ``p.member``.

    Attributes:
        typed_: memory and types.
        target_: number of the type that it points to.
        address_: its value.
    """

    __slots__ = ("address_", "target_", "typed_")
    typed_: Typed
    target_: int
    address_: int

    def __init__(self, typed: Typed, target: int, address: int) -> None:
        """See the attributes."""
        put = object.__setattr__
        put(self, "typed_", typed)
        put(self, "target_", target)
        put(self, "address_", address)

    @property
    def type_(self) -> str:
        """How C writes its type."""
        return _pointer_type(self.typed_.types.type_name(self.target_))

    def __getattr__(self, name: str) -> Any:
        struct = _pointee(self, name)
        return _load_member(struct, _place(struct, name))

    def __setattr__(self, name: str, value: Any) -> None:
        struct = _pointee(self, name)
        _store_member(struct, _place(struct, name), index(value))

    def drgn_(self) -> "Object":
        """Return it as drgn has it; errors as of a struct."""
        return _object(self, self.address_)

    def __getitem__(self, index: int) -> Any:
        return load(self.typed_, self.target_, self._at(index))

    def __setitem__(self, at: int, value: Any) -> None:
        store(self.typed_, self.target_, self._at(at), index(value))

    __iter__ = None  # it has no end

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.typed_.types.member_names(self.target_)]

    def __int__(self) -> int:
        return self.address_

    __index__ = __int__

    def __bool__(self) -> bool:
        return self.address_ != 0

    def __add__(self, count: int) -> "Pointer":
        return type(self)(self.typed_, self.target_, self._at(count))

    def __sub__(self, count: int) -> "Pointer":
        return self + -count

    def __eq__(self, other: object) -> bool:
        return self.address_ == int(other) if isinstance(other, int | Pointer) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.address_)

    def __repr__(self) -> str:
        name = ""
        if self.typed_.types.describe(self.target_).kind is TypeKind.OTHER:
            name = f" <{place_of(self.typed_.symbols, self.address_)}>"
        return f"({self.type_}){self.address_:#x}{name}"

    def _at(self, index: int) -> int:
        return self.address_ + index * _size(self.typed_.types, self.target_) & U64


class TextPointer(Pointer):
    """A pointer to chars, bytes or void: what it points to may be a string."""

    __slots__ = ()

    def string(self, max_size: int = MAX_STRING) -> str:
        """Return the text that it points to, up to its NUL, or ``max_size`` bytes.

        Raises:
            MemoryFault: there is none.
        """
        return self.typed_.memory.string(self.address_, max_size)


class Array:
    """An array in memory: ``len(a)``, ``a[0]``, iteration.

    Attributes:
        typed_: memory and types.
        number_: of its type.
        address_: where it is.
    """

    __slots__ = ("_element", "_length", "address_", "number_", "typed_")

    def __init__(self, typed: Typed, ctype: CType, address: int) -> None:
        """Take an array type and its place."""
        self.typed_, self.number_, self.address_ = typed, ctype.number, address
        self._element, self._length = ctype.target, ctype.count

    @property
    def type_(self) -> str:
        """How C writes its type."""
        return self.typed_.types.type_name(self.number_)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return load(self.typed_, self._element, self._at(index))

    def __setitem__(self, at: int, value: Any) -> None:
        store(self.typed_, self._element, self._at(at), index(value))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._length))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self._is_text() and self.string() == other
        if not isinstance(other, Array):
            return NotImplemented
        return (self.address_, self.number_) == (other.address_, other.number_)

    def __hash__(self) -> int:
        return hash((self.address_, self.number_))

    def __repr__(self) -> str:
        return repr(self.string()) if self._is_text() else f"*({self.type_} *){self.address_:#x}"

    def __str__(self) -> str:
        return self.string() if self._is_text() else repr(list(self))

    def drgn_(self) -> "Object":
        """Return it as drgn has it; errors as of a struct."""
        return _object(self, address=self.address_)

    def bytes_(self) -> bytes:
        """Return what memory holds of it."""
        size = self._length * _size(self.typed_.types, self._element)
        return self.typed_.memory.read(self.address_, size)

    def string(self) -> str:
        """Return the text in an array of chars, up to its NUL, as ``str`` does.

        Raises:
            UnknownTypeError: it is an array of something else.
        """
        if not self._is_text():
            raise UnknownTypeError(f"{self.type_} is not a string")
        if self._length == 0:
            return self.typed_.memory.string(self.address_)
        return self.bytes_().split(b"\0")[0].decode(errors="backslashreplace")

    def _is_text(self) -> bool:
        ctype = self.typed_.types.describe(self._element)
        return _is_text(ctype) and ctype.name == "char"

    def _at(self, index: int) -> int:
        # An array of no elements ends a struct, which says elsewhere how many there are.
        if self._length and not -self._length <= index < self._length:
            raise IndexError(f"{index} in {self.type_}")
        index += self._length if index < 0 else 0
        return self.address_ + index * _size(self.typed_.types, self._element) & U64


def _object(value: "Struct | Pointer | Array", *given: int, **others: int) -> "Object":
    # Of drgn's, which is an extra: the program says so first where it is not there.
    prog = value.typed_.program()
    from drgn import Object

    return Object(prog, value.type_, *given, **others)


def load(typed: Typed, type_: int, address: int) -> Any:
    """Return the value of a type at an address: a number at once, all else when it is looked at.

    Raises:
        MemoryFault: a number is not there.
        UnknownTypeError: the type has no values.
    """
    ctype = typed.types.describe(type_)
    match ctype.kind:
        case TypeKind.AGGREGATE:
            return Struct(typed, type_, address)
        case TypeKind.ARRAY:
            return Array(typed, ctype, address)
        case _:
            check_number(typed.types, ctype)
            raw = int.from_bytes(typed.memory.read(address, ctype.size), "little")
            return from_bits(typed, ctype, raw)


Reader = Callable[[Typed, int], Any]
"""(memory and types, bits) to the number or the pointer that they are."""


def reader_of(types: Types, ctype: CType) -> Reader | None:
    """Return what reads a type's bits, of which those above its own are ignored.

    None where it is no number and no pointer, or has no size that is known.
    """
    if ctype.kind not in NUMBERS or ctype.size == 0:
        return None
    if ctype.kind is TypeKind.POINTER:
        made, target = _pointer_class(types, ctype.target), ctype.target
        return lambda typed, raw: made(typed, target, raw & U64)
    return lambda _typed, raw: number(types, ctype, raw)


def from_bits(typed: Typed, ctype: CType, raw: int) -> Any:
    """Return a number or a pointer by its bits; those above its own are ignored."""
    if ctype.kind is TypeKind.POINTER:
        return pointer_to(typed, ctype.target, raw & U64)
    check_number(typed.types, ctype)
    return number(typed.types, ctype, raw)


def store(typed: Typed, type_: int, address: int, value: int) -> None:
    """Write a number.

    Raises:
        MemoryFault: there is no memory, or none that the guest may write.
        OverflowError: it does not fit.
        UnknownTypeError: the type is not a number.
    """
    ctype = typed.types.describe(type_)
    check_number(typed.types, ctype)
    typed.memory.write(address, pattern(value, 8 * ctype.size).to_bytes(ctype.size, "little"))


def pointer_to(typed: Typed, target: int, address: int) -> Pointer:
    """Return a pointer to a type."""
    return _pointer_class(typed.types, target)(typed, target, address)


def _pointer_class(types: Types, target: int) -> type[Pointer]:
    ctype = types.describe(target)
    return TextPointer if ctype.kind is TypeKind.VOID or _is_text(ctype) else Pointer


def _is_text(ctype: CType) -> bool:
    return ctype.kind is TypeKind.INT and ctype.size == 1


def _size(types: Types, type_: int) -> int:
    size = types.describe(type_).size
    if size == 0:
        raise UnknownTypeError(f"{types.type_name(type_)} has no size that is known")
    return size


def _pointer_type(target: str) -> str:
    return f"{target}*" if target.endswith("*") else f"{target} *"


def _pointee(pointer: Pointer, name: str) -> Struct:
    typed, target = pointer.typed_, pointer.target_
    if typed.types.describe(target).kind is not TypeKind.AGGREGATE:
        raise AttributeError(f"{pointer.type_} points to nothing with members, such as {name}")
    return Struct(typed, target, pointer.address_)


def _place(struct: Struct, name: str) -> MemberPlace:
    types = struct.typed_.types
    place = types.member(struct.number_, name)
    if place is None:
        near = difflib.get_close_matches(name, types.member_names(struct.number_), _NEAR)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise AttributeError(f"{struct.type_} has no member {name}{hint}")
    return place


def _load_member(struct: Struct, place: MemberPlace) -> Any:
    typed, bit_size = struct.typed_, place.bit_size
    addr = struct.address_ + place.bit_offset // 8 & U64
    if not bit_size:
        return load(typed, place.number, addr)
    shift = place.bit_offset % 8
    raw = int.from_bytes(typed.memory.read(addr, (shift + bit_size + 7) // 8), "little")
    return bit_field(typed.types, typed.types.describe(place.number), raw >> shift, bit_size)


def _store_member(struct: Struct, place: MemberPlace, value: int) -> None:
    typed, bit_size = struct.typed_, place.bit_size
    addr = struct.address_ + place.bit_offset // 8 & U64
    if not bit_size:
        store(typed, place.number, addr, value)
        return
    shift = place.bit_offset % 8
    size = (shift + bit_size + 7) // 8
    mask = (1 << bit_size) - 1 << shift
    old = int.from_bytes(typed.memory.read(addr, size), "little")
    new = old & ~mask | pattern(value, bit_size) << shift
    typed.memory.write(addr, new.to_bytes(size, "little"))
