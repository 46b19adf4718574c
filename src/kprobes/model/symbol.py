"""A named address of a kernel."""

from dataclasses import dataclass
from typing import Protocol

from kprobes.units import Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """One kallsyms entry.

    Attributes:
        addr: where it is in the running kernel.
        name: without module.
        type: nm's letter: ``t`` and ``T`` are text.
        size: bytes up to the next symbol of another address, as kallsyms counts it.
        module: the owner, or "" for the kernel itself.
    """

    addr: Addr
    name: str
    type: str
    size: int
    module: str = ""

    @property
    def is_text(self) -> bool:
        """Whether this is code."""
        return self.type in "tTwW"

    def place(self, addr: int) -> str:
        """Return an address inside it as the kernel prints it: ``sym+0x1/0x40 [module]``."""
        module = f" [{self.module}]" if self.module else ""
        return f"{self.name}+{addr - self.addr:#x}/{self.size:#x}{module}"


class Symbols(Protocol):
    """All names of one kernel, its loaded modules included."""

    def __len__(self) -> int:
        """Return how many names there are."""
        ...

    def named(self, name: str) -> Symbol:
        """Return the one symbol of this name.

        Raises:
            UnknownSymbolError: there is none; carries near names.
            AmbiguousSymbolError: there are several at different addresses.
        """
        ...

    def find(self, name: str) -> Symbol | None:
        """Return the first symbol of this name, or None."""
        ...

    def all_named(self, name: str) -> tuple[Symbol, ...]:
        """Return every symbol of this name."""
        ...

    def at(self, addr: int) -> Symbol | None:
        """Return the symbol that kallsyms prints for an address inside it, or None.

        Among aliases at one address it is the kernel's own choice: the one that
        kallsyms_lookup finds in the running kernel.
        """
        ...

    def is_fleeting(self, addr: int) -> bool:
        """Whether an address is in memory that a module gives back as soon as it has begun."""
        ...

    def glob(self, pattern: str) -> tuple[Symbol, ...]:
        """Return the symbols whose names match a shell pattern, by address."""
        ...


def place_of(symbols: Symbols, addr: int) -> str:
    """Return how ``%pS`` prints an address: by its symbol, or as a number when it has none."""
    symbol = symbols.at(addr)
    return symbol.place(addr) if symbol is not None else f"{addr:#x}"


def span_of(symbols: Symbols, place: str | int) -> tuple[int, int] | None:
    """Return where a function begins and ends: by its name or an address in it; None if none."""
    found = symbols.find(place) if isinstance(place, str) else symbols.at(place)
    return None if found is None else (found.addr, found.addr + found.size)


def name_of(symbols: Symbols, addr: int) -> str:
    """Return an address as a disassembler names it: ``sym``, ``sym+0x12``, or as a number."""
    symbol = symbols.at(addr)
    if symbol is None:
        return f"{addr:#x}"
    offset = f"+{addr - symbol.addr:#x}" if addr != symbol.addr else ""
    module = f" [{symbol.module}]" if symbol.module else ""
    return f"{symbol.name}{offset}{module}"
