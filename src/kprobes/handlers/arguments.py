"""A function's arguments by name when it is entered: registers and stack to typed values.

Where a probe with handlers is, and what its function's types say.

What a function returns, as its types say.
"""

from collections.abc import Iterator, Mapping
from operator import index
from typing import Any, SupportsIndex

import msgspec
from msgspec.structs import replace

from kprobes.arch.arch import Arch, Passed, ReturnOps
from kprobes.errors import MemoryFault, RefusedError, UnknownTypeError, UsageError
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.memory import MAX_STRING, check_number, pattern
from kprobes.handlers.values import (
    DataMemory,
    Reader,
    Struct,
    Typed,
    from_bits,
    load,
    reader_of,
    store,
)
from kprobes.model.kernel import CType, Prototype, Symbol, TypeKind, Types
from kprobes.units import U64, Addr

_PASSED = 1 << 62
"""Where a struct that lies in registers appears to be: no memory is at such addresses."""


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a function, and where its argument is.

    Attributes:
        number: of its type.
        ctype: its type.
        passed: where it is.
        reader: of a number or a pointer that is in one register; else None.
    """

    number: int
    ctype: CType
    passed: Passed
    reader: Reader | None = None


def arguments_of(prototype: Prototype, types: Types, arch: Arch) -> Mapping[str, Argument]:
    """Return a function's arguments by name, in their order; what ``...`` takes is left out."""
    named = [each for each in prototype.parameters if each.name or each.number]
    ctypes = [types.describe(each.number) for each in named]
    passed = arch.passed([ctype.size for ctype in ctypes])
    return {
        each.name or f"arg{n}": Argument(
            number=each.number,
            ctype=ctype,
            passed=place,
            reader=reader_of(types, ctype) if _is_register(place) else None,
        )
        for n, (each, ctype, place) in enumerate(zip(named, ctypes, passed, strict=True), 1)
    }


def _is_register(passed: Passed) -> bool:
    return len(passed.registers) == 1 and not passed.is_address


def declaration(prototype: Prototype) -> str:
    """Return a prototype as C writes it."""
    inside = ", ".join(_declared(each.type, each.name) for each in prototype.parameters)
    return f"{_declared(prototype.returns, prototype.name)}({inside or 'void'})"


class Arguments:
    """Arguments by name: ``args.filename``, also ``args["filename"]``. Assigning changes them.

    Attributes:
        arguments_: what there is.
        registers_: of the function when it was entered.
        typed_: memory and types.
    """

    __slots__ = ("arguments_", "registers_", "typed_")
    arguments_: Mapping[str, Argument]
    registers_: dict[str, int]
    typed_: Typed

    def __init__(
        self, arguments: Mapping[str, Argument], registers: dict[str, int], typed: Typed
    ) -> None:
        """Read and write ``registers``."""
        object.__setattr__(self, "arguments_", arguments)
        object.__setattr__(self, "registers_", registers)
        object.__setattr__(self, "typed_", typed)

    def __getattr__(self, name: str) -> Any:
        if name not in self.arguments_:
            raise AttributeError(self._unknown(name))
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.arguments_:
            raise AttributeError(self._unknown(name))
        self[name] = value

    def __getitem__(self, name: str) -> Any:
        argument = self._argument(name)
        if argument.reader is not None:
            return argument.reader(self.typed_, self.registers_[argument.passed.registers[0]])
        place = self._place(argument.passed)
        if place is not None:
            return load(self.typed_, argument.number, place)
        raw = self._raw(argument.passed)
        if argument.ctype.kind is TypeKind.AGGREGATE:
            return _struct(argument, raw, self.typed_)
        return from_bits(self.typed_, argument.ctype, raw)

    def __setitem__(self, name: str, value: Any) -> None:
        argument, number = self._argument(name), index(value)
        check_number(self.typed_.types, argument.ctype)
        place = self._place(argument.passed)
        if place is not None:
            store(self.typed_, argument.number, place, number)
            return
        pattern(number, 8 * argument.ctype.size)
        for word, register in enumerate(argument.passed.registers):
            self.registers_[register] = number >> 64 * word & U64

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments_)

    def __len__(self) -> int:
        return len(self.arguments_)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.arguments_]

    def __repr__(self) -> str:
        return ", ".join(f"{name}={self[name]!r}" for name in self)

    def _argument(self, name: str) -> Argument:
        found = self.arguments_.get(name)
        if found is None:
            raise KeyError(self._unknown(name))
        return found

    def _unknown(self, name: str) -> str:
        return f"no argument {name}; there are {', '.join(self.arguments_) or 'none'}"

    def _place(self, passed: Passed) -> int | None:
        # Where in memory it is, or None when it is in registers.
        place = None if passed.stack is None else self.registers_["sp"] + passed.stack
        if not passed.is_address:
            return place
        if place is None:
            return self._raw(passed)
        return int.from_bytes(self.typed_.memory.read(place, 8), "little")

    def _raw(self, passed: Passed) -> int:
        if len(passed.registers) == 1:
            return self.registers_[passed.registers[0]]
        words = [self.registers_[name] for name in passed.registers]
        return sum(word << 64 * n for n, word in enumerate(words))


def find_prototype(types: Types, name: str) -> Prototype:
    """Return a function's prototype.

    Raises:
        UsageError: the types have none.
    """
    prototype = types.function(name)
    if prototype is None:
        raise UsageError(f"this kernel's types do not say what arguments {name} has")
    return prototype


def _declared(type_: str, name: str) -> str:
    if "(*" in type_:
        # A function pointer has its name inside.
        return type_.replace("(*", f"(*{name}", 1)
    return f"{type_}{name}" if type_.endswith("*") or not name else f"{type_} {name}"


def _struct(argument: Argument, raw: int, typed: Typed) -> Struct:
    data = raw.to_bytes(8 * len(argument.passed.registers), "little")
    memory = _PassedMemory(data, typed.memory)
    there = replace(typed, memory=memory)
    return Struct(there, argument.number, _PASSED)


class _PassedMemory:
    # A struct's bytes from registers, and after them all other memory: for what it points to.
    def __init__(self, data: bytes, others: DataMemory) -> None:
        self._data = data
        self._others = others

    def read(self, addr: int, size: int) -> bytes:
        at = addr - _PASSED
        if 0 <= at <= len(self._data) - size:
            return self._data[at : at + size]
        return self._others.read(addr, size)

    def string(self, addr: int, max_size: int = MAX_STRING) -> str:
        return self._others.string(addr, max_size)

    def write(self, addr: int, data: bytes) -> None:
        if addr >= _PASSED and addr < _PASSED + len(self._data):
            raise MemoryFault(addr, len(data), "a struct in registers; change those", verb="write")
        self._others.write(addr, data)


class HandlerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One address that has handlers.

    Attributes:
        addr: of the instruction.
        function: that it is in.
        is_entry: whether the function's arguments are still where its caller put them.
        following: the address after the instruction where that is all it does, as at an ftrace
            site; else None.
    """

    addr: Addr
    function: Symbol
    is_entry: bool
    following: Addr | None

    @property
    def module(self) -> str:
        """Whose code it is, or ""."""
        return self.function.module

    def constants(self, arch: Arch) -> Mapping[str, int]:
        """Return the registers whose value is known here, as the kernel's own probes have it."""
        return arch.patch.constants if self.following is None else arch.constants

    def check_entry(self) -> None:
        """Check that this is a function's entry, as a probe of its returns must be.

        Raises:
            RefusedError: it is not.
        """
        if not self.is_entry:
            where = self.function.place(self.addr)
            raise RefusedError(
                f"{where} is not where {self.function.name} is entered: returns are probed there"
            )

    def prototype(self, live: LiveKernel) -> Prototype:
        """Return the function's prototype.

        Raises:
            UsageError: it is not known, or this is not the function's entry.
        """
        if not self.is_entry:
            raise UsageError(
                f"{self.function.place(self.addr)} is not where {self.function.name} is entered: "
                "arguments are known only there"
            )
        return find_prototype(self._types(live), self.function.name)

    def known_prototype(self, live: LiveKernel) -> Prototype | None:
        """Return the function's prototype, or None where no types tell."""
        types = live.guest.kernel.types_for(self.module)
        return types.function(self.function.name) if types is not None else None

    def arguments(self, live: LiveKernel) -> Mapping[str, Argument]:
        """Return the function's arguments by name; errors as for ``prototype``."""
        prototype = self.prototype(live)
        return arguments_of(prototype, self._types(live), live.guest.arch)

    def _types(self, live: LiveKernel) -> Types:
        return live.types_for(self.module)


class EntryArguments:
    """The arguments of a function that is entered, looked up once for each set of types it has."""

    def __init__(self, place: HandlerPlace, live: LiveKernel) -> None:
        """Look up nothing yet."""
        self._place, self._live = place, live
        self._types: Types | None = None
        self._found: Mapping[str, Argument] = {}

    def __call__(self) -> Mapping[str, Argument]:
        """Return them by name; errors as for ``HandlerPlace.prototype``."""
        # A module that was loaded again has types of its own.
        types = self._live.guest.kernel.types_for(self._place.module)
        if types is None or types is not self._types:
            self._found = self._place.arguments(self._live)
            self._types = types
        return self._found


RETVAL = "retval"
_WORD = 8


def load_returned(
    info: ReturnOps, prototype: Prototype, registers: Mapping[str, int], typed: Typed
) -> Any:
    """Return the value that a function returns; None for nothing.

    Args:
        info: of the architecture.
        prototype: of the function.
        registers: when it returns.
        typed: memory and types.
    """
    if prototype.returned == 0:
        return None
    ctype = typed.types.describe(prototype.returned)
    if ctype.kind is TypeKind.AGGREGATE and ctype.size > _WORD * len(info.registers):
        # Its caller made room, and gets that back.
        return load(typed, prototype.returned, registers[info.value])
    return _place(info, prototype, dict(registers), typed)[RETVAL]


def store_returned(
    info: ReturnOps,
    prototype: Prototype,
    value: SupportsIndex,
    registers: dict[str, int],
    typed: Typed,
) -> None:
    """Have a function return a number.

    Raises:
        OverflowError: it does not fit.
        UnknownTypeError: the function returns no number.
    """
    if prototype.returned == 0:
        raise UnknownTypeError(f"{prototype.name} returns nothing")
    _place(info, prototype, registers, typed)[RETVAL] = index(value)


def _place(
    info: ReturnOps, prototype: Prototype, registers: dict[str, int], typed: Typed
) -> Arguments:
    ctype = typed.types.describe(prototype.returned)
    words = max(1, -(-ctype.size // _WORD))
    argument = Argument(
        number=prototype.returned,
        ctype=ctype,
        passed=Passed(registers=info.registers[:words]),
    )
    return Arguments({RETVAL: argument}, registers, typed)
