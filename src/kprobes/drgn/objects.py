"""Functions, variables, constants and symbols for drgn.

BTF tells the types of functions, of enumerators, and of variables that each CPU has its own of. Of
others it has only the names, in the kernel's symbols: those that drgn's helpers ask for are
declared here, as the kernel's sources have them. pahole could write their types (since 1.28); no
distribution lets it.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

from drgn import (
    FindObjectFlags,
    Object,
    Program,
    Symbol,
    SymbolBinding,
    SymbolKind,
    Type,
    sizeof,
)

from kprobes.drgn.types import TypeFinder
from kprobes.drgn.variables import VARIABLES
from kprobes.formats.btf_index import Kind
from kprobes.model import kernel
from kprobes.model.kernel import Symbols

FindSymbol = Callable[[str], kernel.Symbol | None]
IsCode = Callable[[int], bool]
_PER_CPU = "vm_event_states"
"""A variable of each CPU's that is exported, so that its address is known in every kernel."""


class ObjectFinder:
    """Objects by name: drgn's interface for finders.

    Args:
        types: of the program.
        find: returns the kernel's first symbol of a name, or None.
        is_code: whether the kernel has code at an address: what kind of symbol is there says 7.x
            wrongly of data that is exported.
    """

    def __init__(self, types: TypeFinder, find: FindSymbol, is_code: IsCode) -> None:
        self._types = types
        self._find = find
        self._is_code = is_code

    def __call__(
        self, prog: Program, name: str, flags: FindObjectFlags, filename: str | None
    ) -> Object | None:
        """Return the first object of a name that is of one of some kinds, or None."""
        found = None
        if filename:
            return found
        if flags & FindObjectFlags.FUNCTION:
            found = self._function(prog, name)
        if found is None and flags & FindObjectFlags.VARIABLE:
            found = self._per_cpu(prog, name)
            found = self._variable(prog, name) if found is None else found
        if found is None and flags & FindObjectFlags.CONSTANT:
            found = self._constant(prog, name)
        return found

    def _function(self, prog: Program, name: str) -> Object | None:
        symbol = self._find(name)
        if symbol is None or not self._is_code(symbol.addr):
            return None
        number = next(iter(self._types.btf.numbers(name, Kind.FUNC)), None)
        if number is None:
            # BTF has none of those that compilers made copies of, or that boot frees.
            type_ = prog.function_type(prog.void_type(), (), True)
        else:
            type_ = self._types.type(number)
        return Object(prog, type_, address=symbol.addr)

    def _per_cpu(self, prog: Program, name: str) -> Object | None:
        number = next(iter(self._types.btf.numbers(name, Kind.VAR)), None)
        if number is None:
            return None
        symbol = self._find(name)
        addr = self._per_cpu_address(number) if symbol is None else symbol.addr
        return None if addr is None else Object(prog, self._types.type(number), address=addr)

    def _per_cpu_address(self, number: int) -> int | None:
        known = next(iter(self._types.btf.numbers(_PER_CPU, Kind.VAR)), None)
        symbol = self._find(_PER_CPU)
        if known is None or symbol is None:
            return None
        places = self._types.btf.places_in_sections()
        return symbol.addr + places[number] - places[known]

    def _variable(self, prog: Program, name: str) -> Object | None:
        symbol = self._find(name) if name in self._declared else None
        if symbol is None:
            return None
        for text, length in self._declared[name]:
            type_ = self._declared_type(prog, text, length, symbol.size)
            if type_ is not None:
                return Object(prog, type_, address=symbol.addr)
        return None

    def _constant(self, prog: Program, name: str) -> Object | None:
        found = self._types.btf.find_enumerator(name)
        return None if found is None else Object(prog, self._types.type(found[0]), found[1])

    @cached_property
    def _declared(self) -> dict[str, list[tuple[str, str | None]]]:
        # By name: its types and, of arrays, lengths.
        found = dict[str, list[tuple[str, str | None]]]()
        for line in filter(None, VARIABLES.splitlines()):
            type_, _, name = line.rstrip(";").rpartition(" ")
            stars = len(name) - len(name.lstrip("*"))
            name, bracket, length = name[stars:].rstrip("]").partition("[")
            text = f"{type_} {'*' * stars}".rstrip()
            found.setdefault(name, []).append((text, length if bracket else None))
        return found

    def _declared_type(
        self, prog: Program, text: str, length: str | None, size: int
    ) -> Type | None:
        if text.startswith("struct {"):
            return self._types.nameless(text[len("struct {") : -1].split())
        try:
            type_ = prog.type(text)
            if length is None:
                return type_
            count = self._length(length)
        except LookupError:
            return None
        return prog.array_type(type_, size // sizeof(type_) if count is None else count)

    def _length(self, text: str) -> int | None:
        # None if only the symbol tells.
        if not text or text.isdecimal():
            return int(text) if text else None
        found = self._types.btf.find_enumerator(text)
        if found is None:
            raise LookupError(text)
        return found[1]


class SymbolFinder:
    """Symbols by name and address: drgn's interface for finders."""

    def __init__(self, symbols: Callable[[], Symbols], is_code: IsCode) -> None:
        self._symbols = symbols
        self._is_code = is_code

    def __call__(
        self, prog: Program, name: str | None, address: int | None, one: bool
    ) -> Sequence[Symbol]:
        """Return those of a name, of an address, or of both; at most one if that is wanted."""
        del prog
        symbols = self._symbols()
        if address is not None:
            at = symbols.at(address)
            found = [at] if at is not None and name in (None, at.name) else []
        else:
            found = symbols.glob("*") if name is None else symbols.all_named(name)
        return [self._symbol(each) for each in found[: 1 if one else None]]

    def _symbol(self, found: kernel.Symbol) -> Symbol:
        is_global = found.type.isupper()
        return Symbol(
            name=found.name,
            address=found.addr,
            size=found.size,
            binding=SymbolBinding.GLOBAL if is_global else SymbolBinding.LOCAL,
            kind=SymbolKind.FUNC if self._is_code(found.addr) else SymbolKind.OBJECT,
        )
