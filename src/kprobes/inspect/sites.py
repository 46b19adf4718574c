"""Entries of functions, of any ELF file or of a kernel: what is prepared there, and for whom.

Of a running kernel both what its file has and what is in its memory now.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import groupby, takewhile
from operator import attrgetter
from pathlib import Path

from msgspec import Struct

from kprobes.arch.arch import Arch
from kprobes.arch.entry import (
    MCOUNT_LOC,
    PATCHABLE,
    SITES,
    CalleeOf,
    EntryKind,
    EntryPart,
    EntryText,
    read_entry,
)
from kprobes.arch.insn import PREAMBLES, Disassembled, Syntax
from kprobes.arch.registry import arch, machine, machine_of_elf
from kprobes.errors import FormatError, MemoryFault, TargetError
from kprobes.formats.elf import MAGIC
from kprobes.formats.elf_functions import ElfFunction, ElfFunctions, Place
from kprobes.inspect.subject import TextSnapshot
from kprobes.model.kernel import Symbol, name_of
from kprobes.units import Addr

_PFX, _CFI = PREAMBLES
_BLOCK = 1 << 16
_SIZE, _SIZE_IN_KERNEL = 64, 32
"""Bytes of a function that are looked at, and before it: gcc -pg calls when much was kept already,
and no kernel is made so."""


class EntrySide(Struct, frozen=True, kw_only=True):
    """An entry as one of the two has it.

    Attributes:
        parts: what is prepared, by offset.
        lines: the instructions from the function's first on, as far as was looked.
    """

    parts: tuple[EntryPart, ...]
    lines: tuple[Disassembled, ...]

    @property
    def stop(self) -> int:
        """The offset of the first byte after what is prepared."""
        return max((part.offset + len(part.code) for part in self.parts), default=0)

    @property
    def site(self) -> EntryPart | None:
        """What a function tracer uses, or None."""
        return next((part for part in self.parts if part.kind in SITES), None)

    @property
    def is_prepared(self) -> bool:
        """Whether a tracer may come there: a call, or room for one."""
        room = (EntryKind.PATCHABLE, EntryKind.PATCHABLE_BEFORE)
        return self.site is not None or any(part.kind in room for part in self.parts)


class FunctionEntry(Struct, frozen=True, kw_only=True):
    """The entry of one function.

    Attributes:
        name: its symbol.
        addr: where it is; in an object the offset in its section.
        size: bytes.
        owner: the section, or the module; "" for the kernel's own.
        file: what the file has, or None without one.
        memory: what is there now, or None where no kernel runs.
    """

    name: str
    addr: Addr
    size: int
    owner: str
    file: EntrySide | None
    memory: EntrySide | None

    @property
    def now(self) -> EntrySide:
        """What is there now, else what the file has."""
        found = self.memory if self.memory is not None else self.file
        assert found is not None
        return found


def is_kernel(path: Path) -> bool:
    """Whether a file may be a kernel's: no ELF, or one that is loaded and names no loader.

    Raises:
        TargetError: it cannot be read.
    """
    from kprobes.formats import elf

    data = _read(path)
    if not data.startswith(MAGIC):
        return True
    try:
        found = elf.parse(data)
    except FormatError:
        return False
    return bool(found.segments) and not found.needs_loader and b"Linux version " in data


def sites_of_file(path: Path, pattern: str) -> Iterator[FunctionEntry]:
    """Yield the entries of an ELF file's functions, by address.

    Args:
        path: an object, a module, a library, or a program.
        pattern: of their names.

    Raises:
        TargetError: it cannot be read, or is of another architecture.
        FormatError: it is no ELF file with symbols, or damaged.
    """
    try:
        found = ElfFunctions(_read(path))
        known = arch(machine_of_elf(found.machine).name)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except TargetError as error:
        raise TargetError(f"{path}: {error}") from error
    tables = {name: found.listed(name) for name in (MCOUNT_LOC, PATCHABLE)}
    every = list(found.functions())
    functions = [each for each in every if not each.name.startswith(PREAMBLES)]
    for at, function in enumerate(functions):
        if fnmatchcase(function.name, pattern):
            neighbours = functions[at - 1] if at else None, functions[at + 1 : at + 2]
            yield _entry_of_file(known, found, function, (tables, neighbours))


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise TargetError(f"cannot read {path}: no such file")
        return path.read_bytes()
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror}") from error


_Context = tuple[Mapping[str, set[Place]], tuple[ElfFunction | None, list[ElfFunction]]]


def _entry_of_file(
    known: Arch, found: ElfFunctions, function: ElfFunction, context: _Context
) -> FunctionEntry:
    tables, (previous, following) = context
    section, start = function.place
    before, after = _SIZE, min(function.size or _SIZE, _SIZE)
    if previous is not None and previous.place[0] == section:
        # What is before the other one's end is not before this one.
        before = max(min(start - previous.place[1] - previous.size, _SIZE), 0)
    if following and following[0].place[0] == section and not function.size:
        after = min(following[0].place[1] - start, _SIZE)
    head, code = found.around(function.place, before, after)
    text = EntryText(
        addr=Addr(start),
        before=head,
        code=code,
        listed=_listed(tables, function.place, range(-len(head), len(code))),
        are_listed=bool(tables[MCOUNT_LOC]),
        # clang's symbol on x86-64; where it writes a word, it says that this is data.
        has_checks=found.has_function(_CFI + function.name)
        or found.has_data(function.place, _SIZE),
    )
    return FunctionEntry(
        name=function.name,
        addr=Addr(start),
        size=function.size,
        owner=function.section,
        file=_side(known, text, _callee_in_file(known, found, section)),
        memory=None,
    )


def _listed(
    tables: Mapping[str, set[Place]], place: Place, offsets: range
) -> dict[int, tuple[str, ...]]:
    section, start = place
    found = {
        offset: tuple(n for n, places in tables.items() if (section, start + offset) in places)
        for offset in offsets
    }
    return {offset: names for offset, names in found.items() if names}


def _callee_in_file(known: Arch, found: ElfFunctions, section: int) -> CalleeOf:
    def callee(line: Disassembled) -> str:
        name = found.symbol_of((section, line.addr), len(line.code))
        if name or (line.place is None and line.target is None):
            return name
        if line.place is not None:
            return found.slot(line.place)
        target = line.target or 0
        linkage = known.listing.lines(found.linkage(target), target, Syntax.ATT)
        slots = (found.slot(each.place) for each in linkage if each.place is not None)
        return found.function_at(target) or next((slot for slot in slots if slot), "")

    return callee


def sites_of_kernel(snapshot: TextSnapshot, pattern: str) -> Iterator[FunctionEntry]:
    """Yield the entries of a kernel's functions and of its modules', by address.

    Args:
        snapshot: of its text.
        pattern: of their names.
    """
    entries, symbols = _Entries(snapshot), snapshot.kernel.symbols
    every = (each for each in symbols.glob(pattern) if _is_function(snapshot, each))
    for addr, group in groupby(every, attrgetter("addr")):
        named = list(group)
        # Of several names the one that the kernel itself takes.
        own = symbols.at(addr) if len(named) > 1 else None
        symbol = own if own in named else named[0]
        found = entries.of(symbol)
        if found.file is not None or found.memory is not None:
            yield found


def _is_function(snapshot: TextSnapshot, symbol: Symbol) -> bool:
    # Text that only boot needs is gone in a running kernel.
    texts = snapshot.kernel.texts
    is_there = bool(symbol.module) or snapshot.memory is None
    is_there = is_there or any(start <= symbol.addr < stop for start, stop in texts)
    return is_there and symbol.is_text and symbol.size > 0 and not symbol.name.startswith(PREAMBLES)


_Read = Callable[[int, int], bytes | None]


class _Entries:
    # Of one kernel's functions, with what is known of all of them.

    def __init__(self, snapshot: TextSnapshot) -> None:
        symbols = snapshot.kernel.symbols
        self._snapshot = snapshot
        self._checked, self._padded = (
            {each.addr + each.size: each.size for each in symbols.glob(f"{prefix}*")}
            for prefix in (_CFI, _PFX)
        )
        self._sites = frozenset[int]()
        if snapshot.sites is not None:
            self._sites = frozenset(snapshot.sites.addrs.tolist())
        text = machine(snapshot.kernel.arch).text
        has_pointers = symbols.find(text.with_pointers) is not None
        self._pointer = text.pointer if has_pointers else None
        self._was = None if snapshot.image is None else _in_blocks(snapshot.was)
        self._now = None if snapshot.memory is None else _in_blocks(snapshot.now)

    def of(self, symbol: Symbol) -> FunctionEntry:
        return FunctionEntry(
            name=symbol.name,
            addr=symbol.addr,
            size=symbol.size,
            owner=symbol.module,
            file=self._side(self._was, symbol),
            memory=self._side(self._now, symbol),
        )

    def _side(self, read: _Read | None, symbol: Symbol) -> EntrySide | None:
        addr = symbol.addr
        code = read and read(addr, min(symbol.size, _SIZE_IN_KERNEL))
        if read is None or code is None:
            return None
        offsets = (n for n in self._snapshot.arch.site.offsets if addr + n in self._sites)
        offset = next(offsets, None)
        text = EntryText(
            addr=addr,
            before=read(addr - _SIZE_IN_KERNEL, _SIZE_IN_KERNEL) or b"",
            code=code,
            listed={} if offset is None else {offset: (MCOUNT_LOC,)},
            are_listed=bool(self._sites),
            padding=self._padded.get(addr, self._checked.get(addr, 0)),
            pointer=self._pointer_of(addr, offset),
            has_checks=addr in self._checked,
        )
        return _side(self._snapshot.arch, text, self._callee)

    def _pointer_of(self, addr: int, offset: int | None) -> int | None:
        if self._pointer is None or offset is None:
            return None
        return self._pointer(addr + offset) - addr

    def _callee(self, line: Disassembled) -> str:
        symbols = self._snapshot.kernel.symbols
        return "" if line.target is None else name_of(symbols, line.target)


def _in_blocks(read: _Read) -> _Read:
    # There are tens of thousands, side by side.
    held: dict[int, bytes | None] = {}

    def block(number: int) -> bytes | None:
        if number not in held:
            held.clear()
            held[number] = _or_none(read, number * _BLOCK, _BLOCK)
        return held[number]

    def found(start: int, size: int) -> bytes | None:
        first, at = divmod(start, _BLOCK)
        data = block(first) if at + size <= _BLOCK else None
        return data[at : at + size] if data is not None else _or_none(read, start, size)

    return found


def _or_none(read: _Read, start: int, size: int) -> bytes | None:
    try:
        return read(start, size)
    except MemoryFault:
        return None


def _side(known: Arch, text: EntryText, callee: CalleeOf) -> EntrySide:
    lines = known.listing.lines(text.code, text.addr, Syntax.ATT)
    if len(text.code) in (_SIZE, _SIZE_IN_KERNEL):
        # Where we stop to look an instruction may be cut off, and what follows is none.
        lines = tuple(takewhile(lambda line: line.mnemonic != "(bad)", lines))
    parts = tuple(read_entry(known.listing.entry, text, lines, callee))
    return EntrySide(parts=parts, lines=lines)


def counted(entries: Iterable[FunctionEntry]) -> dict[str, int]:
    """Return how many functions there are by what a tracer finds at their entries now.

    Args:
        entries: of the functions.

    Returns:
        Of ``EntryKind`` and "" for none; ``patchable`` is where only nops are.
    """
    found: dict[str, int] = {}
    for entry in entries:
        now = entry.now
        kind = now.site.kind.value if now.site is not None else ""
        if not kind and now.is_prepared:
            kind = EntryKind.PATCHABLE.value
        found[kind] = found.get(kind, 0) + 1
    return found
