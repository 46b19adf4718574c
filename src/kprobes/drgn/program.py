"""A guest's kernel as drgn's Program, which its helpers and its users' scripts take."""

from collections.abc import Callable, Mapping

from drgn import Architecture, FaultError, Platform, Program

from kprobes.drgn.objects import ObjectFinder, SymbolFinder
from kprobes.drgn.types import TypeFinder
from kprobes.errors import MemoryFault, TargetError
from kprobes.formats import vmcoreinfo
from kprobes.guest.guest import Guest
from kprobes.image.types import BtfTypes
from kprobes.model.kernel import Kernel, Symbol
from kprobes.ports import Memory
from kprobes.units import Addr

_ARCHITECTURES = {"x86_64": Architecture.X86_64, "aarch64": Architecture.AARCH64}
_NAME = "kprobes"
_KERNEL = 1 << 63
_PHYSICAL = 1 << 52
"""Bytes of physical addresses that both architectures can have."""
_PAGE = 4096
_NOTED = ("prb", "vmap_area_list")
"""Variables that VMCOREINFO tells of where the kernel's symbols have no data."""


def make_program(find_guest: Callable[[], Guest]) -> Program:
    """Return a program that reads a guest while it runs, without debug information.

    Args:
        find_guest: returns what is known of the guest at that moment: modules come and go.

    Raises:
        TargetError: its kernel has no types.
    """
    guest = find_guest()
    memory, kernel = guest.memory, guest.kernel
    if not isinstance(kernel.types, BtfTypes):
        raise TargetError(f"kernel {kernel.release} has no types: drgn needs them; give --vmlinux")
    prog = Program(Platform(_ARCHITECTURES[kernel.arch]))
    prog.add_memory_segment(0, _PHYSICAL, _reader(memory.ram.read), physical=True)
    note = _note(memory, kernel)
    prog.set_linux_kernel_custom(note, True)
    # Through the page tables as we read them: drgn's way needs more of the note than old ones tell.
    prog.add_memory_segment(_KERNEL, _KERNEL - 1, _reader(memory.read))
    _register_finders(prog, kernel.types, find_guest, vmcoreinfo.parse(note).symbols)
    # drgn walks stacks by the kernel's own tables where an address belongs to a module.
    prog.main_module("kernel", create=True).address_ranges = list(kernel.texts)
    return prog


def _register_finders(
    prog: Program, types: BtfTypes, find_guest: Callable[[], Guest], noted: Mapping[str, int]
) -> None:
    def is_code(addr: int) -> bool:
        kernel = find_guest().kernel
        symbol = kernel.symbols.at(addr)
        is_modules = symbol is not None and symbol.module != "" and symbol.is_text
        return is_modules or kernel.has_text(addr)

    def find(name: str) -> Symbol | None:
        found = find_guest().kernel.symbols.find(name)
        if found is None and name in _NOTED and name in noted:
            return Symbol(addr=Addr(noted[name]), name=name, type="d", size=0)
        return found

    type_finder = TypeFinder(prog, types.btf)
    objects = ObjectFinder(type_finder, find, is_code)
    symbols = SymbolFinder(lambda: find_guest().kernel.symbols, is_code)
    prog.register_type_finder(_NAME, type_finder, enable_index=0)
    prog.register_object_finder(_NAME, objects, enable_index=0)
    prog.register_symbol_finder(_NAME, symbols, enable_index=0)


def _reader(read: Callable[[int, int], bytes]) -> Callable[[int, int, int, bool], bytes]:
    def reader(address: int, count: int, offset: int, physical: bool) -> bytes:
        del offset, physical
        try:
            return read(address, count)
        except MemoryFault as error:
            raise FaultError(str(error), error.addr) from None

    return reader


def _note(memory: Memory, kernel: Kernel) -> bytes:
    # The kernel's own VMCOREINFO, or, of one that has none, what drgn cannot do without.
    found = kernel.symbols.find("vmcoreinfo_data")
    if found is not None:
        for text in vmcoreinfo.texts_at(memory.read, found.addr):
            return text
    tables = kernel.symbols.named("swapper_pg_dir").addr
    return (
        f"OSRELEASE={kernel.release}\nPAGESIZE={_PAGE}\n"
        f"SYMBOL(swapper_pg_dir)={tables:x}\nKERNELOFFSET={kernel.slide:x}\n"
    ).encode()
