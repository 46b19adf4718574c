"""What only a kernel's file tells of its text: tables that boot uses and then frees.

struct alt_instr { s32 instr_offset, repl_offset; ...; u8 instrlen, replacementlen; };
                                                           // asm/alternative.h, packed
s32 __smp_locks[];                     // lock prefixes, each counts from itself
unsigned long __start_mcount_loc[], __start_kprobe_blacklist[];
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from kprobes.arch.registry import machine
from kprobes.errors import UnknownTypeError
from kprobes.image.table import ALTERNATIVES, BLACKLIST, MCOUNT, Table
from kprobes.image.text_tables import (
    ALWAYS_NEEDED,
    BLACKLISTED,
    KPROBES,
    Needed,
    annexes,
    areas,
    disjoint,
    missing,
    names_in,
    read_tables,
    relative,
    table_bytes,
)
from kprobes.model.kernel import Kernel
from kprobes.model.text import Forbidden, TextPart, TextTables
from kprobes.ports import Memory
from kprobes.units import Addr

_ALTERNATIVES = (ALTERNATIVES.start, ALTERNATIVES.stop)
_NEEDED = {
    **ALWAYS_NEEDED,
    BLACKLIST.start: Needed(what="its probe blacklist", functions=KPROBES),
    ALTERNATIVES.start: Needed(
        what="its alternatives", functions=("apply_alternatives_all", "alternative_instructions")
    ),
}
_LOCKS = Table(start="__smp_locks", stop="__smp_locks_end", words=1, columns=1)
_JUMP, _JUMP_SIZE = 0xE9, 5
_SIZES = (12, 14)
"""Of struct alt_instr: before and since 6.3."""


def read_image_tables(memory: Memory, kernel: Kernel) -> TextTables:
    """Read every table of a kernel's file that ``read_tables`` finds in memory, and boot's own.

    Args:
        memory: the file.
        kernel: what it holds, at link addresses.

    Raises:
        TargetError: a table cannot be.
    """
    listed, known = _absolute(memory, kernel, MCOUNT), machine(kernel.arch).text
    kept = read_tables(memory, kernel, ftrace=known.listed_sites(memory.read, listed))
    found = list(_alternatives(memory, kernel))
    rewritten = [(each.start, each.stop) for each in found]
    boot = areas(kernel, dict.fromkeys(known.unprobed, BLACKLISTED))
    barred = disjoint([*_blacklist(memory, kernel), *boot])
    return replace(
        kept,
        missing=missing(kernel, _NEEDED),
        alternatives=tuple(sorted([*rewritten, *_locks(memory, kernel)])),
        replacements=_replacements(found),
        annexes={**kept.annexes, **annexes(memory, _detours(memory, kernel, found))},
        forbidden=disjoint([*kept.forbidden, *barred]),
        forbidden_names=kept.forbidden_names | frozenset(names_in(barred, kernel)),
    )


def _absolute(memory: Memory, kernel: Kernel, table: Table) -> list[int]:
    names = table.start, table.stop
    found = np.frombuffer(table_bytes(memory, kernel, names, table.entry), "<u8")
    return [addr for addr in found.tolist() if kernel.text[0] <= addr < kernel.text[1]]


def alternatives(memory: Memory, kernel: Kernel) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the text that alternatives replace.

    Raises:
        TargetError: their list cannot be.
    """
    return ((each.start, each.stop) for each in _alternatives(memory, kernel))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alternative:
    start: Addr
    stop: Addr
    code: TextPart


def _alternatives(memory: Memory, kernel: Kernel) -> Iterator[_Alternative]:
    size = _alternative_size(kernel)
    start = kernel.symbols.find(_ALTERNATIVES[0])
    data = table_bytes(memory, kernel, _ALTERNATIVES, size)
    if start is None or not data:
        return
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    offsets = np.ascontiguousarray(rows[:, :8]).view("<i4").tolist()
    lengths = rows[:, size - 2 :].tolist()
    for i, (place, length) in enumerate(zip(offsets, lengths, strict=True)):
        row = start.addr + i * size
        first = Addr(row + place[0])
        if kernel.text[0] <= first < kernel.text[1]:
            code = _code(memory, row + 4 + place[1], length[1])
            yield _Alternative(start=first, stop=Addr(first + length[0]), code=code)


def _code(memory: Memory, addr: int, size: int) -> TextPart:
    return TextPart(addr=Addr(addr), code=memory.read(addr, size) if size else b"")


def _replacements(
    found: Iterable[_Alternative],
) -> dict[int, tuple[tuple[TextPart, Addr], ...]]:
    by_start = dict[int, tuple[tuple[TextPart, Addr], ...]]()
    for each in found:
        by_start[each.start] = (*by_start.get(each.start, ()), (each.code, each.stop))
    return by_start


def _detours(memory: Memory, kernel: Kernel, found: Iterable[_Alternative]) -> Iterator[int]:
    # static_cpu_has(): a jump into .altinstr_aux, which tests the feature by hand.
    for start in {each.start for each in found}:
        code = memory.read(start, _JUMP_SIZE)
        target = start + _JUMP_SIZE + int.from_bytes(code[1:], "little", signed=True)
        if code[0] == _JUMP and not kernel.text[0] <= target < kernel.text[1]:
            yield target


def _alternative_size(kernel: Kernel) -> int:
    try:
        size = kernel.types.size("alt_instr") if kernel.types is not None else 0
    except UnknownTypeError:
        size = 0
    if size in _SIZES:
        return size
    return _SIZES[kernel.version >= (6, 3)]


def _locks(memory: Memory, kernel: Kernel) -> Iterator[tuple[int, int]]:
    for place in relative(memory, kernel, _LOCKS)[0].tolist():
        yield place, place + 1


def _blacklist(memory: Memory, kernel: Kernel) -> Iterator[Forbidden]:
    for addr in _absolute(memory, kernel, BLACKLIST):
        symbol = kernel.symbols.at(addr)
        if symbol is not None:
            stop = Addr(symbol.addr + symbol.size)
            yield Forbidden(start=symbol.addr, stop=stop, why=BLACKLISTED)
