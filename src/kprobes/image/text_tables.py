"""What a kernel's own tables say of its text, read from its memory or its file.

    struct exception_table_entry { int insn, fixup, data; };      // include: asm/extable.h
    struct jump_entry { s32 code, target; long key; };            // linux/jump_label.h
    struct static_call_site { s32 addr, key; };                   // linux/static_call_types.h
    struct kprobe_blacklist_entry { struct list_head list; unsigned long start_addr, end_addr; };
                                                                  // linux/kprobes.h

Each s32 counts from itself. Loaded modules have tables of their own. Memory is hostile: what does
not fit into the text is left out, and what has no end ends somewhere.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kprobes.arch.machine import TextFacts
from kprobes.arch.registry import machine
from kprobes.errors import MemoryFault, TargetError, UnknownTypeError
from kprobes.image.module_tables import read_module_tables
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
from kprobes.model.text import Forbidden, TextPart, TextTables
from kprobes.ports import Memory
from kprobes.units import U64, Addr

_MAX_BLACKLIST = 1 << 16
_MAX_AREA = 1 << 26
_ANNEX = 48
"""Bytes of the longest annex, which one jump ends."""
_LIST = 16
BLACKLISTED = "the kernel's own probe blacklist has it"

_AREAS: Mapping[str, str] = {
    "__noinstr_text": "it is noinstr text, which runs where nothing may trap",
    "__entry_text": "it is entry text, which runs before the kernel is ready for a trap",
    "__kprobes_text": "it is the text of the kernel's own probes",
    "__static_call_text": "it is a static call's trampoline, which the kernel rewrites",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
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
    barred = disjoint([*areas(kernel), *_blacklist(memory, kernel), *modules.forbidden])
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
        has_landings=known.has_landings(memory.read, sites),
        missing=missing(kernel, _NEEDED),
    )


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

    Raises:
        TargetError: as ``table_bytes``.
    """
    data = table_bytes(memory, kernel, (table.start, table.stop), table.entry)
    start = kernel.symbols.find(table.start)
    return columns(table, data, start.addr if start else 0, kernel.text)


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


def _pointers(kernel: Kernel, known: TextFacts, sites: Iterable[int]) -> Iterator[int]:
    if known.pointer is not None and kernel.symbols.find(known.with_pointers) is not None:
        yield from map(known.pointer, sites)


def _named(kernel: Kernel, names: Iterable[str]) -> Iterator[int]:
    found = (kernel.symbols.find(name) for name in names)
    return (symbol.addr for symbol in found if symbol is not None)


def _matching(kernel: Kernel, pattern: str) -> Iterator[int]:
    found = kernel.symbols.glob(pattern)
    return (symbol.addr for symbol in found if symbol.is_text)
