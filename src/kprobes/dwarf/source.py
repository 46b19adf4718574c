"""Debug information of a kernel, or of a module. Implements ``model.source.SourceInfo``."""

from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from msgspec.structs import replace

from kprobes.dwarf.inlined import read_copies, read_copy_lines, read_inlined_names
from kprobes.dwarf.libdw import Dwarf
from kprobes.dwarf.lines import read_file, read_function
from kprobes.dwarf.variables import FindElsewhere, Scope, read_externs, read_variables
from kprobes.errors import FormatError, TargetError, UsageError
from kprobes.formats.elf import PER_CPU_SECTION
from kprobes.model.source import Location, SourceFunction, SourceLine, Variable
from kprobes.units import U64

_REGISTERS = {
    "x86_64": (
        *("ax", "dx", "cx", "bx", "si", "di", "bp", "sp"),
        *(f"r{number}" for number in range(8, 16)),
    ),
    "aarch64": (*(f"x{number}" for number in range(31)), "sp"),
}
"""By their numbers in DWARF: the psABIs of System V for AMD64 and of Arm."""


class DwarfSource:
    """What one file says.

    Args:
        dwarf: of the file.
        arch: the registry's name of its architecture.
        slide: how far what runs is from where that was linked.
        elsewhere: finds variables that no symbol of the file has, as those of the kernel are to a
            module; None where the file has all.

    Attributes:
        tree: the top of the source, where somebody has named it; else None.
    """

    def __init__(
        self, dwarf: Dwarf, arch: str, slide: int = 0, elsewhere: FindElsewhere | None = None
    ) -> None:
        self.tree: Path | None = None
        self._slide = slide
        self._dwarf = dwarf
        self._registers = _REGISTERS[arch]
        self._per_cpu = dwarf.section(PER_CPU_SECTION)
        self._asked = 0
        self._names = cache(partial(read_inlined_names, dwarf))
        self._data = cache(dwarf.global_data)
        self._elsewhere = self._in_symbols if elsewhere is None else elsewhere

    @property
    def file(self) -> str:
        """The file that has it."""
        return str(self._dwarf.path)

    def function(self, addr: int) -> SourceFunction | None:
        """Return the function at an address, or None where nothing is known of it."""
        found = read_function(self._dwarf, self._linked(addr))
        return None if found is None else replace(found, lines=tuple(self._lines(found.lines)))

    def file_lines(self, file: str, first: int, last: int) -> Sequence[SourceLine]:
        """Return the lines of a file that have code.

        Args:
            file: the end of its path.
            first: of the lines that are meant.
            last: of them.
        """
        return self._lines(read_file(self._dwarf, file, first, last))

    def inlined(self, name: str) -> Sequence[SourceFunction]:
        """Return the functions of a name that are inlined, each without its lines."""
        # Who asks for many names has most of them wrong.
        self._asked += 1
        if self._asked > 1 and name not in self._names():
            return []
        found = read_copies(self._dwarf, name)
        loaded = (replace(each, copies=self._loaded(each.copies)) for each in found)
        return [each for each in loaded if each.copies]

    def inlined_lines(self, name: str, function: SourceFunction) -> Sequence[SourceLine]:
        """Return the lines of a function that ``inlined`` has returned."""
        return self._lines(read_copy_lines(self._dwarf, name, (function.file, function.line)))

    def text(self, file: str) -> Sequence[str]:
        """Return the text of a file of the source, line by line.

        Raises:
            UsageError: nobody has said where the source is, or the file is not there.
        """
        if self.tree is None:
            raise UsageError(f"the text of {file} is in the kernel's source: give that by --source")
        return read_text(self.tree, file)

    def externs(self, addr: int) -> Sequence[Variable]:
        """Return the variables of an address's unit, also those that another file has."""
        linked = self._linked(addr)
        found = read_externs(self._dwarf, self._registers, self._per_cpu, linked, self._elsewhere)
        return [each.moved(self._slide) for each in found]

    def variables(self, addr: int, line: int = 0, inlined: str = "") -> Sequence[Variable]:
        """Return what is in scope at an address; of a name the first, which is that of the line.

        Of no line in particular (0) the innermost come first.

        Args:
            addr: where.
            line: that is meant.
            inlined: the function whose copy is meant, if that begins there, or "".
        """
        where = Scope(addr=self._linked(addr), line=line, inlined=inlined)
        found = read_variables(self._dwarf, self._registers, self._per_cpu, where)
        return [each.moved(self._slide) for each in found]

    def move(self, name: str, addr: int) -> None:
        """Have everything where it is if a symbol of the file is at an address.

        Raises:
            FormatError: the file has no such symbol, or they are damaged.
        """
        linked = self._data().get(name)
        if linked is None:
            raise FormatError(f"{self.file}: no symbol {name} says where it was moved to")
        self._slide = addr - linked

    def _in_symbols(self, name: str) -> Location | None:
        addr = self._data().get(name)
        return None if addr is None else Location.static(addr, self._per_cpu)

    def _linked(self, addr: int) -> int:
        return addr - self._slide & U64

    def _lines(self, lines: Iterable[SourceLine]) -> list[SourceLine]:
        found = (replace(line, addrs=self._loaded(line.addrs)) for line in lines)
        return [line for line in found if line.addrs]

    def _loaded(self, addrs: Iterable[int]) -> tuple[int, ...]:
        # What a module has for its beginning only is there no more.
        return tuple(addr + self._slide & U64 for addr in addrs if self._dwarf.is_loaded(addr))


def read_text(tree: Path, file: str) -> list[str]:
    """Return the text of a file below the top of the source, line by line.

    Raises:
        UsageError: it is not there.
    """
    try:
        return (tree / file).read_text(errors="backslashreplace").splitlines()
    except OSError as error:
        words = f"{tree / file}: {error.strerror}: --source is the top of its source"
        raise UsageError(words) from error


def open_source(
    paths: Iterable[Path], arch: str, release: str, build_id: bytes, slide: int = 0
) -> DwarfSource:
    """Return the debug information of a kernel's build, from the first file that has it.

    Args:
        paths: of files that may.
        arch: the registry's name of its architecture.
        release: of the kernel.
        build_id: its own; b"" takes the first file with any.
        slide: how far the kernel is from where it was linked.

    Raises:
        TargetError: there is none; says how to get it.
        UsageError: libdw is not there.
    """
    for path in paths:
        try:
            dwarf = Dwarf(path)
        except (FormatError, OSError):
            continue
        if build_id in (b"", dwarf.build_id):
            return DwarfSource(dwarf, arch, slide)
        dwarf.close()
    raise TargetError(
        f"lines and variables need the debug information of kernel {release}, build "
        f"{build_id.hex() or 'unknown'}: give its vmlinux by --vmlinux, install its -dbg package "
        "(or `kprobe debuginfo --fetch`), or name servers in DEBUGINFOD_URLS"
    )
