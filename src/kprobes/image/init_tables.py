"""Tables of a kernel's text that are in its file alone: boot uses them and then frees them.

struct alt_instr { s32 instr_offset, repl_offset; u16 cpuid; ...; u8 instrlen, replacementlen; };
                                                               // asm/alternative.h, packed
unsigned long __start_mcount_loc[], __start_kprobe_blacklist[];
struct paravirt_patch_site { u8 *instr; u8 type, len; };       // until 6.8, aligned to 8
s32 __return_sites[], __retpoline_sites[], __call_sites[], __ibt_endbr_seal[], __cfi_sites[],
    __smp_locks[], __start_runtime_ptr_NAME[], __start_runtime_shift_NAME[];
                                                                // each counts from itself
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.registry import machine
from kprobes.errors import UnknownTypeError
from kprobes.image.tables import (
    ALTERNATIVES,
    ALWAYS_NEEDED,
    BLACKLIST,
    BLACKLISTED,
    KPROBES,
    MCOUNT,
    Needed,
    Table,
    annexes,
    disjoint,
    locks,
    missing,
    names_in,
    read_tables,
    relative,
    table_bytes,
)
from kprobes.model.kernel import Forbidden, Kernel, TextPart, TextTables
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
    barred = disjoint(_blacklist(memory, kernel))
    return replace(
        kept,
        missing=missing(kernel, _NEEDED),
        alternatives=tuple(sorted([*rewritten, *locks(memory, kernel)])),
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


class _Alternative(Struct, frozen=True, kw_only=True):
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


def _blacklist(memory: Memory, kernel: Kernel) -> Iterator[Forbidden]:
    for addr in _absolute(memory, kernel, BLACKLIST):
        symbol = kernel.symbols.at(addr)
        if symbol is not None:
            stop = Addr(symbol.addr + symbol.size)
            yield Forbidden(start=symbol.addr, stop=stop, why=BLACKLISTED)


_CONSTANT = "__start_runtime_"
_PARAVIRT = ("__parainstructions", "__parainstructions_end")
_PARAVIRT_SIZE = 16


class BootPatch(StrEnum):
    """Why boot rewrites some bytes."""

    ALTERNATIVE = "alternative"
    PARAVIRT = "paravirt call"
    RETURN = "return"
    RETPOLINE = "retpoline"
    CALL = "call with depth tracking"
    ENDBR = "endbr64 nobody branches to"
    CFI = "CFI check"
    LOCK = "lock prefix"
    CONSTANT = "runtime constant"


class Rewritten(Struct, frozen=True, kw_only=True):
    """Bytes [start, stop) that boot may rewrite, and why; at link addresses.

    Attributes:
        what: of a constant, its name; else "".
    """

    start: int
    stop: int
    why: BootPatch
    what: str = ""


# The most bytes that each of these has.
_LISTS: Mapping[BootPatch, tuple[str, str, int]] = {
    BootPatch.RETURN: ("__return_sites", "__return_sites_end", 5),
    BootPatch.RETPOLINE: ("__retpoline_sites", "__retpoline_sites_end", 6),
    BootPatch.CALL: ("__call_sites", "__call_sites_end", 5),
    BootPatch.ENDBR: ("__ibt_endbr_seal", "__ibt_endbr_seal_end", 4),
    BootPatch.CFI: ("__cfi_sites", "__cfi_sites_end", 5),
    BootPatch.LOCK: ("__smp_locks", "__smp_locks_end", 1),
}


def read_boot_patches(image: Memory, kernel: Kernel, within: range) -> tuple[Rewritten, ...]:
    """Return everything in some text that boot may rewrite, by address.

    Args:
        image: the kernel's file.
        kernel: what it holds, at link addresses.
        within: link addresses.

    Raises:
        TargetError: a list cannot be.
    """
    found = [*_image_alternatives(image, kernel), *_paravirt(image, kernel)]
    for why in _LISTS:
        found += _listed(image, kernel, why, within)
    found += _constants(image, kernel)
    inside = (each for each in found if each.start < within.stop and each.stop > within.start)
    return tuple(sorted(inside, key=lambda each: (each.start, each.stop)))


def _image_alternatives(image: Memory, kernel: Kernel) -> Iterator[Rewritten]:
    for start, stop in alternatives(image, kernel):
        yield Rewritten(start=start, stop=stop, why=BootPatch.ALTERNATIVE)


def _paravirt(image: Memory, kernel: Kernel) -> Iterator[Rewritten]:
    # Each begins aligned; nothing pads the last.
    data = table_bytes(image, kernel, _PARAVIRT, 1)
    data += bytes(-len(data) % _PARAVIRT_SIZE)
    rows = np.frombuffer(data, np.uint8).reshape(-1, _PARAVIRT_SIZE)
    places = np.ascontiguousarray(rows[:, :8]).view("<u8")[:, 0].tolist()
    for place, size in zip(places, rows[:, 9].tolist(), strict=True):
        if kernel.text[0] <= place < kernel.text[1]:
            yield Rewritten(start=place, stop=place + size, why=BootPatch.PARAVIRT)


def _listed(image: Memory, kernel: Kernel, why: BootPatch, within: range) -> Iterator[Rewritten]:
    start, stop, size = _LISTS[why]
    table = Table(start=start, stop=stop, words=1, columns=1)
    places = relative(image, kernel, table)[0]
    low, high = np.uint64(max(within.start - size, 0)), np.uint64(within.stop)
    # A kernel has a quarter of a million calls.
    for place in places[(places >= low) & (places < high)].tolist():
        yield Rewritten(start=place, stop=place + size, why=why)


def _constants(image: Memory, kernel: Kernel) -> Iterator[Rewritten]:
    # Since e78298556ee5 ("runtime constants: add default dummy infrastructure") (v6.11).
    for symbol in kernel.symbols.glob(f"{_CONSTANT}*"):
        kind, _, name = symbol.name.removeprefix(_CONSTANT).partition("_")
        stop = symbol.name.replace("__start_", "__stop_", 1)
        table = Table(start=symbol.name, stop=stop, words=1, columns=1)
        size = 8 if kind == "ptr" else 1
        for place in relative(image, kernel, table)[0].tolist():
            yield Rewritten(start=place, stop=place + size, why=BootPatch.CONSTANT, what=name)
