"""Symbols of a kernel and its modules: an implementation of ``model.kernel.Symbols``.

Nothing is made per symbol until a symbol is asked for: a kernel has some 100,000. A shell pattern
is one regular expression over all their names, which NULs keep apart.
"""

import difflib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import AmbiguousSymbolError, UnknownSymbolError
from kprobes.formats.kallsyms import SymbolTable
from kprobes.formats.strtab import Names
from kprobes.model.kernel import Kernel, Symbol
from kprobes.units import U64, Addr

_ANY = rb"[^\0]"


def to_regex(pattern: str) -> bytes:
    r"""Return the expression for ``*``, ``?``, ``[seq]`` and ``[!seq]``; it matches no NUL.

    What stands between two stars is matched once and never again (atomic groups), as in
    ``fnmatch``: several stars cost no more than one.
    """
    first, *rest = _chunks(pattern)
    if not rest:
        return first
    *middle, last = rest
    between = b"".join(rb"(?>" + _ANY + rb"*?" + chunk + rb")" for chunk in middle)
    return first + between + _ANY + b"*" + last


def _chunks(pattern: str) -> list[bytes]:
    # The expressions between the stars.
    chunks, at = [b""], 0
    while at < len(pattern):
        if pattern[at] == "*":
            chunks.append(b"")
            at += 1
            continue
        chunk, at = _one(pattern, at)
        chunks[-1] += chunk
    return [chunks[0], *(chunk for chunk in chunks[1:-1] if chunk), *chunks[1:][-1:]]


def _one(pattern: str, at: int) -> tuple[bytes, int]:
    # One character's expression, and where the next begins.
    if pattern[at] == "?":
        return _ANY, at + 1
    stop = pattern.find("]", at + 2 + pattern.startswith("[!", at)) if pattern[at] == "[" else -1
    if stop < 0:
        return re.escape(pattern[at].encode()), at + 1
    return _set(pattern[at + 1 : stop]), stop + 1


def _set(inside: str) -> bytes:
    negated = inside.startswith("!")
    body = inside[negated:].encode()
    # A range that runs backwards matches nothing in a shell and is an error in ``re``.
    ranges = re.sub(rb"(.)-(.)", lambda m: m[0] if m[1] <= m[2] else b"", body, flags=re.DOTALL)
    escaped = re.sub(rb"([\\\]\[^&~|])", rb"\\\1", ranges)
    if negated:
        return b"[^\\0" + escaped + b"]"
    return b"[" + escaped + b"]" if escaped else rb"(?!)"


Range = tuple[int, int]
"""Addresses [start, stop)."""

_BORDERS = (
    ((b"_stext", b"_end"),),
    ((b"_stext", b"_etext"), (b"_sinittext", b"_einittext")),
)
_MAPPING = rb"\$[adtx](?:\.[^\0]*)?|\.L[^\0]*"
"""Names that modules have and no address is shown by: is_arm_mapping_symbol() (kernel/module/)."""
_NEAR_CANDIDATES = 1000
_NEAR_SHOWN = 3


class ModuleSymbols(Struct, frozen=True, kw_only=True, eq=False):
    """One loaded module's names.

    Attributes:
        table: in the module's own order; addresses need not ascend.
        ranges: the memory that the module owns.
        fleeting: those of them that it gives back as soon as it has begun.
        record: where its ``struct module`` is; 0 for the kernel itself.
        kernfs_id: of its directory in sysfs, which no other has in this boot; 0 if there is none.
    """

    name: str
    table: SymbolTable
    ranges: tuple[Range, ...]
    fleeting: tuple[Range, ...] = ()
    record: int = 0
    kernfs_id: int = 0


class SymbolMap:
    """The kernel's symbols, then its modules'.

    Args:
        kernel: the kernel's own table, ascending.
        modules: in the order of the kernel's list.
        part: the kernel's own, where another map has made it.
    """

    def __init__(
        self,
        kernel: SymbolTable,
        modules: Sequence[ModuleSymbols] = (),
        *,
        part: "_Part | None" = None,
    ) -> None:
        self.table = kernel
        self.modules = tuple(modules)
        self._kernel = part or _Part(self.owners[:1])
        self._parts = [self._kernel, _Part(self.modules)] if modules else [self._kernel]
        self._found: dict[str, Symbol | None] = {}

    @property
    def owners(self) -> tuple[ModuleSymbols, ...]:
        """The kernel's names, under the name "", and then its modules'."""
        whole = ModuleSymbols(name="", table=self.table, ranges=kernel_ranges(self.table))
        return whole, *self.modules

    def with_modules(self, modules: Sequence[ModuleSymbols]) -> "SymbolMap":
        """Return the same kernel's symbols, and those of other modules."""
        return SymbolMap(self.table, modules, part=self._kernel)

    def __len__(self) -> int:
        """Return how many names there are."""
        return sum(len(part.names) for part in self._parts)

    def named(self, name: str) -> Symbol:
        """Return the one symbol of this name.

        Raises:
            UnknownSymbolError: there is none; carries near names.
            AmbiguousSymbolError: there are several at different addresses.
        """
        found = self.all_named(name)
        if len(found) == 1:
            return found[0]
        if not found:
            raise UnknownSymbolError(name, self._near(name))
        addrs = tuple(dict.fromkeys(symbol.addr for symbol in found))
        if len(addrs) > 1:
            raise AmbiguousSymbolError(name, addrs)
        return found[0]

    def find(self, name: str) -> Symbol | None:
        """Return the first symbol of this name, or None."""
        if name not in self._found:
            # A look-up takes a millisecond, and some names are wanted while a guest stands still.
            self._found[name] = self._find(name)
        return self._found[name]

    def all_named(self, name: str) -> tuple[Symbol, ...]:
        """Return every symbol of this name, the kernel's first."""
        key = name.encode(errors="surrogateescape")
        return tuple([part.symbol(i) for part in self._parts for i in part.names.numbers(key)])

    def is_unique(self, name: str) -> bool:
        """Whether there is one symbol of this name."""
        key = name.encode(errors="surrogateescape")
        return sum(len(part.names.numbers(key)) for part in self._parts) == 1

    def at(self, addr: int) -> Symbol | None:
        """Return the symbol that kallsyms prints for an address inside it, or None.

        As get_symbol_pos() in kernel/kallsyms.c: the last address not above, and of the
        aliases there the first in the table. find_kallsyms_symbol() does the same for modules.
        """
        for part in self._parts:
            if (found := part.at(addr)) is not None:
                return found
        return None

    def is_fleeting(self, addr: int) -> bool:
        """Whether an address is in memory that a module gives back as soon as it has begun."""
        return any(
            start <= addr < stop for module in self.modules for start, stop in module.fleeting
        )

    def glob(self, pattern: str) -> tuple[Symbol, ...]:
        """Return the symbols whose names match a shell pattern, by address."""
        regex = to_regex(pattern)
        found = (symbol for part in self._parts for symbol in part.matching(regex))
        return tuple(sorted(found, key=lambda symbol: symbol.addr))

    def _find(self, name: str) -> Symbol | None:
        key = name.encode(errors="surrogateescape")
        found = ((part, part.names.first(key)) for part in self._parts)
        return next((part.symbol(i) for part, i in found if i is not None), None)

    def _near(self, name: str) -> tuple[str, ...]:
        near = {text: None for part in self._parts for text in part.near(name)}
        return tuple(difflib.get_close_matches(name, near, _NEAR_SHOWN, 0.7))


def loaded_modules(kernel: Kernel) -> tuple[ModuleSymbols, ...]:
    """Return the modules that a kernel has loaded, in the order of its list."""
    return kernel.symbols.modules if isinstance(kernel.symbols, SymbolMap) else ()


def kernel_ranges(table: SymbolTable) -> tuple[Range, ...]:
    """Return the addresses for which the kernel itself shows names.

    As is_ksym_addr() in include/linux/kallsyms.h: _stext to _end, or else, where names of data
    are left out (no KALLSYMS_ALL), its text and init text.
    """
    names = Names(table.blob, table.starts)

    def between(*borders: bytes) -> Range:
        numbers = [names.first(name) for name in borders]
        start, stop = (0 if number is None else int(table.addrs[number]) for number in numbers)
        return start, stop

    for pairs in _BORDERS:
        found = tuple(between(*pair) for pair in pairs)
        if all(start < stop for start, stop in found):
            return found
    high = table.addrs[table.addrs >= np.uint64(1 << 63)]
    return ((int(high[0]), int(high[-1]) + 1) if len(high) else (0, 0),)


class _Part:
    # The kernel, or all modules together: columns in table order, and an order by address.
    def __init__(self, owners: Sequence[ModuleSymbols]) -> None:
        tables = [owner.table for owner in owners]
        self._labels: list[str] = [owner.name for owner in owners]
        self._owner: NDArray[np.intp] = np.repeat(
            np.arange(len(tables)), [len(table.addrs) for table in tables]
        )
        self._types: bytes = b"".join(table.types for table in tables)
        self._addrs = np.concatenate([table.addrs for table in tables])
        self.names = Names(*_joined(tables))
        order: NDArray[np.intp] = np.argsort(self._addrs, kind="stable")
        # The kernel's own table was made without them.
        hidden = self.names.matching(_MAPPING) if any(self._labels) else ()
        self._order = order[~np.isin(order, hidden)]
        self._sorted: NDArray[np.uint64] = self._addrs[self._order]
        self._ranges = sorted(owned for owner in owners for owned in owner.ranges)
        # By number: one that is looked up by its name is looked up by its address next.
        self._symbols: dict[int, Symbol] = {}

    def symbol(self, number: int) -> Symbol:
        found = self._symbols.get(number)
        if found is None:
            addr = self._addrs.data[number]
            found = self._symbols[number] = Symbol(
                addr=Addr(addr),
                name=_text(self.names.name(number)),
                type=chr(self._types[number]),
                size=self._stop(addr) - addr,
                module=self._labels[self._owner.data[number]],
            )
        return found

    def at(self, addr: int) -> Symbol | None:
        owned = self._range_of(addr)
        if owned is None:
            return None
        # Of one address this takes a fifth of searchsorted's time.
        addrs = self._sorted.data
        last = bisect_right(addrs, addr) - 1
        start = addrs[last] if last >= 0 else -1
        if start < owned[0]:
            return None
        return self.symbol(self._order.data[bisect_left(addrs, start)])

    def matching(self, regex: bytes) -> Iterator[Symbol]:
        # As ``symbol``, all at once: one by one 90,000 of them take a second.
        numbers = self.names.matching(regex)
        addrs = self._addrs[numbers]
        names = map(_text, self.names.some(numbers))
        found: list[int] = numbers.tolist()
        stops: list[int] = self._stops(addrs).tolist()
        owners: list[int] = self._owner[numbers].tolist()
        rows = zip(found, names, addrs.tolist(), stops, owners, strict=True)
        for number, name, addr, stop, owner in rows:
            yield Symbol(
                addr=Addr(addr),
                name=name,
                type=chr(self._types[number]),
                size=stop - addr,
                module=self._labels[owner],
            )

    def near(self, name: str) -> list[str]:
        # Names that share a half with the wanted one, those of about its length first.
        key = name.encode(errors="surrogateescape")
        half = max(len(key) // 2, 1)
        shared = [self.names.around(b"\0" + key[:half]), self.names.around(key[-half:] + b"\0")]
        numbers = np.unique(np.concatenate(shared))
        lengths = self.names.lengths(numbers)
        closest = np.argsort(np.abs(lengths - len(key)), kind="stable")[:_NEAR_CANDIDATES]
        return [_text(self.names.name(number)) for number in numbers[closest].tolist()]

    def _stop(self, addr: int) -> int:
        # The next greater address, but not beyond the memory that this one lies in.
        following = bisect_right(self._sorted.data, addr)
        owned = self._range_of(addr)
        if following == len(self._sorted):
            return owned[1] if owned else addr
        stop = self._sorted.data[following]
        return min(stop, owned[1]) if owned else stop

    def _stops(self, addrs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        # What ``_stop`` says of each.
        following = np.searchsorted(self._sorted, addrs, "right")
        stops = np.append(self._sorted, np.uint64(0))[following]
        is_last = following == len(self._sorted)
        stops[is_last] = addrs[is_last]
        for owned in reversed(self._ranges):
            start, stop = (np.uint64(min(edge, U64)) for edge in owned)
            inside = (addrs >= start) & (addrs < stop)
            stops[inside] = np.where(is_last, stop, np.minimum(stops, stop))[inside]
        return stops

    def _range_of(self, addr: int) -> Range | None:
        if not 0 <= addr <= U64:
            return None
        for owned in self._ranges:
            if owned[0] <= addr < owned[1]:
                return owned
        return None


def _joined(tables: Sequence[SymbolTable]) -> tuple[bytes, NDArray[np.uint32]]:
    if len(tables) == 1:
        return tables[0].blob, tables[0].starts
    # Each blob begins with the NUL that the one before ends with.
    sizes = np.array([0] + [len(table.blob) - 1 for table in tables[:-1]])
    shifts = np.cumsum(sizes).astype(np.uint32)
    starts = [table.starts + shift for table, shift in zip(tables, shifts, strict=True)]
    return b"\0" + b"".join(table.blob[1:] for table in tables), np.concatenate(starts)


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
