"""Where a kernel build keeps what describes its loaded modules, looked up once in its types.

struct module { enum module_state state; struct list_head list; char name[56]; ...
                const struct kernel_symbol *syms; unsigned int num_syms; ... gpl_syms alike
                struct mod_kallsyms *kallsyms;
                struct module_layout core_layout { void *base; unsigned int size; ... };
                // since v6.4: struct module_memory mem[MOD_MEM_NUM_TYPES] { base, size };
struct mod_kallsyms { Elf64_Sym *symtab; unsigned int num_symtab; char *strtab, *typetab; };
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kprobes.errors import UnknownTypeError
from kprobes.model.types import Types

_MAX_STRUCT = 1 << 16
_MAX_RANGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A number in a struct's bytes."""

    offset: int
    size: int

    def of(self, data: bytes) -> int:
        """Return its value, unsigned."""
        return int.from_bytes(data[self.offset : self.offset + self.size], "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """The fields of struct module and what it points to.

    Attributes:
        size: of struct module.
        ranges: (base, size) of each piece of memory that a module owns.
        fleeting: those of them that it gives back when it has begun.
        exports: (array, count) of each table of exported symbols.
        export_size: of struct kernel_symbol.
        table_size: of struct mod_kallsyms.
        table: its symtab, num_symtab, strtab and typetab.
    """

    size: int
    next: Field
    state: Field
    name: Field
    kallsyms: Field
    ranges: tuple[tuple[Field, Field], ...]
    fleeting: tuple[tuple[Field, Field], ...]
    exports: tuple[tuple[Field, Field], ...]
    export_size: int
    table_size: int
    table: tuple[Field, Field, Field, Field]


def layout_of(types: Types) -> ModuleLayout:
    """Look a kernel's layout up.

    Raises:
        UnknownTypeError: its types have no modules, or none that could be.
    """

    def field(path: str, struct: str = "module") -> Field:
        return Field(offset=types.offset(struct, path), size=types.member_size(struct, path))

    ranges = tuple(_ranges(types))[:_MAX_RANGES]
    return ModuleLayout(
        size=_sane(types.size("module")),
        next=field("list.next"),
        state=field("state"),
        name=field("name"),
        kallsyms=field("kallsyms"),
        ranges=ranges,
        fleeting=ranges[_first_fleeting(types) :],
        exports=tuple(_exports(types)),
        export_size=_sane(types.size("kernel_symbol")),
        table_size=_sane(types.size("mod_kallsyms")),
        table=(
            field("symtab", "mod_kallsyms"),
            field("num_symtab", "mod_kallsyms"),
            field("strtab", "mod_kallsyms"),
            field("typetab", "mod_kallsyms"),
        ),
    )


def _sane(size: int) -> int:
    if not 0 < size <= _MAX_STRUCT:
        raise UnknownTypeError(f"a struct of {size} bytes")
    return size


def _ranges(types: Types) -> Iterator[tuple[Field, Field]]:
    struct, places = _memories(types)
    base, base_size = types.offset(struct, "base"), types.member_size(struct, "base")
    size, size_size = types.offset(struct, "size"), types.member_size(struct, "size")
    for at in places:
        yield Field(offset=at + base, size=base_size), Field(offset=at + size, size=size_size)


def _memories(types: Types) -> tuple[str, list[int]]:
    # The struct that describes a piece of memory, and where in struct module each of them is.
    try:
        start, total = types.offset("module", "mem"), types.member_size("module", "mem")
    except UnknownTypeError:
        names = ("core_layout", "init_layout")
        return "module_layout", [types.offset("module", name) for name in names]
    step = _sane(types.size("module_memory"))
    return "module_memory", [start + at for at in range(0, min(total, _MAX_STRUCT), step)]


def _first_fleeting(types: Types) -> int:
    # enum mod_mem_type; before it core_layout came first, and init_layout second.
    try:
        types.offset("module", "mem")
        return types.enumerator("MOD_INIT_TEXT")
    except UnknownTypeError:
        return 1


def _exports(types: Types) -> Iterator[tuple[Field, Field]]:
    # Since v6.18 or so one table holds both kinds.
    for prefix in ("", "gpl_"):
        try:
            paths = (f"{prefix}syms", f"num_{prefix}syms")
            array, count = (
                Field(offset=types.offset("module", p), size=types.member_size("module", p))
                for p in paths
            )
        except UnknownTypeError:
            continue
        yield array, count
