"""A kernel's debug information, found by its build id. Implements ``model.source.SourceInfo``."""

from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from kprobes.dwarf.inlined import read_copies, read_copy_lines, read_inlined_names
from kprobes.dwarf.libdw import Dwarf
from kprobes.dwarf.lines import read_file, read_function
from kprobes.dwarf.variables import Scope, read_externs, read_variables
from kprobes.errors import FormatError, TargetError
from kprobes.model.source import SourceFunction, SourceLine, Variable

_REGISTERS = {
    "x86_64": (
        *("ax", "dx", "cx", "bx", "si", "di", "bp", "sp"),
        *(f"r{number}" for number in range(8, 16)),
    ),
    "aarch64": (*(f"x{number}" for number in range(31)), "sp"),
}
"""By their numbers in DWARF: the psABIs of System V for AMD64 and of Arm."""
_PER_CPU = ".data..percpu"


class DwarfSource:
    """What one file says; addresses are as linked.

    Args:
        dwarf: of the file.
        arch: the registry's name of its architecture.
    """

    def __init__(self, dwarf: Dwarf, arch: str) -> None:
        self._dwarf = dwarf
        self._registers = _REGISTERS[arch]
        self._per_cpu = dwarf.section(_PER_CPU)
        self._asked = 0
        self._names = cache(partial(read_inlined_names, dwarf))

    def function(self, addr: int) -> SourceFunction | None:
        """Return the function at an address, or None where nothing is known of it."""
        return read_function(self._dwarf, addr)

    def file_lines(self, file: str, first: int, last: int) -> Sequence[SourceLine]:
        """Return the lines of a file that have code.

        Args:
            file: the end of its path.
            first: of the lines that are meant.
            last: of them.
        """
        return read_file(self._dwarf, file, first, last)

    def inlined(self, name: str) -> Sequence[SourceFunction]:
        """Return the functions of a name that are inlined, each without its lines."""
        # Who asks for many names has most of them wrong.
        self._asked += 1
        if self._asked > 1 and name not in self._names():
            return []
        return read_copies(self._dwarf, name)

    def inlined_lines(self, name: str, function: SourceFunction) -> Sequence[SourceLine]:
        """Return the lines of a function that ``inlined`` has returned."""
        return read_copy_lines(self._dwarf, name, (function.file, function.line))

    def externs(self, addr: int) -> Sequence[Variable]:
        """Return the variables of an address's unit; those that it only declares are nowhere."""
        return read_externs(self._dwarf, self._registers, self._per_cpu, addr)

    def variables(self, addr: int, line: int = 0, inlined: str = "") -> Sequence[Variable]:
        """Return what is in scope at an address; of a name the first, which is that of the line.

        Of no line in particular (0) the innermost come first.

        Args:
            addr: where.
            line: that is meant.
            inlined: the function whose copy is meant, if that begins there, or "".
        """
        where = Scope(addr=addr, line=line, inlined=inlined)
        return read_variables(self._dwarf, self._registers, self._per_cpu, where)


def open_source(paths: Iterable[Path], arch: str, release: str, build_id: bytes) -> DwarfSource:
    """Return the debug information of a kernel's build, from the first file that has it.

    Args:
        paths: of files that may.
        arch: the registry's name of its architecture.
        release: of the kernel.
        build_id: its own; b"" takes the first file with any.

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
            return DwarfSource(dwarf, arch)
        dwarf.close()
    raise TargetError(
        f"lines and variables need the debug information of kernel {release}, build "
        f"{build_id.hex() or 'unknown'}: give its vmlinux by --vmlinux, install its -dbg package, "
        "or name servers in DEBUGINFOD_URLS"
    )
