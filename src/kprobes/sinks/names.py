"""Numbers that stand for names: addresses for symbols, numbers for enumerators."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kprobes.model.layout import Field
from kprobes.sinks.origin import Origin

_REMEMBERED = 1 << 14
_TAKEN_OVER = b"[unknown/kretprobe'd]"

Name = Callable[[int], bytes]
"""A number to what is shown in its place."""

EnumName = Callable[[int], bytes | None]
"""A number to its enumerator, or None for one that has none, such as several bits at once."""


class Names:
    """How the fields of a run are named; what was looked up is remembered."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._symbols = _Symbols(origin.symbol_at)
        self._callers = _Symbols(origin.symbol_at)

    @property
    def has_wide_numbers(self) -> bool:
        """Whether numbers of 64 bits are numbers in JSON, too."""
        return self._origin.has_wide_numbers

    def symbol(self, addr: int) -> bytes:
        """Return what the kernel's ``%pS`` prints for an address."""
        if len(self._symbols) > _REMEMBERED:
            self._symbols.clear()
        return self._symbols[addr]

    def callers(self, addrs: NDArray[np.uint64]) -> list[bytes]:
        """Return what the kernel prints for return addresses: seq_print_ip_sym()."""
        known = self._callers
        if len(known) > _REMEMBERED:
            known.clear()
        known[0] = b"0"
        if self._origin.trampoline is not None:
            known[self._origin.trampoline] = _TAKEN_OVER
        return list(map(known.__getitem__, addrs.tolist()))

    def enumerator_of(self, field: Field) -> EnumName | None:
        """Return how the numbers of an enum are named, or None when they are to be numbers."""
        if not self._origin.has_enum_names or not field.enumerators:
            return None
        bits = 8 * field.size
        # By pattern: an enum of unsigned numbers is fetched as a signed one. The first of
        # several names of one number counts.
        names = {
            value & (1 << bits) - 1: name.encode(errors="surrogateescape")
            for value, name in reversed(field.enumerators)
        }
        return lambda number: names.get(number & (1 << bits) - 1)


class _Symbols(dict[int, bytes]):
    def __init__(self, symbol_at: Callable[[int], str]) -> None:
        super().__init__()
        self._symbol_at = symbol_at

    def __missing__(self, addr: int) -> bytes:
        text = self[addr] = self._symbol_at(addr).encode(errors="surrogateescape")
        return text
