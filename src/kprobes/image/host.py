"""This machine's own kernel, as its files tell of it: /proc/kallsyms, /sys/kernel/btf, uname.

    ffffffff81000000 T _stext
    ffffffffc0201000 t nf_hook	[nf_tables]

A line of kallsyms is an address, nm's letter, a name, and after a tab the module. The kernel's
own names come first, in the order of its tables.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import FormatError, TargetError
from kprobes.formats import btf_index, elf
from kprobes.formats.kallsyms import SymbolTable
from kprobes.formats.symtab import from_text
from kprobes.image.symbols import ModuleSymbols, Range, SymbolMap
from kprobes.image.types import BtfTypes, parse_types
from kprobes.model.kernel import Kernel, Types

_PAGE = 4096
_APART = 1 << 20
"""Symbols of one module further apart than this lie in different pieces of memory."""
_NO_MODULES = (b"bpf", b"__builtin__")
"""What kallsyms calls a module and is none: compiled programs, trampolines, slots."""


class HostFiles(Struct, frozen=True, kw_only=True):
    """What this machine's files say.

    Attributes:
        release, machine: of uname(2).
        banner: /proc/version.
        kallsyms: /proc/kallsyms.
        notes: /sys/kernel/notes, b"" where there is none.
        btf: /sys/kernel/btf/vmlinux, b"" where there is none.
        module_btf: the others there, by module.
    """

    release: str
    machine: str
    banner: str
    kallsyms: bytes
    notes: bytes = b""
    btf: bytes = b""
    module_btf: Mapping[str, bytes]


def host_kernel(files: HostFiles) -> Kernel:
    """Return the kernel that some files tell of.

    Raises:
        TargetError: its addresses are hidden, or do not say where its text is.
    """
    table, modules = parse_kallsyms(files.kallsyms)
    if not table.addrs.any():
        raise TargetError("/proc/kallsyms hides its addresses (kernel.kptr_restrict)")
    symbols = SymbolMap(table, modules)
    start, stop = symbols.find("_stext"), symbols.find("_etext")
    if start is None or stop is None:
        raise TargetError("/proc/kallsyms does not say where the kernel's text is")
    types = parse_types(files.btf) if files.btf else None
    return Kernel(
        release=files.release,
        banner=files.banner,
        arch=files.machine,
        build_id=elf.build_id(files.notes),
        slide=0,
        text=(start.addr, stop.addr),
        symbols=symbols,
        types=types,
        module_types=HostModuleTypes(files.btf, files.module_btf if types else {}),
    )


class HostModuleTypes(Mapping[str, Types]):
    """Types by module, the kernel's own included; each is read when it is first asked for.

    A module whose types are damaged is one without.
    """

    def __init__(self, kernel: bytes, modules: Mapping[str, bytes]) -> None:
        self._kernel = kernel
        self._modules = dict(modules)
        self._types: dict[str, BtfTypes] = {}

    def __getitem__(self, module: str) -> Types:
        """Return a module's types; KeyError when it has none."""
        if module not in self._types:
            self._types[module] = self._parse(module)
        return self._types[module]

    def __iter__(self) -> Iterator[str]:
        """Return the modules' names."""
        return iter(tuple(self._modules))

    def __len__(self) -> int:
        """Return how many modules have types."""
        return len(self._modules)

    def _parse(self, module: str) -> BtfTypes:
        try:
            found = parse_types(btf_index.join(self._kernel, self._modules[module]))
        except FormatError:
            found = None
        if found is None:
            del self._modules[module]
            raise KeyError(module)
        return found


def parse_kallsyms(text: bytes) -> tuple[SymbolTable, tuple[ModuleSymbols, ...]]:
    """Return the kernel's own symbols, and those of each module, in their order.

    Raises:
        TargetError: a line is not a symbol.
    """
    tab = text.find(b"\t")
    own = text if tab < 0 else text[: text.rfind(b"\n", 0, tab) + 1]
    by_module: dict[bytes, list[bytes]] = {}
    for line in text[len(own) :].splitlines(keepends=True):
        symbol, _, module = line.rstrip(b"\n").partition(b"\t")
        by_module.setdefault(module.strip(b"[]"), []).append(symbol + b"\n")
    # In a file that another wrote, the kernel's own may stand behind a module's.
    own += b"".join(by_module.pop(b"", ()))
    modules = tuple(
        _module(name.decode(errors="backslashreplace"), _table(b"".join(lines)))
        for name, lines in by_module.items()
        if not name.startswith(_NO_MODULES)
    )
    return _table(own), modules


def _table(text: bytes) -> SymbolTable:
    try:
        return from_text(text)
    except FormatError as error:
        raise TargetError(f"/proc/kallsyms has {error}") from error


def _module(name: str, table: SymbolTable) -> ModuleSymbols:
    return ModuleSymbols(name=name, table=table, ranges=tuple(_ranges(table.addrs)))


def _ranges(addrs: NDArray[np.uint64]) -> Iterator[Range]:
    # A module's memory, by what lies in it: its pieces are whole pages.
    ordered = np.unique(addrs[addrs != 0]).tolist()
    start = last = ordered[0] if ordered else 0
    for addr in [*ordered[1:], None]:
        if addr is not None and addr - last < _APART:
            last = addr
            continue
        if last:
            yield start & -_PAGE, (last & -_PAGE) + _PAGE
        if addr is not None:
            start = last = addr
