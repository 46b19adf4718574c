"""The types of loaded modules: what they add to the kernel's own, walked in a guest's memory.

    LIST_HEAD(btf_modules);         // since v5.11, through btf_module.list
    struct btf_module { struct list_head list; struct module *module; struct btf *btf; ... };
    struct btf { void *data; ...; u32 data_size; ...; char name[MODULE_NAME_LEN]; ... };

A module's BTF is split: its numbers and strings go on where the kernel's end. Both together are
read as one when they are first needed. The guest may be hostile: what does not read is left out,
and a ring that does not close ends somewhere.
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.formats import btf_index
from kprobes.image.build import Source
from kprobes.image.modules import list_modules, read_modules
from kprobes.image.symbols import SymbolMap, loaded_modules
from kprobes.image.types import BtfTypes, parse_types
from kprobes.model.kernel import Kernel, Types
from kprobes.ports import Memory, Text
from kprobes.units import Addr

_MAX_MODULES = 4096
_MAX_SIZE = 1 << 24


class _Layout(Struct, frozen=True, kw_only=True):
    btf: int
    data: int
    data_size: int
    name: int
    name_size: int


class ModuleTypes(Mapping[str, Types]):
    """Types by module, the kernel's own included. Each is read when it is first asked for.

    A module whose types are damaged, or gone by then, is one without.
    """

    def __init__(self, memory: Memory, kernel: bytes, modules: Mapping[str, Source]) -> None:
        """Take the kernel's BTF, and where in memory is what each module adds to it."""
        self._memory = memory
        self._kernel = kernel
        self._modules = dict(modules)
        self._types: dict[str, BtfTypes] = {}

    def again(self, head: int | None, types: Types | None) -> "ModuleTypes":
        """Return the types of the modules that are loaded now; as ``read_module_types``."""
        return read_module_types(self._memory, head, self._kernel, types)

    def __getitem__(self, module: str) -> Types:
        """Return a module's types; KeyError when it has none."""
        if module not in self._types:
            found = self._read(self._modules[module])
            if found is None:
                # Looked at once: what is damaged is not there the next time.
                del self._modules[module]
                raise KeyError(module)
            self._types[module] = found
        return self._types[module]

    def __iter__(self) -> Iterator[str]:
        """Return the modules' names."""
        return iter(tuple(self._modules))

    def __len__(self) -> int:
        """Return how many modules have types."""
        return len(self._modules)

    def _read(self, source: Source) -> BtfTypes | None:
        try:
            return parse_types(btf_index.join(self._kernel, self._memory.read(*source)))
        except (FormatError, MemoryFault):
            return None


def read_module_types(
    memory: Memory, head: int | None, kernel: bytes, types: Types | None
) -> ModuleTypes:
    """Return the types of every loaded module.

    Args:
        memory: the running kernel's.
        head: where its symbol ``btf_modules`` is; without it, or without types, there are none.
        kernel: its own BTF.
        types: made of it.
    """
    if types is None or head is None:
        return ModuleTypes(memory, kernel, {})
    try:
        layout = _layout(types)
    except (UnknownTypeError, FormatError):
        return ModuleTypes(memory, kernel, {})
    return ModuleTypes(memory, kernel, dict(_walk(memory, layout, head)))


def _layout(types: Types) -> _Layout:
    if types.offset("btf_module", "list"):
        raise UnknownTypeError("btf_module.list is not its first member")
    return _Layout(
        btf=types.offset("btf_module", "btf"),
        data=types.offset("btf", "data"),
        data_size=types.offset("btf", "data_size"),
        name=types.offset("btf", "name"),
        name_size=types.member_size("btf", "name"),
    )


def _walk(memory: Memory, layout: _Layout, head: int) -> Iterator[tuple[str, Source]]:
    seen, at = {head}, _number(memory, head, 8)
    while at and at not in seen and len(seen) <= _MAX_MODULES:
        seen.add(at)
        found = _module(memory, layout, _number(memory, at + layout.btf, 8))
        if found is not None:
            yield found
        at = _number(memory, at, 8)


def _module(memory: Memory, layout: _Layout, btf: int) -> tuple[str, Source] | None:
    size = _number(memory, btf + layout.data_size, 4)
    if not 0 < size <= _MAX_SIZE:
        return None
    try:
        name = memory.read(btf + layout.name, min(layout.name_size, 256)).split(b"\0")[0]
    except MemoryFault:
        return None
    return name.decode(errors="backslashreplace"), (_number(memory, btf + layout.data, 8), size)


def _number(memory: Memory, addr: int, size: int) -> int:
    try:
        return int.from_bytes(memory.read(addr, size), "little")
    except MemoryFault:
        return 0


def with_loaded_modules(kernel: Kernel, memory: Memory) -> Kernel:
    """Return a kernel with the modules that are loaded now, itself when they are the same.

    Args:
        kernel: from ``find``; any other is returned as it is.
        memory: of the guest that runs it, and may go on.
    """
    symbols, added = kernel.symbols, kernel.module_types
    if not isinstance(symbols, SymbolMap) or not isinstance(added, ModuleTypes):
        return kernel
    head, types = (symbols.find(name) for name in ("modules", "btf_modules"))
    start = head.addr if head else None
    known = [(each.record, each.name, each.kernfs_id) for each in symbols.modules]
    if known == list_modules(memory, start, kernel.types):
        return kernel
    return replace(
        kernel,
        symbols=symbols.with_modules(read_modules(memory, start, kernel.types)),
        module_types=added.again(types.addr if types else None, kernel.types),
    )


def module_ranges(kernel: Kernel, record: int | None = None) -> tuple[Text, ...]:
    """Return the memory of the module whose ``struct module`` is at an address, or of all."""
    return tuple(
        (Addr(start), Addr(stop))
        for module in loaded_modules(kernel)
        if record in (None, module.record)
        for start, stop in module.ranges
    )
