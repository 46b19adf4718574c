"""Tables of a kernel's text, its own and its modules', and the bytes of its functions.

    struct exception_table_entry { int insn, fixup, data; };      // include: asm/extable.h; arm64
                                                                  // has no data until 5.15
    struct jump_entry { s32 code, target; long key; };            // linux/jump_label.h
    struct static_call_site { s32 addr, key; };                   // linux/static_call_types.h
    struct kprobe_blacklist_entry { struct list_head list; unsigned long start_addr, end_addr; };
                                                                  // linux/kprobes.h

    struct module { ...; unsigned int num_exentries; struct exception_table_entry *extable; ...
                    struct jump_entry *jump_entries; unsigned int num_jump_entries; ...
                    struct static_call_site *static_call_sites; int num_static_call_sites; ...
                    void *kprobes_text_start; unsigned int kprobes_text_size; noinstr_text alike };

Each s32 that is an address counts from itself. Modules' blacklists are in the kernel's own. Memory
is hostile: what does not fit into the text is left out, what has no end ends somewhere, and a
module whose tables do not read can carry no probe but at its ftrace sites.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.arch.machine import TextOps
from kprobes.arch.registry import machine
from kprobes.errors import FormatError, MemoryFault, RefusedError, TargetError, UnknownTypeError
from kprobes.image.symbols import Range, SymbolMap
from kprobes.model.kernel import Forbidden, Kernel, Symbol, TextPart, TextTables, Types
from kprobes.ports import Memory
from kprobes.units import U64, Addr

_MAX_SIZE = 1 << 20
_MAX_PARTS = 64
_COLD = ".cold"


def read_function(memory: Memory, kernel: Kernel, addr: int) -> tuple[str, tuple[TextPart, ...]]:
    """Return the name and the parts of the function that an address lies in.

    The part with the entry comes first, also for an address in a ``.cold`` part.

    Args:
        memory: of the kernel.
        kernel: whose function it is.
        addr: any in the function.

    Raises:
        RefusedError: no function is there, or none that could be one.
        MemoryFault: its text is not mapped.
    """
    symbol = kernel.symbols.at(addr)
    if symbol is None or not symbol.is_text:
        raise RefusedError(f"{addr:#x} is in no function of {kernel.release}")
    parts = _parts(kernel, symbol)
    return parts[0].name, tuple(_read(memory, part) for part in parts)


def _parts(kernel: Kernel, symbol: Symbol) -> list[Symbol]:
    # Static functions of one name may have such a part each: all are taken, as a branch too many
    # does no harm, and one too few would.
    base = symbol.name.split(_COLD)[0]
    entries = (symbol,) if base == symbol.name else kernel.symbols.all_named(base)
    colds = kernel.symbols.all_named(base + _COLD)
    found = {part.addr: part for part in (*entries, *colds, symbol) if part.is_text}
    if len(found) > _MAX_PARTS:
        raise RefusedError(f"{base} has {len(found)} parts: which belong together is not known")
    return list(found.values())


def _read(memory: Memory, part: Symbol) -> TextPart:
    if not 0 < part.size <= _MAX_SIZE:
        raise RefusedError(f"{part.name} has {part.size} bytes, which no function has")
    return TextPart(addr=part.addr, code=memory.read(part.addr, part.size))


MAX_SIZE = 1 << 25
"""Bytes of the largest array that is believed."""

Addrs = NDArray[np.uint64]


class Table(Struct, frozen=True, kw_only=True):
    """An array of a kernel: the symbols around it, and how its entries look.

    Attributes:
        start, stop: names.
        words: s32 words in an entry.
        columns: those of them that are addresses.
        is_absolute: whether entries are whole addresses instead.
    """

    start: str
    stop: str
    words: int
    columns: int
    is_absolute: bool = False

    @property
    def entry(self) -> int:
        """Bytes of an entry."""
        return 4 * self.words


_EXCEPTIONS = Table(start="__start___ex_table", stop="__stop___ex_table", words=3, columns=2)
JUMP_LABELS = Table(start="__start___jump_table", stop="__stop___jump_table", words=4, columns=2)
STATIC_CALLS = Table(
    start="__start_static_call_sites", stop="__stop_static_call_sites", words=2, columns=1
)
_LOCKS = Table(start="__smp_locks", stop="__smp_locks_end", words=1, columns=1)
MCOUNT = Table(
    start="__start_mcount_loc", stop="__stop_mcount_loc", words=2, columns=0, is_absolute=True
)
BLACKLIST = Table(
    start="__start_kprobe_blacklist",
    stop="__stop_kprobe_blacklist",
    words=2,
    columns=0,
    is_absolute=True,
)
ALTERNATIVES = Table(start="__alt_instructions", stop="__alt_instructions_end", words=3, columns=1)
"""Of 12 bytes: where the symbols are not known, on arm64."""
PROBE_BUCKETS = 64
"""Of ``kprobe_table``: 1 << KPROBE_HASH_BITS in kernel/kprobes.c."""


def exceptions(info: TextOps, version: tuple[int, int]) -> Table:
    """Return how a kernel's exception table looks."""
    return replace(_EXCEPTIONS, words=info.exception_words(version))


def columns(table: Table, data: bytes, start: int, text: tuple[int, int]) -> list[Addrs]:
    """Return the columns of addresses of an array whose first lies in some text.

    They are copies, shape (n,).

    Args:
        table: how its entries look.
        data: the array.
        start: where it is.
        text: addresses [start, stop).
    """
    words = np.frombuffer(data, "<i4").reshape(-1, table.words)
    places = np.arange(len(words), dtype=np.uint64) * np.uint64(table.entry) + np.uint64(start)
    found = [
        places + np.uint64(4 * i) + words[:, i].astype(np.int64).astype(np.uint64)
        for i in range(table.columns)
    ]
    kept = (found[0] >= np.uint64(text[0])) & (found[0] < np.uint64(text[1]))
    return [column[kept] for column in found]


def pairs(found: list[Addrs]) -> dict[int, int]:
    """Return two columns, shape (n,), as a mapping."""
    return dict(zip(found[0].tolist(), found[1].tolist(), strict=True))


_MODULE_AREAS = {
    "kprobes_text": "it is the text of the module's own probes",
    "noinstr_text": "it is noinstr text, which runs where nothing may trap",
}
_UNREADABLE = "its module's tables, which say what may not be probed, cannot be read"
_MAX_AREA = 1 << 26


class ModuleTables(Struct, frozen=True, kw_only=True):
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
    for name, why in _MODULE_AREAS.items():
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


_MAX_BLACKLIST = 1 << 16
_ANNEX = 48
"""Bytes of the longest annex, which one jump ends."""
_LIST = 16
BLACKLISTED = "the kernel's own probe blacklist has it"

_STARTING = "it runs while a CPU starts, before the kernel's memory is there"

_AREAS: Mapping[str, str] = {
    "__noinstr_text": "it is noinstr text, which runs where nothing may trap",
    "__entry_text": "it is entry text, which runs before the kernel is ready for a trap",
    "__kprobes_text": "it is the text of the kernel's own probes",
    "__static_call_text": "it is a static call's trampoline, which the kernel rewrites",
}


class Needed(Struct, frozen=True, kw_only=True):
    """What must be known of a kernel before its instructions are probed.

    Attributes:
        what: in words.
        functions: a kernel that has one of them has it.
    """

    what: str
    functions: tuple[str, ...]


ALWAYS_NEEDED: Mapping[str, Needed] = {
    "__start___ex_table": Needed(
        what="its exception table",
        functions=("search_kernel_exception_table", "search_exception_tables"),
    ),
    JUMP_LABELS.start: Needed(what="its jump labels", functions=("jump_label_text_reserved",)),
    STATIC_CALLS.start: Needed(what="its static calls", functions=("static_call_text_reserved",)),
}
"""By symbol."""
KPROBES = "register_kprobe", "within_kprobe_blacklist"
"""Functions that only kernels with kprobes have."""
_NEEDED = {
    **ALWAYS_NEEDED,
    "kprobe_blacklist": Needed(what="its probe blacklist", functions=KPROBES),
}


def read_tables(memory: Memory, kernel: Kernel, *, ftrace: Iterable[int] = ()) -> TextTables:
    """Read the tables that outlive a kernel's boot.

    Args:
        memory: of the running kernel, or of its file.
        kernel: what it is.
        ftrace: its function tracer's sites.

    Raises:
        TargetError: a table cannot be: its ends are wrong or not mapped.
    """
    known = machine(kernel.arch).text
    repaired, jump_labels, static_calls = (
        relative(memory, kernel, table)
        for table in (exceptions(known, kernel.version), JUMP_LABELS, STATIC_CALLS)
    )
    modules = read_module_tables(memory, kernel)
    barred = disjoint([*_unprobed(kernel, known), *_blacklist(memory, kernel), *modules.forbidden])
    repairs = pairs(repaired) | modules.exceptions
    sites = frozenset(ftrace)
    return TextTables(
        exceptions=repairs,
        jump_labels=pairs(jump_labels) | modules.jump_labels,
        static_calls=frozenset(static_calls[0].tolist()) | modules.static_calls,
        ftrace=sites,
        pointers=frozenset(_pointers(kernel, known, sites)),
        annexes=annexes(memory, _elsewhere(kernel, repairs)),
        forbidden=barred,
        forbidden_names=frozenset(names_in(barred, kernel)),
        returns=frozenset(_named(kernel, known.returns)),
        indirect=frozenset(_matching(kernel, known.indirect)),
        no_return=frozenset(_named(kernel, known.no_return)),
        has_jump_tables=kernel.symbols.find(known.without_jump_tables) is None,
        alternatives=tuple(sorted(_later_locks(memory, kernel))),
        has_landing_pads=known.has_landing_pads(memory.read, sites),
        missing=missing(kernel, _NEEDED),
    )


def locks(memory: Memory, kernel: Kernel) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of prefixes that a kernel with one CPU does without.

    Raises:
        TargetError: their table cannot be.
    """
    for place in relative(memory, kernel, _LOCKS)[0].tolist():
        yield place, place + 1


def _later_locks(memory: Memory, kernel: Kernel) -> Iterable[tuple[int, int]]:
    # alternatives_enable_smp() of arch/x86/kernel/alternative.c puts them back, where nothing else
    # stands, when a kernel that has begun with one CPU gets another.
    flag = kernel.symbols.find("uniproc_patched")
    with suppress(MemoryFault):
        if flag is not None and any(memory.read(flag.addr, 1)):
            return locks(memory, kernel)
    return ()


def missing(kernel: Kernel, needed: Mapping[str, Needed]) -> str:
    """Return in words what a kernel must have, by its functions, but no symbol leads to.

    Args:
        kernel: any.
        needed: by symbol.
    """
    find = kernel.symbols.find
    words = [
        each.what
        for symbol, each in needed.items()
        if find(symbol) is None and any(find(name) for name in each.functions)
    ]
    return f"{' and '.join(words)} {'was' if len(words) == 1 else 'were'}" if words else ""


def table_bytes(memory: Memory, kernel: Kernel, names: tuple[str, str], size: int) -> bytes:
    """Return the bytes of an array between two symbols, b"" when the kernel has none.

    Args:
        memory: where it is.
        kernel: whose symbols they are.
        names: of its start and its end.
        size: of an entry.

    Raises:
        TargetError: its ends are wrong or it is not mapped.
    """
    start, stop = (kernel.symbols.find(name) for name in names)
    if start is None or stop is None:
        return b""
    length = stop.addr - start.addr
    if not 0 <= length <= MAX_SIZE or length % size:
        raise TargetError(
            f"{names[0]} to {names[1]} are {length} bytes, which no table of {size}-byte "
            "entries has: the kernel's symbols or memory are damaged"
        )
    return memory.read(start.addr, length)


def relative(memory: Memory, kernel: Kernel, table: Table) -> list[Addrs]:
    """Return the columns of addresses of a table, each entry's first inside the kernel's text.

    They are copies, shape (n,).

    Args:
        memory: of the kernel.
        kernel: whose table it is.
        table: its symbols, and how its entries look.

    Raises:
        TargetError: as ``table_bytes``.
    """
    data = table_bytes(memory, kernel, (table.start, table.stop), table.entry)
    start = kernel.symbols.find(table.start)
    at = start.addr if start else 0
    found = [columns(table, data, at, text) for text in kernel.texts]
    return [np.concatenate(column) for column in zip(*found, strict=True)]


def annexes(memory: Memory, addrs: Iterable[int]) -> dict[int, TextPart]:
    """Return the code at addresses, for ``TextTables.annexes``; left out where none is mapped."""
    found = dict[int, TextPart]()
    for addr in addrs:
        try:
            found[addr] = TextPart(addr=Addr(addr), code=memory.read(addr, _ANNEX))
        except MemoryFault:
            continue
    return found


def disjoint(areas: Iterable[Forbidden]) -> tuple[Forbidden, ...]:
    """Sort areas, and cut off what an earlier one has."""
    found: list[Forbidden] = []
    for area in sorted(areas, key=lambda area: (area.start, -area.stop)):
        start = max(area.start, found[-1].stop) if found else area.start
        if start < area.stop:
            found.append(Forbidden(start=start, stop=area.stop, why=area.why))
    return tuple(found)


def _elsewhere(kernel: Kernel, repairs: Mapping[int, int]) -> Iterator[int]:
    # Until 5.15 in a section of their own, and in assembly among other functions.
    at = kernel.symbols.at
    return (repair for addr, repair in repairs.items() if at(addr) != at(repair))


def names_in(areas: Iterable[Forbidden], kernel: Kernel) -> Iterator[str]:
    """Yield the names of the functions in some areas, of aliases one."""
    for area in areas:
        at = int(area.start)
        while at < area.stop and (symbol := kernel.symbols.at(at)) is not None:
            yield symbol.name
            at = max(at + 1, symbol.addr + symbol.size)


def areas(kernel: Kernel, named: Mapping[str, str] = _AREAS) -> Iterator[Forbidden]:
    """Yield pieces of a kernel's text that two symbols enclose, by name to why they may not be."""
    for name, why in named.items():
        start, stop = (kernel.symbols.find(f"{name}_{edge}") for edge in ("start", "end"))
        if start is not None and stop is not None and 0 < stop.addr - start.addr <= _MAX_AREA:
            yield Forbidden(start=start.addr, stop=stop.addr, why=why)


def _unprobed(kernel: Kernel, known: TextOps) -> Iterator[Forbidden]:
    # What boot puts on the blacklist is not there where the kernel has no kprobes of its own.
    yield from areas(kernel)
    yield from areas(kernel, dict.fromkeys(known.unprobed, BLACKLISTED))
    for name in known.starting:
        for symbol in kernel.symbols.all_named(name):
            yield Forbidden(start=symbol.addr, stop=Addr(symbol.addr + symbol.size), why=_STARTING)


def _blacklist(memory: Memory, kernel: Kernel) -> Iterator[Forbidden]:
    head = kernel.symbols.find("kprobe_blacklist")
    if head is None:
        return
    start, stop = _fields(kernel)
    seen, at = {0, int(head.addr)}, _u64(memory.read(head.addr, 8))
    while at not in seen and len(seen) <= _MAX_BLACKLIST:
        seen.add(at)
        entry = memory.read(at, max(start, stop) + 8)
        first, end = _u64(entry[start:]), _u64(entry[stop:])
        if 0 < end - first <= _MAX_AREA:
            yield Forbidden(start=Addr(first), stop=Addr(end), why=BLACKLISTED)
        at = _u64(entry)


def _fields(kernel: Kernel) -> tuple[int, int]:
    names = ("start_addr", "end_addr")
    try:
        if kernel.types is not None:
            found = [kernel.types.offset("kprobe_blacklist_entry", name) for name in names]
            if all(_LIST <= offset < 1 << 12 for offset in found):
                return found[0], found[1]
    except UnknownTypeError:
        pass
    return _LIST, _LIST + 8


def _u64(data: bytes) -> int:
    return int.from_bytes(data[:8], "little") & U64


def _pointers(kernel: Kernel, known: TextOps, sites: Iterable[int]) -> Iterator[int]:
    if known.pointer is not None and kernel.symbols.find(known.with_pointers) is not None:
        yield from map(known.pointer, sites)


def _named(kernel: Kernel, names: Iterable[str]) -> Iterator[int]:
    found = (kernel.symbols.find(name) for name in names)
    return (symbol.addr for symbol in found if symbol is not None)


def _matching(kernel: Kernel, pattern: str) -> Iterator[int]:
    found = kernel.symbols.glob(pattern)
    return (symbol.addr for symbol in found if symbol.is_text)
