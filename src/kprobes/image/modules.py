"""The symbols of loaded modules, walked in a running kernel's memory by its own types.

    LIST_HEAD(modules);                 // a ring through module.list
    struct kernel_symbol { int value_offset, name_offset, ...; };    // each counts from itself

The guest may run while its list is walked, and may be hostile: a module that does not read is
left out, and a ring that does not close ends somewhere.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.formats.kallsyms import SymbolTable
from kprobes.image.module_layout import Field, ModuleLayout, layout_of
from kprobes.image.symbols import ModuleSymbols
from kprobes.model.types import Types
from kprobes.ports import Memory
from kprobes.units import U64

_MAX_MODULES = 4096
_MAX_SYMBOLS = 1 << 20
_MAX_STRINGS = 1 << 26
_MAX_NAME = 512
_MAX_EXPORTS = 1 << 16
_MAX_TOTAL = 1 << 22
_UNFORMED = 3
_PAGE = 4096

# Elf64_Sym
_Sym = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("shndx", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)
_UPPER, _LOWER = bytes(range(256)).upper(), bytes(range(256)).lower()


def read_modules(
    memory: Memory, head: int | None, types: Types | None
) -> tuple[ModuleSymbols, ...]:
    """Return the symbols of every loaded module, in the order of the kernel's list.

    Args:
        memory: the running kernel's.
        head: where its symbol ``modules`` is; without it, or without types, there are none.
        types: the kernel's.
    """
    if types is None or head is None:
        return ()
    try:
        layout = layout_of(types)
    except (UnknownTypeError, FormatError):
        return ()
    return tuple(_bounded(_walk(memory, layout, head)))


def list_modules(memory: Memory, head: int | None, types: Types | None) -> list[tuple[int, str]]:
    """Return where the ``struct module`` of every module is that ``read_modules`` would read.

    With each its name: memory of one may serve another later.
    """
    if types is None or head is None:
        return []
    try:
        layout = layout_of(types)
    except (UnknownTypeError, FormatError):
        return []
    found: list[tuple[int, str]] = []
    for record in _records(memory, layout, head):
        try:
            data = memory.read(record, layout.size)
        except MemoryFault:
            continue
        if layout.state.of(data) != _UNFORMED:
            found.append((record, _module_name(layout, data)))
    return found


def _bounded(modules: Iterator[ModuleSymbols]) -> Iterator[ModuleSymbols]:
    left = _MAX_TOTAL
    for module in modules:
        left -= len(module.table.addrs)
        if left < 0:
            return
        yield module


def _walk(memory: Memory, layout: ModuleLayout, head: int) -> Iterator[ModuleSymbols]:
    for record in _records(memory, layout, head):
        found = _module(memory, layout, record)
        if found is not None:
            yield found


def _records(memory: Memory, layout: ModuleLayout, head: int) -> Iterator[int]:
    seen, at = {head}, _pointer(memory, head)
    while at not in seen and at and len(seen) <= _MAX_MODULES:
        seen.add(at)
        yield at - layout.next.offset
        at = _pointer(memory, at)


def _pointer(memory: Memory, addr: int) -> int:
    try:
        return int.from_bytes(memory.read(addr, 8), "little")
    except MemoryFault:
        return 0


def _module(memory: Memory, layout: ModuleLayout, base: int) -> ModuleSymbols | None:
    try:
        data = memory.read(base, layout.size)
        if layout.state.of(data) == _UNFORMED:
            return None
        table = _table(memory, layout, layout.kallsyms.of(data))
        exported = set(_exported(memory, layout, data))
    except MemoryFault:
        return None
    return ModuleSymbols(
        name=_module_name(layout, data),
        table=_with_exported(table, exported),
        ranges=tuple(_ranges(layout.ranges, data)),
        fleeting=tuple(_ranges(layout.fleeting, data)),
        record=base,
    )


def _module_name(layout: ModuleLayout, data: bytes) -> str:
    name = data[layout.name.offset :][: layout.name.size].split(b"\0")[0]
    return name.decode(errors="backslashreplace")


def _ranges(pieces: Sequence[tuple[Field, Field]], data: bytes) -> Iterator[tuple[int, int]]:
    for base, size in pieces:
        start, length = base.of(data), size.of(data)
        if length and start + length <= U64:
            yield start, start + length


def _table(memory: Memory, layout: ModuleLayout, addr: int) -> SymbolTable:
    data = memory.read(addr, layout.table_size)
    symtab, count, strtab, typetab = (field.of(data) for field in layout.table)
    n = min(count, _MAX_SYMBOLS)
    syms = np.frombuffer(memory.read(symtab, n * _Sym.itemsize), _Sym)
    types = np.frombuffer(memory.read(typetab, n), np.uint8)
    last = int(syms["name"].max(initial=0))
    return _named(syms, types, _read_up_to(memory, strtab, min(last + _MAX_NAME, _MAX_STRINGS)))


def _read_up_to(memory: Memory, addr: int, size: int) -> bytes:
    # As much as is mapped: where strings end is not known, and a page ends somewhere.
    pieces, stop = list[bytes](), addr + size
    while addr < stop:
        length = min(stop - addr, _PAGE - addr % _PAGE)
        try:
            pieces.append(memory.read(addr, length))
        except MemoryFault:
            break
        addr += length
    return b"".join(pieces)


def _named(syms: NDArray[np.void], types: NDArray[np.uint8], strings: bytes) -> SymbolTable:
    # Undefined and nameless entries are no symbols.
    names = [_name_at(strings, at) for at in syms["name"].tolist()]
    kept = [i for i, name in enumerate(names) if name and syms["shndx"][i]]
    values = syms["value"][kept].astype(np.uint64)
    return table_of([names[i] for i in kept], values, types[kept].tobytes())


def _name_at(strings: bytes, at: int) -> bytes:
    stop = strings.find(b"\0", at, at + _MAX_NAME)
    return strings[at:stop] if stop > at else b""


def table_of(names: Sequence[bytes], addrs: NDArray[np.uint64], types: bytes) -> SymbolTable:
    """Return names, addresses and types as a table."""
    sizes = np.array([len(name) + 1 for name in names], np.int64)
    starts = (np.cumsum(sizes) - sizes + 1).astype(np.uint32)
    blob = b"\0" + b"".join(name + b"\0" for name in names)
    return SymbolTable(addrs=addrs, types=types, blob=blob, starts=starts)


def _exported(memory: Memory, layout: ModuleLayout, data: bytes) -> Iterator[tuple[int, bytes]]:
    # (value, name) of every exported symbol.
    size = layout.export_size
    for array, count in layout.exports:
        at, n = array.of(data), min(count.of(data), _MAX_EXPORTS)
        if not n or size < 8 or size % 4:
            continue
        offsets = np.frombuffer(memory.read(at, n * size), "<i4").reshape(n, -1)[:, :2].tolist()
        places = range(at, at + n * size, size)
        pairs = list(zip(places, offsets, strict=True))
        values = [place + value & U64 for place, (value, _) in pairs]
        names = [place + 4 + name & U64 for place, (_, name) in pairs]
        yield from zip(values, _strings(memory, names), strict=True)


def _strings(memory: Memory, addrs: Sequence[int]) -> list[bytes]:
    # They lie side by side in one section: one read for all of them.
    start = min(addrs)
    size = min(max(addrs) - start + _MAX_NAME, _MAX_STRINGS)
    data = _read_up_to(memory, start, size)
    return [_name_at(data, addr - start) for addr in addrs]


def _with_exported(table: SymbolTable, exported: set[tuple[int, bytes]]) -> SymbolTable:
    # /proc/kallsyms shows an exported symbol's type as a capital, and no other's.
    names = table.blob[1:-1].split(b"\0")
    types = bytes(
        (_UPPER if (addr, name) in exported else _LOWER)[kind]
        for addr, name, kind in zip(table.addrs.tolist(), names, table.types, strict=False)
    )
    return SymbolTable(addrs=table.addrs, types=types, blob=table.blob, starts=table.starts)
