"""The sections of a loaded module: by symbols that its file has, too, and by what it notes itself.

The kernel moves each section of a module to a place of its own, and notes where for
/sys/module/NAME/sections; of what it gave back as well. Those notes tell where data is in kernels
that have no names of it.

struct module { ... struct module_sect_attrs *sect_attrs; ... void *percpu; };
struct module_sect_attrs { struct attribute_group { ... struct bin_attribute **bin_attrs; } grp; };
struct module_sect_attr { struct bin_attribute { struct attribute { const char *name; } attr; ...
        void *private; } battr; unsigned long address; };   // since v6.14 private is the address
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.formats.elf import PER_CPU_SECTION, LoadedSection, build_id_notes
from kprobes.image.modules import read_up_to
from kprobes.image.symbols import ModuleSymbols, loaded_modules
from kprobes.model.kernel import Kernel, Types
from kprobes.ports import Memory
from kprobes.units import MIB

_PAGE = 4096
_MAX_SECTIONS, _MAX_NAME = 1024, 256
_MAX_RANGE, _MAX_BUILDS = 64 * MIB, 16
"""Of what a hostile guest may have: all of it is read, and every build is asked servers for."""


def places_of_sections(
    sections: Sequence[LoadedSection], module: ModuleSymbols, noted: Mapping[str, int]
) -> dict[str, range]:
    """Return the addresses of each of a module's sections that is there now, as far as is known.

    Args:
        sections: of its file.
        module: as it is loaded.
        noted: where they begin, as ``noted_sections`` has it.

    Raises:
        FormatError: the file is of another build: its symbols are not so far from each other.
    """
    known, names = _by_name(module), Counter(each.name for each in sections)
    unique = [each for each in sections if names[each.name] == 1]
    found = dict[str, range]()
    for section in unique:
        starts = {known[name] - offset for name, offset in section.symbols.items() if name in known}
        if len(starts) > 1:
            raise FormatError(
                f"its {section.name} is another than that of the loaded {module.name}"
            )
        for start in starts:
            found[section.name] = range(start, start + section.size)
    if not found:
        raise FormatError(f"it has no symbol of the loaded {module.name}")
    others = (each for each in unique if each.name in noted and each.name not in found)
    return found | {
        each.name: range(noted[each.name], noted[each.name] + each.size) for each in others
    }


def _by_name(module: ModuleSymbols) -> Mapping[str, int]:
    # Addresses by the names that it has once.
    names = module.table.blob[1:-1].split(b"\0")
    seen, addrs = Counter(names), module.table.addrs.tolist()
    return {
        name.decode(errors="backslashreplace"): addr
        for name, addr in zip(names, addrs, strict=False)
        if seen[name] == 1
    }


def noted_sections(memory: Memory, types: Types | None, module: ModuleSymbols) -> dict[str, int]:
    """Return where a module's sections begin that it still has; none where that is not noted.

    Args:
        memory: of the kernel.
        types: of it.
        module: as it is loaded.
    """
    if types is None or not module.record:
        return {}
    try:
        places = dict(_noted(memory, types, module.record))
    except (UnknownTypeError, MemoryFault):
        return {}
    kept = [each for each in module.ranges if each not in module.fleeting]
    return {
        name: addr
        for name, addr in places.items()
        if name == PER_CPU_SECTION or any(start <= addr < stop for start, stop in kept)
    }


def _noted(memory: Memory, types: Types, record: int) -> Iterator[tuple[str, int]]:
    percpu = _pointer(memory, record + types.offset("module", "percpu"))
    if percpu:
        yield PER_CPU_SECTION, percpu
    attributes = _pointer(memory, record + types.offset("module", "sect_attrs"))
    at = _pointer(memory, attributes + types.offset("module_sect_attrs", "grp.bin_attrs"))
    name = types.offset("bin_attribute", "attr.name")
    try:
        place = types.offset("module_sect_attr", "address")
    except UnknownTypeError:
        place = types.offset("bin_attribute", "private")
    for slot in range(at, at + 8 * _MAX_SECTIONS, 8):
        attribute = _pointer(memory, slot)
        if not attribute:
            return
        text = read_up_to(memory, _pointer(memory, attribute + name), _MAX_NAME).split(b"\0")[0]
        yield text.decode(errors="backslashreplace"), _pointer(memory, attribute + place)


def _pointer(memory: Memory, addr: int) -> int:
    return int.from_bytes(memory.read(addr, 8), "little")


def build_ids(memory: Memory, module: ModuleSymbols) -> frozenset[bytes]:
    """Return all that may be a loaded module's build id; none where it has none.

    Args:
        memory: of the kernel.
        module: as it is loaded.
    """
    ranges = (each for each in module.ranges if each not in module.fleeting)
    pieces = (piece for start, stop in ranges for piece in _read(memory, start, stop))
    found = (build_id for piece in pieces for _, build_id in build_id_notes(piece))
    return frozenset(islice(found, _MAX_BUILDS))


def _read(memory: Memory, start: int, stop: int) -> Iterator[bytes]:
    # What is mapped, together.
    pages: list[bytes] = []
    for at in range(start, min(stop, start + _MAX_RANGE), _PAGE):
        try:
            pages.append(memory.read(at, min(_PAGE, stop - at)))
        except MemoryFault:
            yield b"".join(pages)
            pages = []
    yield b"".join(pages)


def loaded_module(kernel: Kernel, name: str) -> ModuleSymbols | None:
    """Return a module of a kernel as it is loaded, or None."""
    return next((module for module in loaded_modules(kernel) if module.name == name), None)
