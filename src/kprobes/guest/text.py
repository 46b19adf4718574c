"""The instructions of one kernel, running or in a file, and how each may be probed.

Kernel text as it was compiled: without what anybody's probes have put there.

It decides where instructions begin, where they lead and how functions are left.

Which of a kernel's functions can be probed at every return, as its text is now.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.arch import PatchOps
from kprobes.errors import MemoryFault, RefusedError, TargetError
from kprobes.guest.tracers import GuestProbe, patches_of, taken
from kprobes.image.file import KernelImage, kernel_from_image
from kprobes.image.init_tables import read_image_tables
from kprobes.image.tables import read_function
from kprobes.model.kernel import Kernel, Symbol, Symbols, TextTables, place_of
from kprobes.model.plan import LONGEST_PATCH, Exits, Patch, PatchOptions, Site
from kprobes.plan.strategy import Wish, choose
from kprobes.ports import Memory
from kprobes.units import Addr

_DEEPEST = 4
"""Patches at one place, each on top of another's."""


class CleanText:
    """Kernel text without patches. Implements ``ports.Memory``."""

    def __init__(self, memory: Memory, read_patches: Callable[[], Iterable[Patch]]) -> None:
        """Take back what is there of some patches.

        Args:
            memory: the text as it is.
            read_patches: returns what others may have written there by now; the same object as
                before when nothing has changed.
        """
        self._memory = memory
        self._read_patches = read_patches
        self._latest: Iterable[Patch] | None = None
        self._patches: list[Patch] = []

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        # What is patched while this runs is known before the bytes are read, or after.
        if self._latest is None:
            self._find_site()
        code = self._memory.read(addr, size)
        self._find_site()
        near = self._near(addr, addr + size)
        if not near:
            return code
        start = min(addr, near[0].addr)
        stop = max(addr + size, *(patch.addr + len(patch.new) for patch in near))
        whole = bytearray(self._whole(addr, code, start, stop))
        for _ in range(_DEEPEST):
            if not sum(_take_back(whole, patch.addr - start, patch) for patch in near):
                break
        return bytes(whole[addr - start : addr - start + size])

    def _whole(self, addr: int, code: bytes, start: int, stop: int) -> bytes:
        # Patches that begin before the bytes, or end after them.
        after = addr + len(code)
        before = self._memory.read(start, addr - start) if start < addr else b""
        return before + code + (self._memory.read(after, stop - after) if after < stop else b"")

    def _find_site(self) -> None:
        found = self._read_patches()
        if found is not self._latest:
            self._latest = found
            # What was there before may be in bytes that were read before.
            known = dict.fromkeys((*self._patches, *found))
            self._patches = sorted(known, key=lambda patch: patch.addr)

    def _near(self, start: int, stop: int) -> list[Patch]:
        low = bisect.bisect_left(self._patches, start - LONGEST_PATCH, key=lambda patch: patch.addr)
        high = bisect.bisect_left(self._patches, stop, key=lambda patch: patch.addr)
        return [p for p in self._patches[low:high] if p.addr + len(p.new) > start]


def _take_back(code: bytearray, at: int, patch: Patch) -> bool:
    if patch.new == patch.old or bytes(code[at : at + len(patch.new)]) != patch.new:
        return False
    code[at : at + len(patch.new)] = patch.old
    return True


_ENTRY = 8


class NoBoundaryError(RefusedError):
    """An address in the middle of an instruction."""


_OptionsAt = Callable[[Addr], PatchOptions]


class OwnProbes(Protocol):
    """Knows a kernel's own kprobes, such as ``GuestProbes``."""

    def read(self) -> tuple[GuestProbe, ...]:
        """Return them as they are now; the same object as before when nothing has changed."""
        ...

    def missing(self) -> str:
        """Return in words what tells of them and was not found, or ""."""
        ...


class _NoProbes:
    def read(self) -> tuple[GuestProbe, ...]:
        return ()

    def missing(self) -> str:
        return ""


_NO_PROBES = _NoProbes()


class Text(Struct, kw_only=True, eq=False, dict=True):
    """A kernel's text.

    Attributes:
        kernel: what it is.
        open_memory: what has it, as it is now; for one batch of reads.
        read_tables: what the kernel itself says of it.
        probes: of the kernel itself, which have changed it.
    """

    kernel: Kernel
    open_memory: Callable[[], Memory]
    read_tables: Callable[[], TextTables]
    probes: OwnProbes = _NO_PROBES

    @cached_property
    def tables(self) -> TextTables:
        """What the kernel itself says of it, read when it is first asked for."""
        return self.read_tables()


class CompiledText:
    """A kernel's text at one time, as it was compiled: without the kernel's own kprobes.

    Attributes:
        patched: the text as it is.
        memory: as it was compiled.
    """

    def __init__(self, text: Text, info: PatchOps) -> None:
        """Read the text of a kernel whose architecture has these facts."""
        self.patched = text.open_memory()
        # Pages of its own: the others' may be older than what is known of the kernel's own probes.
        self.memory = CleanText(text.open_memory(), self._read_patches)
        self._text = text
        self._info = info
        self._probes: tuple[GuestProbe, ...] = ()
        self._patches: tuple[Patch, ...] = ()

    @cached_property
    def tables(self) -> TextTables:
        """What is known of the text."""
        tables, probes = self._text.tables, self._text.probes
        found, missing = probes.read(), probes.missing()
        if not found and not missing:
            return tables
        symbols = self._text.kernel.symbols
        probed = taken(found, symbols, self._text.open_memory(), self._info)
        return replace(tables, probed=probed, missing=tables.missing or missing)

    def _read_patches(self) -> tuple[Patch, ...]:
        found = self._text.probes.read()
        if found is not self._probes:
            self._probes = found
            self._patches = tuple(
                patch for p in found if not p.is_ftrace for patch in patches_of(p, self._info)
            )
        return self._patches


def text_of_image(image: KernelImage) -> Text:
    """Return the text of the kernel in a file, as linked.

    Raises:
        TargetError: it has no intact symbols.
    """
    kernel = kernel_from_image(image)
    return Text(
        kernel=kernel,
        open_memory=lambda: image,
        read_tables=partial(read_image_tables, image, kernel),
    )


def first(function: Symbol, text: Text, info: PatchOps) -> Addr:
    """Return the address of the first instruction of a function that can be probed."""
    try:
        return Addr(
            function.addr + info.first(CompiledText(text, info).memory.read(function.addr, _ENTRY))
        )
    except MemoryFault:
        return function.addr


class Instructions:
    """Judges instructions by the text at one time; a function is decoded once.

    Attributes:
        memory: the text as it is.
    """

    def __init__(self, text: Text, info: PatchOps) -> None:
        self._compiled = CompiledText(text, info)
        self.memory = self._compiled.patched
        self._text = text
        self._info = info
        self._verdicts: dict[Addr, _OptionsAt] = {}

    def site(self, addr: Addr, wish: Wish) -> Site:
        """Return how the instruction at an address is probed.

        Raises:
            NoBoundaryError: no instruction is known to begin there.
            RefusedError: it cannot be, with the reason and what would work.
        """
        place = place_of(self._text.kernel.symbols, addr)
        check_text(self._text.kernel, addr)
        try:
            options = self._patch_options(addr)
            if not options.is_boundary:
                raise NoBoundaryError(str(options.breakpoint))
            # What is compared before it is overwritten, and put back, is the kernel's own.
            return choose(place, options, self._compiled.memory, wish)
        except MemoryFault as fault:
            raise RefusedError(f"{place} cannot be probed: {fault}") from fault

    def _patch_options(self, addr: Addr) -> PatchOptions:
        name, parts = read_function(self._compiled.memory, self._text.kernel, addr)
        entry = parts[0].addr
        if entry not in self._verdicts:
            self._verdicts[entry] = self._info.examine(name, parts, self._compiled.tables)
        return self._verdicts[entry](addr)


def has_text(kernel: Kernel, addr: int) -> bool:
    """Whether an address is in text of a module, or of the kernel itself as long as it is there."""
    symbol = kernel.symbols.at(addr)
    return kernel.has_text(addr) or (symbol is not None and bool(symbol.module))


def check_text(kernel: Kernel, addr: int) -> None:
    """Refuse an address where no text is, or none any more.

    Raises:
        RefusedError: no text is there now.
    """
    if not has_text(kernel, addr):
        raise RefusedError(
            f"{place_of(kernel.symbols, addr)} is outside the kernel's text, in what only boot "
            "uses: it can be probed while a guest boots (--boot, --wait)"
        )


_DEEPEST_CALL = 8
"""Calls that are followed to find out that one never returns."""
_NO_FUNCTIONS = ("__pfx_", "__cfi_")
_COLD = ".cold"


class Classified(Struct, frozen=True, kw_only=True, eq=False):
    """A function and its ways out.

    Attributes:
        symbols: of its kernel.
    """

    symbol: Symbol
    exits: Exits
    symbols: Symbols

    def place(self, addr: Addr) -> str:
        """Return an address, in the function or elsewhere, as the kernel prints it."""
        return place_of(self.symbols, addr)


class Prover:
    """Finds ways out of functions by the text at one time; each function is read once."""

    def __init__(self, text: Text, info: PatchOps) -> None:
        self._text = text
        self._info = info
        compiled = CompiledText(text, info)
        self._memory = compiled.memory
        self._tables = compiled.tables
        self._known: dict[Addr, Exits] = {}

    def classify(self, function: Symbol) -> Classified:
        """Return a function with its ways out, or why they are not known."""
        symbols = self._text.kernel.symbols
        exits = self._exits(function.addr, _DEEPEST_CALL)
        return Classified(symbol=function, exits=exits, symbols=symbols)

    def _exits(self, addr: Addr, deepest: int) -> Exits:
        if addr not in self._known:
            self._known[addr] = self._prove(addr, deepest)
        return self._known[addr]

    def _prove(self, addr: Addr, deepest: int) -> Exits:
        try:
            name, parts = read_function(self._memory, self._text.kernel, addr)
        except (RefusedError, MemoryFault) as error:
            return Exits(entry=addr, refusal=f"its text is not known: {error}")
        found = self._info.exits(name, parts, self._tables)
        while deepest and (callee := self._ended_by(found, deepest - 1)) is not None:
            known = self._tables.no_return | {callee}
            self._tables = replace(self._tables, no_return=known)
            found = self._info.exits(name, parts, self._tables)
        return found

    def _ended_by(self, found: Exits, deepest: int) -> Addr | None:
        # What is known of functions that no list names: those that static ones call when it is
        # too late.
        callee = found.why_not.callee if found.why_not is not None else None
        if callee is None or callee in self._tables.no_return:
            return None
        return callee if self._exits(callee, deepest).is_endless else None


def classified(text: Text, info: PatchOps, *, pattern: str) -> Iterator[Classified]:
    """Yield the functions that match a shell pattern, by address, each with its ways out.

    Args:
        text: of the kernel.
        info: of its architecture.
        pattern: a name or a shell pattern.

    Raises:
        TargetError: nothing matches.
    """
    prover = Prover(text, info)
    functions = _functions(text.kernel, pattern)
    if not functions:
        raise TargetError(f"no function matches {pattern!r} in {text.kernel.release}")
    for symbol in functions:
        yield prover.classify(symbol)


def _functions(kernel: Kernel, pattern: str) -> list[Symbol]:
    by_addr = dict[Addr, Symbol]()
    for symbol in kernel.symbols.glob(pattern):
        if not _is_function(kernel, symbol):
            continue
        # Of several names the one that the kernel prints, if it was asked for.
        if symbol.addr not in by_addr or symbol == kernel.symbols.at(symbol.addr):
            by_addr[symbol.addr] = symbol
    return [by_addr[addr] for addr in sorted(by_addr)]


def _is_function(kernel: Kernel, symbol: Symbol) -> bool:
    if not symbol.is_text or not symbol.size or _COLD in symbol.name:
        return False
    return has_text(kernel, symbol.addr) and not symbol.name.startswith(_NO_FUNCTIONS)
