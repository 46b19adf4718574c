"""What loaded modules' own tables say of their text.

    struct module { ...; unsigned int num_exentries; struct exception_table_entry *extable; ...
                    struct jump_entry *jump_entries; unsigned int num_jump_entries; ...
                    struct static_call_site *static_call_sites; int num_static_call_sites; ...
                    void *kprobes_text_start; unsigned int kprobes_text_size; noinstr_text alike };

Their blacklists are in the kernel's own. Memory is hostile: a module whose tables do not read can
carry no probe but at its ftrace sites.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kprobes.arch.registry import machine
from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.image.symbols import Range, SymbolMap
from kprobes.image.table import (
    JUMP_LABELS,
    MAX_SIZE,
    STATIC_CALLS,
    Addrs,
    Table,
    columns,
    exceptions,
    pairs,
)
from kprobes.model.kernel import Kernel
from kprobes.model.text import Forbidden
from kprobes.model.types import Types
from kprobes.ports import Memory
from kprobes.units import Addr

_AREAS = {
    "kprobes_text": "it is the text of the module's own probes",
    "noinstr_text": "it is noinstr text, which runs where nothing may trap",
}
_UNREADABLE = "its module's tables, which say what may not be probed, cannot be read"
_MAX_AREA = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTables:
    """What modules' tables say, as in ``TextTables``."""

    exceptions: dict[int, int]
    jump_labels: dict[int, int]
    static_calls: frozenset[int]
    forbidden: tuple[Forbidden, ...]


def read_module_tables(memory: Memory, kernel: Kernel) -> ModuleTables:
    """Read the tables of all loaded modules; the guest may run."""
    found = list(_tables(memory, kernel))
    return ModuleTables(
        exceptions=dict(pair for each in found for pair in each.exceptions.items()),
        jump_labels=dict(pair for each in found for pair in each.jump_labels.items()),
        static_calls=frozenset(addr for each in found for addr in each.static_calls),
        forbidden=tuple(area for each in found for area in each.forbidden),
    )


def _tables(memory: Memory, kernel: Kernel) -> Iterator[ModuleTables]:
    symbols, types = kernel.symbols, kernel.types
    if types is None or not isinstance(symbols, SymbolMap):
        return
    repaired = exceptions(machine(kernel.arch).text, kernel.version)
    for module in symbols.modules:
        record = _Record(memory, types, module.record)
        for text in module.ranges:
            try:
                yield _tables_of(record, text, repaired)
            except (MemoryFault, FormatError):
                yield _nothing_but(text)


def _tables_of(record: "_Record", text: Range, repaired: Table) -> ModuleTables:
    repairs = record.array(repaired, "extable", "num_exentries", text)
    jump_labels = record.array(JUMP_LABELS, "jump_entries", "num_jump_entries", text)
    calls = record.array(STATIC_CALLS, "static_call_sites", "num_static_call_sites", text)
    return ModuleTables(
        exceptions=pairs(repairs),
        jump_labels=pairs(jump_labels),
        static_calls=frozenset(calls[0].tolist()),
        forbidden=tuple(_areas(record, text)),
    )


def _nothing_but(text: Range) -> ModuleTables:
    area = Forbidden(start=Addr(text[0]), stop=Addr(text[1]), why=_UNREADABLE)
    return ModuleTables(exceptions={}, jump_labels={}, static_calls=frozenset(), forbidden=(area,))


def _areas(record: "_Record", text: Range) -> Iterator[Forbidden]:
    for name, why in _AREAS.items():
        start, size = record.number(f"{name}_start"), record.number(f"{name}_size")
        if 0 < size <= _MAX_AREA and text[0] <= start < text[1]:
            yield Forbidden(start=Addr(start), stop=Addr(start + size), why=why)


class _Record:
    # One struct module; a member that a kernel does not have is zero.
    def __init__(self, memory: Memory, types: Types, addr: int) -> None:
        self._memory = memory
        self._types = types
        self._addr = addr

    def number(self, member: str) -> int:
        try:
            offset = self._types.offset("module", member)
            size = self._types.member_size("module", member)
        except UnknownTypeError:
            return 0
        return int.from_bytes(self._memory.read(self._addr + offset, size), "little")

    def array(self, table: Table, start: str, count: str, text: Range) -> list[Addrs]:
        size = table.entry * self.number(count)
        if size > MAX_SIZE:
            raise FormatError(f"{start} of a module has {size} bytes")
        at = self.number(start)
        return columns(table, self._memory.read(at, size) if size else b"", at, text)
