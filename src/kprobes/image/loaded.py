"""A running kernel whose modules have changed since it was found."""

from dataclasses import replace

from kprobes.image.module_types import ModuleTypes
from kprobes.image.modules import list_modules, read_modules
from kprobes.image.symbols import SymbolMap
from kprobes.model.kernel import Kernel
from kprobes.ports import Memory, Text
from kprobes.units import Addr


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
    known = [(module.record, module.name) for module in symbols.modules]
    if known == list_modules(memory, start, kernel.types):
        return kernel
    return replace(
        kernel,
        symbols=symbols.with_modules(read_modules(memory, start, kernel.types)),
        module_types=added.again(types.addr if types else None, kernel.types),
    )


def module_ranges(kernel: Kernel, record: int) -> tuple[Text, ...]:
    """Return the memory of the module whose ``struct module`` is at an address."""
    symbols = kernel.symbols
    found = symbols.modules if isinstance(symbols, SymbolMap) else ()
    return tuple(
        (Addr(start), Addr(stop))
        for module in found
        if module.record == record
        for start, stop in module.ranges
    )
