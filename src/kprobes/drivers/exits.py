"""Which of a kernel's functions can be probed at every return, as its text is now."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kprobes.arch.facts import PatchFacts
from kprobes.drivers.instructions import CompiledText, Text
from kprobes.errors import MemoryFault, RefusedError, TargetError
from kprobes.image.function_text import read_function
from kprobes.model.exits import Exits
from kprobes.model.kernel import Kernel
from kprobes.model.symbol import Symbol, Symbols, place_of
from kprobes.units import Addr

_DEEPEST = 8
"""Calls that are followed to find out that one never returns."""
_NO_FUNCTIONS = ("__pfx_", "__cfi_")
_COLD = ".cold"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Classified:
    """A function and its ways out.

    Attributes:
        symbols: of its kernel.
    """

    symbol: Symbol
    exits: Exits
    symbols: Symbols

    def place(self, addr: Addr) -> str:
        """Return an address, in the function or elsewhere, as the kernel prints it."""
        return place_of(self.symbols, addr)


class Prover:
    """Finds ways out of functions by the text at one time; each function is read once."""

    def __init__(self, text: Text, facts: PatchFacts) -> None:
        self._text = text
        self._facts = facts
        compiled = CompiledText(text, facts)
        self._memory = compiled.memory
        self._tables = compiled.tables
        self._known: dict[Addr, Exits] = {}

    def classify(self, function: Symbol) -> Classified:
        """Return a function with its ways out, or why they are not known."""
        symbols = self._text.kernel.symbols
        exits = self._exits(function.addr, _DEEPEST)
        return Classified(symbol=function, exits=exits, symbols=symbols)

    def _exits(self, addr: Addr, deepest: int) -> Exits:
        if addr not in self._known:
            self._known[addr] = self._prove(addr, deepest)
        return self._known[addr]

    def _prove(self, addr: Addr, deepest: int) -> Exits:
        try:
            name, parts = read_function(self._memory, self._text.kernel, addr)
        except (RefusedError, MemoryFault) as error:
            return Exits(entry=addr, refusal=f"its text is not known: {error}")
        found = self._facts.exits(name, parts, self._tables)
        while deepest and (callee := self._ended_by(found, deepest - 1)) is not None:
            known = self._tables.no_return | {callee}
            self._tables = replace(self._tables, no_return=known)
            found = self._facts.exits(name, parts, self._tables)
        return found

    def _ended_by(self, found: Exits, deepest: int) -> Addr | None:
        # What is known of functions that no list names: those that static ones call when it is
        # too late.
        callee = found.why_not.callee if found.why_not is not None else None
        if callee is None or callee in self._tables.no_return:
            return None
        return callee if self._exits(callee, deepest).is_endless else None


def classified(text: Text, facts: PatchFacts, *, pattern: str) -> Iterator[Classified]:
    """Yield the functions that match a shell pattern, by address, each with its ways out.

    Args:
        text: of the kernel.
        facts: of its architecture.
        pattern: a name or a shell pattern.

    Raises:
        TargetError: nothing matches.
    """
    prover = Prover(text, facts)
    functions = _functions(text.kernel, pattern)
    if not functions:
        raise TargetError(f"no function matches {pattern!r} in {text.kernel.release}")
    for symbol in functions:
        yield prover.classify(symbol)


def _functions(kernel: Kernel, pattern: str) -> list[Symbol]:
    by_addr = dict[Addr, Symbol]()
    for symbol in kernel.symbols.glob(pattern):
        if not _is_function(kernel, symbol):
            continue
        # Of several names the one that the kernel prints, if it was asked for.
        if symbol.addr not in by_addr or symbol == kernel.symbols.at(symbol.addr):
            by_addr[symbol.addr] = symbol
    return [by_addr[addr] for addr in sorted(by_addr)]


def _is_function(kernel: Kernel, symbol: Symbol) -> bool:
    if not symbol.is_text or not symbol.size or _COLD in symbol.name:
        return False
    is_there = bool(symbol.module) or kernel.text[0] <= symbol.addr < kernel.text[1]
    return is_there and not symbol.name.startswith(_NO_FUNCTIONS)
