"""Debug information of a kernel that runs and of its modules: which file has it."""

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from kprobes.errors import FormatError, RefusedError, TargetError
from kprobes.formats.elf import (
    PER_CPU_SECTION,
    LoadedSection,
    loaded_sections,
    noted_build_id,
    undefined,
)
from kprobes.image.debug_info import (
    fetched,
    installed_modules,
    is_own,
    module_candidates,
    module_name,
    own_files,
    untold,
)
from kprobes.image.module_sections import (
    build_ids,
    loaded_module,
    noted_sections,
    places_of_sections,
)
from kprobes.image.symbols import ModuleSymbols
from kprobes.model.kernel import Kernel, Types
from kprobes.model.source import Location, SourceInfo
from kprobes.ports import Memory

_START = "_stext"


class KernelFiles(Struct, frozen=True, kw_only=True):
    """Files that may tell of a kernel that runs.

    Attributes:
        named: by its user, of the kernel.
        modules: likewise, of its modules.
        booted: what it was booted from, or None.
        tree: the top of its source, or None.
    """

    named: Sequence[Path] = ()
    modules: Sequence[Path] = ()
    booted: Path | None = None
    tree: Path | None = None


class LoadedModules(Protocol):
    """What a kernel tells of its modules."""

    def build_ids(self, module: ModuleSymbols) -> frozenset[bytes]:
        """Return all that may be a module's build id; none where it has none."""
        ...

    def sections(self, module: ModuleSymbols) -> Mapping[str, int]:
        """Return where a module's sections begin that it still has, as far as that is noted."""
        ...


class ModulesInMemory(Struct, frozen=True):
    """What the memory of a guest tells of them.

    Attributes:
        memory: of its kernel.
        types: of its kernel.
    """

    memory: Memory
    types: Types | None

    def build_ids(self, module: ModuleSymbols) -> frozenset[bytes]:
        """Return all that may be a module's build id; none where it has none."""
        return build_ids(self.memory, module)

    def sections(self, module: ModuleSymbols) -> Mapping[str, int]:
        """Return where a module's sections begin that it still has, as far as that is noted."""
        return noted_sections(self.memory, self.types, module)


class SourceFiles:
    """Opens debug information when it is wanted, each file once.

    Args:
        kernel: that runs.
        modules: tells of those that it has loaded.
        files: that may have it.
        tell: is given words for people when something will take long.
        is_slide_known: whether the kernel's is; else it is found by what the file calls _stext.
    """

    def __init__(
        self,
        kernel: Kernel,
        modules: LoadedModules,
        files: KernelFiles,
        tell: Callable[[str], None] = untold,
        *,
        is_slide_known: bool = True,
    ) -> None:
        self._kernel = kernel
        self._modules = modules
        self._files = files
        self._is_slide_known = is_slide_known
        self._tell = tell
        self._own = cache(self._open_own)
        self._of_module = cache(self._open_module)
        self._installed = cache(installed_modules)

    def open(self, kernel: Kernel, module: str = "") -> SourceInfo:
        """Return the debug information of the kernel, or of a module.

        Args:
            kernel: with the modules that are loaded now.
            module: of these, or "".

        Raises:
            TargetError: there is none; says how to get it.
            RefusedError: the module is not loaded.
            UsageError: libdw is not there.
        """
        if not module:
            return self._own()
        loaded = loaded_module(kernel, module)
        if loaded is None:
            raise RefusedError(
                f"the module {module} is not loaded: where its lines are is known when it is"
            )
        return self._of_module(loaded)

    def _open_own(self) -> SourceInfo:
        from kprobes.dwarf.source import open_source

        kernel = self._kernel
        own = own_files(kernel.release, kernel.build_id, self._files.booted, self._tell)
        paths = chain(self._files.named, own)
        source = open_source(paths, kernel.arch, kernel.release, kernel.build_id, kernel.slide)
        source.tree = self._files.tree
        start = kernel.symbols.find(_START)
        if not self._is_slide_known and start is not None:
            source.move(_START, start.addr)
        return source

    def _open_module(self, module: ModuleSymbols) -> SourceInfo:
        ids = self._modules.build_ids(module)
        for path in self._files.modules:
            if module_name(path) == module.name:
                try:
                    return self._opened(path, module, ids)
                except (FormatError, OSError) as error:
                    raise TargetError(
                        f"{path} is not of the module that is loaded: {error}"
                    ) from error
        for path in self._of_build(module.name, ids):
            with suppress(FormatError, OSError):
                return self._opened(path, module, ids)
        raise TargetError(
            f"lines and variables of the module {module.name} need its debug information, build "
            f"{' or '.join(each.hex() for each in ids) or 'unknown'}: name its file by --module, "
            "install the kernel's -dbg package (or `kprobe debuginfo --fetch`), or name servers in "
            "DEBUGINFOD_URLS"
        )

    def _of_build(self, name: str, ids: frozenset[bytes]) -> Iterator[Path]:
        booted = self._files.booted
        beside = [*self._files.named, *([] if booted is None else [booted])]
        release = self._kernel.release
        yield from filter(is_own, module_candidates(name, release, ids, beside, self._installed))
        for build_id in ids:
            yield from filter(is_own, fetched(build_id, self._tell))

    def _opened(self, path: Path, module: ModuleSymbols, ids: frozenset[bytes]) -> SourceInfo:
        # FormatError where it is another's.
        from kprobes.dwarf.libdw import Dwarf
        from kprobes.dwarf.source import DwarfSource

        with path.open("rb") as file:

            def read(at: int, size: int) -> bytes:
                return os.pread(file.fileno(), size, at)

            build_id = noted_build_id(read)
            if ids and build_id not in ids:
                raise FormatError(f"its build is {build_id.hex() or 'unknown'}")
            loaded, others = loaded_sections(read), undefined(read)
            sections = places_of_sections(loaded, module, self._modules.sections(module))
        elsewhere = partial(_find, self._kernel, _own_places(loaded, sections), others)
        source = DwarfSource(Dwarf(path, sections), self._kernel.arch, elsewhere=elsewhere)
        source.tree = self._files.tree
        return source


def _find(
    kernel: Kernel, own: Mapping[str, Location], others: Container[str], name: str
) -> Location | None:
    # What a module expects of others is the kernel's, where that has a name.
    find = kernel.symbols.find
    if name not in others:
        return own.get(name)
    symbol, start, end = find(name), find("__per_cpu_start"), find("__per_cpu_end")
    if symbol is None or start is None or end is None:
        return None
    return Location.static(symbol.addr, range(start.addr, end.addr))


def _own_places(
    loaded: Iterable[LoadedSection], sections: Mapping[str, range]
) -> dict[str, Location]:
    per_cpu = sections.get(PER_CPU_SECTION, range(0))
    return {
        name: Location.static(sections[each.name].start + offset, per_cpu)
        for each in loaded
        if each.name in sections
        for name, offset in each.symbols.items()
    }
