"""The symbols of loaded modules, walked in a running kernel's memory by its own types.

The guest may run while its list is walked, and may be hostile: a module that does not read is
left out, and a ring that does not close ends somewhere.

LIST_HEAD(modules);             // a ring through module.list
struct kernel_symbol { int value_offset, name_offset, ...; };    // each counts from itself
struct module { enum module_state state; struct list_head list; char name[56]; ...
                const struct kernel_symbol *syms; unsigned int num_syms; ... gpl_syms alike
                struct mod_kallsyms *kallsyms;
                struct module_layout core_layout { void *base; unsigned int size; ... };
                // since v6.4: struct module_memory mem[MOD_MEM_NUM_TYPES] { base, size };
                struct module_kobject mkobj;                     // /sys/module/NAME: mkobj.kobj.sd
struct kernfs_node { ... u64 id; ... };     // no other directory of this boot has the same
struct mod_kallsyms { Elf64_Sym *symtab; unsigned int num_symtab; char *strtab, *typetab; };
"""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.formats.kallsyms import SymbolTable
from kprobes.image.symbols import ModuleSymbols
from kprobes.model.kernel import Types
from kprobes.ports import Memory
from kprobes.units import U64

_MAX_STRUCT = 1 << 16
_MAX_RANGES = 64


class Field(Struct, frozen=True, kw_only=True):
    """A number in a struct's bytes."""

    offset: int
    size: int

    def of(self, data: bytes) -> int:
        """Return its value, unsigned."""
        return int.from_bytes(data[self.offset : self.offset + self.size], "little")


class ModuleLayout(Struct, frozen=True, kw_only=True):
    """The fields of struct module and what it points to.

    Attributes:
        size: of struct module.
        ranges: (base, size) of each piece of memory that a module owns.
        fleeting: those of them that it gives back when it has begun.
        exports: (array, count) of each table of exported symbols.
        export_size: of struct kernel_symbol.
        table_size: of struct mod_kallsyms.
        table: its symtab, num_symtab, strtab and typetab.
        directory: where its directory in sysfs is, and there its id; None without sysfs.
    """

    size: int
    next: Field
    state: Field
    name: Field
    kallsyms: Field
    ranges: tuple[tuple[Field, Field], ...]
    fleeting: tuple[tuple[Field, Field], ...]
    exports: tuple[tuple[Field, Field], ...]
    export_size: int
    table_size: int
    table: tuple[Field, Field, Field, Field]
    directory: tuple[Field, Field] | None


def layout_of(types: Types) -> ModuleLayout:
    """Look a kernel's layout up.

    Raises:
        UnknownTypeError: its types have no modules, or none that could be.
    """

    def field(path: str, struct: str = "module") -> Field:
        return Field(offset=types.offset(struct, path), size=types.member_size(struct, path))

    ranges = tuple(_range_fields(types))[:_MAX_RANGES]
    return ModuleLayout(
        size=_sane(types.size("module")),
        next=field("list.next"),
        state=field("state"),
        name=field("name"),
        kallsyms=field("kallsyms"),
        ranges=ranges,
        fleeting=ranges[_first_fleeting(types) :],
        exports=tuple(_exports(types)),
        export_size=_sane(types.size("kernel_symbol")),
        table_size=_sane(types.size("mod_kallsyms")),
        table=(
            field("symtab", "mod_kallsyms"),
            field("num_symtab", "mod_kallsyms"),
            field("strtab", "mod_kallsyms"),
            field("typetab", "mod_kallsyms"),
        ),
        directory=_directory(types),
    )


def _sane(size: int) -> int:
    if not 0 < size <= _MAX_STRUCT:
        raise UnknownTypeError(f"a struct of {size} bytes")
    return size


def _range_fields(types: Types) -> Iterator[tuple[Field, Field]]:
    struct, places = _memories(types)
    base, base_size = types.offset(struct, "base"), types.member_size(struct, "base")
    size, size_size = types.offset(struct, "size"), types.member_size(struct, "size")
    for at in places:
        yield Field(offset=at + base, size=base_size), Field(offset=at + size, size=size_size)


def _memories(types: Types) -> tuple[str, list[int]]:
    # The struct that describes a piece of memory, and where in struct module each of them is.
    try:
        start, total = types.offset("module", "mem"), types.member_size("module", "mem")
    except UnknownTypeError:
        names = ("core_layout", "init_layout")
        return "module_layout", [types.offset("module", name) for name in names]
    step = _sane(types.size("module_memory"))
    return "module_memory", [start + at for at in range(0, min(total, _MAX_STRUCT), step)]


def _first_fleeting(types: Types) -> int:
    # enum mod_mem_type; before it core_layout came first, and init_layout second.
    try:
        types.offset("module", "mem")
        return types.enumerator("MOD_INIT_TEXT")
    except UnknownTypeError:
        return 1


def _directory(types: Types) -> tuple[Field, Field] | None:
    try:
        place, number = types.offset("module", "mkobj.kobj.sd"), types.offset("kernfs_node", "id")
    except UnknownTypeError:
        return None
    return Field(offset=place, size=8), Field(offset=number, size=8)


def _exports(types: Types) -> Iterator[tuple[Field, Field]]:
    # Since v6.18 or so one table holds both kinds.
    for prefix in ("", "gpl_"):
        try:
            paths = (f"{prefix}syms", f"num_{prefix}syms")
            array, count = (
                Field(offset=types.offset("module", p), size=types.member_size("module", p))
                for p in paths
            )
        except UnknownTypeError:
            continue
        yield array, count


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


ModuleIdentity = tuple[int, str, int]
"""Where a module's ``struct module`` is, its name, and the id of its directory in sysfs or 0.

The memory of one serves another later, or the same one when it is loaded again, maybe built anew.
"""


def list_modules(memory: Memory, head: int | None, types: Types | None) -> list[ModuleIdentity]:
    """Return the identity of every module that ``read_modules`` would read.

    Args:
        memory: of the kernel.
        head: where its list of modules is, or None.
        types: of the kernel, or None.
    """
    if types is None or head is None:
        return []
    try:
        layout = layout_of(types)
    except (UnknownTypeError, FormatError):
        return []
    found: list[ModuleIdentity] = []
    for record in _records(memory, layout, head):
        try:
            data = memory.read(record, layout.size)
        except MemoryFault:
            continue
        if layout.state.of(data) != _UNFORMED:
            found.append((record, _module_name(layout, data), _kernfs_id(memory, layout, data)))
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
        kernfs_id=_kernfs_id(memory, layout, data),
    )


def _kernfs_id(memory: Memory, layout: ModuleLayout, data: bytes) -> int:
    if layout.directory is None:
        return 0
    place, number = layout.directory
    node = place.of(data)
    return _pointer(memory, node + number.offset) if node else 0


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
    return _named(syms, types, read_up_to(memory, strtab, min(last + _MAX_NAME, _MAX_STRINGS)))


def read_up_to(memory: Memory, addr: int, size: int) -> bytes:
    """Return as much as is mapped: where strings end is not known, and a page ends somewhere.

    Args:
        memory: of the kernel.
        addr: of the first byte.
        size: bytes at most.
    """
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
    # Undefined and nameless entries are not symbols.
    names = [_name_at(strings, at) for at in syms["name"].tolist()]
    kept = [i for i, name in enumerate(names) if name and syms["shndx"][i]]
    values = syms["value"][kept].astype(np.uint64)
    return table_of([names[i] for i in kept], values, types[kept].tobytes())


def _name_at(strings: bytes, at: int) -> bytes:
    stop = strings.find(b"\0", at, at + _MAX_NAME)
    return strings[at:stop] if stop > at else b""


def table_of(names: Sequence[bytes], addrs: NDArray[np.uint64], types: bytes) -> SymbolTable:
    """Return names, addresses and types as a table.

    Args:
        names: n of them, without a NUL.
        addrs: shape (n,), of each name; kept, not copied.
        types: n letters, as nm(1) has them.
    """
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
    data = read_up_to(memory, start, size)
    return [_name_at(data, addr - start) for addr in addrs]


def _with_exported(table: SymbolTable, exported: set[tuple[int, bytes]]) -> SymbolTable:
    # /proc/kallsyms shows an exported symbol's type as a capital, and no other's.
    names = table.blob[1:-1].split(b"\0")
    types = bytes(
        (_UPPER if (addr, name) in exported else _LOWER)[kind]
        for addr, name, kind in zip(table.addrs.tolist(), names, table.types, strict=False)
    )
    return SymbolTable(addrs=table.addrs, types=types, blob=table.blob, starts=table.starts)
