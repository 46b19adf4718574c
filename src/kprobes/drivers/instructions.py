"""How the instructions of one kernel, running or in a file, may be probed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

from kprobes.arch.facts import PatchFacts
from kprobes.drivers.clean_text import CleanText
from kprobes.drivers.guest_probes import GuestProbe, patches_of, taken
from kprobes.errors import MemoryFault, RefusedError
from kprobes.image.file import KernelImage, kernel_from_image
from kprobes.image.function_text import read_function
from kprobes.image.init_tables import read_image_tables
from kprobes.model.kernel import Kernel
from kprobes.model.plan import Patch, Site, Ways
from kprobes.model.symbol import Symbol, place_of
from kprobes.model.text import TextTables
from kprobes.plan.choose import Wish, choose
from kprobes.ports import Memory
from kprobes.units import Addr

_ENTRY = 8


class NoBoundaryError(RefusedError):
    """An address in the middle of an instruction."""


_Judge = Callable[[Addr], Ways]


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


@dataclass(eq=False, kw_only=True)
class Text:
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

    def __init__(self, text: Text, facts: PatchFacts) -> None:
        """Read the text of a kernel whose architecture has these facts."""
        self.patched = text.open_memory()
        self.memory = CleanText(self.patched, self._read_patches)
        self._text = text
        self._facts = facts
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
        probed = taken(found, symbols, self.patched, self._facts)
        return replace(tables, probed=probed, missing=tables.missing or missing)

    def _read_patches(self) -> tuple[Patch, ...]:
        found = self._text.probes.read()
        if found is not self._probes:
            self._probes = found
            self._patches = tuple(
                patch for p in found if not p.is_ftrace for patch in patches_of(p, self._facts)
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


def first(function: Symbol, text: Text, facts: PatchFacts) -> Addr:
    """Return the address of the first instruction of a function that can be probed."""
    try:
        return Addr(
            function.addr
            + facts.first(CompiledText(text, facts).memory.read(function.addr, _ENTRY))
        )
    except MemoryFault:
        return function.addr


class Instructions:
    """Judges instructions by the text at one time; a function is decoded once.

    Attributes:
        memory: the text as it is.
    """

    def __init__(self, text: Text, facts: PatchFacts) -> None:
        self._compiled = CompiledText(text, facts)
        self.memory = self._compiled.patched
        self._text = text
        self._facts = facts
        self._judges: dict[Addr, _Judge] = {}

    def site(self, addr: Addr, wish: Wish) -> Site:
        """Return how the instruction at an address is probed.

        Raises:
            NoBoundaryError: no instruction is known to begin there.
            RefusedError: it cannot be, with the reason and what would work.
        """
        place = place_of(self._text.kernel.symbols, addr)
        kernel = self._text.kernel
        symbol = kernel.symbols.at(addr)
        is_lasting = kernel.text[0] <= addr < kernel.text[1] or (symbol and symbol.module)
        if not is_lasting:
            raise RefusedError(f"{place} is outside the kernel's text, in what only boot has used")
        try:
            ways = self._ways(addr)
            if not ways.is_boundary:
                raise NoBoundaryError(str(ways.breakpoint))
            # What is compared before it is overwritten, and put back, is the kernel's own.
            return choose(place, ways, self._compiled.memory, wish)
        except MemoryFault as fault:
            raise RefusedError(f"{place} cannot be probed: {fault}") from fault

    def _ways(self, addr: Addr) -> Ways:
        name, parts = read_function(self._compiled.memory, self._text.kernel, addr)
        entry = parts[0].addr
        if entry not in self._judges:
            self._judges[entry] = self._facts.examine(name, parts, self._compiled.tables)
        return self._judges[entry](addr)
