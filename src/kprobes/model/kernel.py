"""One running kernel, as found in its memory or its image: symbols, text and types."""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from msgspec import Struct, field

from kprobes.errors import UnknownTypeError
from kprobes.units import Addr


class Symbol(Struct, frozen=True, kw_only=True):
    """One kallsyms entry.

    Attributes:
        addr: where it is in the running kernel.
        name: without module.
        type: nm's letter: ``t`` and ``T`` are text.
        size: bytes up to the next symbol of another address, as kallsyms counts it.
        module: the owner, or "" for the kernel itself.
    """

    addr: Addr
    name: str
    type: str
    size: int
    module: str = ""

    @property
    def is_text(self) -> bool:
        """Whether this is code."""
        return self.type in "tTwW"

    def place(self, addr: int) -> str:
        """Return an address inside it as the kernel prints it: ``sym+0x1/0x40 [module]``."""
        module = f" [{self.module}]" if self.module else ""
        return f"{self.name}+{addr - self.addr:#x}/{self.size:#x}{module}"


class Symbols(Protocol):
    """All names of one kernel, its loaded modules included."""

    def __len__(self) -> int:
        """Return how many names there are."""
        ...

    def named(self, name: str) -> Symbol:
        """Return the one symbol of this name.

        Raises:
            UnknownSymbolError: there is none; carries near names.
            AmbiguousSymbolError: there are several at different addresses.
        """
        ...

    def find(self, name: str) -> Symbol | None:
        """Return the first symbol of this name, or None."""
        ...

    def all_named(self, name: str) -> tuple[Symbol, ...]:
        """Return every symbol of this name."""
        ...

    def is_unique(self, name: str) -> bool:
        """Whether there is one symbol of this name."""
        ...

    def at(self, addr: int) -> Symbol | None:
        """Return the symbol that kallsyms prints for an address inside it, or None.

        Among aliases at one address it is the kernel's own choice: the one that
        kallsyms_lookup finds in the running kernel.
        """
        ...

    def is_fleeting(self, addr: int) -> bool:
        """Whether an address is in memory that a module gives back as soon as it has begun."""
        ...

    def glob(self, pattern: str) -> tuple[Symbol, ...]:
        """Return the symbols whose names match a shell pattern, by address."""
        ...


def place_of(symbols: Symbols, addr: int) -> str:
    """Return how ``%pS`` prints an address: by its symbol, or as a number when it has none."""
    symbol = symbols.at(addr)
    return symbol.place(addr) if symbol is not None else f"{addr:#x}"


def span_of(symbols: Symbols, place: str | int) -> tuple[int, int] | None:
    """Return where a function begins and ends: by its name or an address in it; None if none."""
    found = symbols.find(place) if isinstance(place, str) else symbols.at(place)
    return None if found is None else (found.addr, found.addr + found.size)


def name_of(symbols: Symbols, addr: int) -> str:
    """Return an address as a disassembler names it: ``sym``, ``sym+0x12``, or as a number."""
    symbol = symbols.at(addr)
    if symbol is None:
        return f"{addr:#x}"
    offset = f"+{addr - symbol.addr:#x}" if addr != symbol.addr else ""
    module = f" [{symbol.module}]" if symbol.module else ""
    return f"{symbol.name}{offset}{module}"


class TextPart(Struct, frozen=True, kw_only=True):
    """One piece of a function: its own range, or that of its ``.cold`` part.

    Attributes:
        addr: where it is.
        code: its bytes, as they were before anybody's probes changed them.
    """

    addr: Addr
    code: bytes

    @property
    def stop(self) -> Addr:
        """The first address after it."""
        return Addr(self.addr + len(self.code))


class Forbidden(Struct, frozen=True, kw_only=True):
    """Addresses [start, stop) that may carry no probe, and why."""

    start: Addr
    stop: Addr
    why: str


class TextTables(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """What a kernel's tables say of its text; what is empty is not known.

    Attributes:
        exceptions: instructions whose faults the exception table repairs, to where.
        jump_labels: instructions that the kernel flips between nop and jump, to their target.
        static_calls: instructions that the kernel points elsewhere while it runs.
        ftrace: sites of the kernel's function tracer.
        pointers: where it keeps eight bytes in front of functions, each an ftrace_ops' address.
        alternatives: (start, stop) of text that is still rewritten: in images at boot; of a kernel
            that has begun with one CPU the prefixes that come back with a second one.
        replacements: by such text's start: each code that boot may put there, where it is linked,
            and the first address after the text.
        annexes: by address, code elsewhere that functions run as part of themselves: repairs of
            faults, and what alternatives jump to until boot has rewritten them.
        forbidden: by address, overlapping nowhere.
        probed: by address, what the kernel's own kprobes have at this moment; may overlap.
        forbidden_names: of the functions there: what compilers split from one, and name after
            it with a suffix, is forbidden too.
        returns: return thunks: a jump there is a return.
        indirect: retpolines: a call or jump there goes wherever a register says.
        has_jump_tables: whether the compiler may have made any: not with retpolines or IBT.
        has_landing_pads: whether calls through pointers land only on instructions made for it,
            which then must stay; True where that is not known.
        no_return: functions that never come back to their caller.
        missing: what says where probes do harm and was not found, in words; "" when all was.
    """

    exceptions: Mapping[int, int] = field(default_factory=dict[int, int])
    jump_labels: Mapping[int, int] = field(default_factory=dict[int, int])
    static_calls: frozenset[int] = frozenset()
    ftrace: frozenset[int] = frozenset()
    pointers: frozenset[int] = frozenset()
    alternatives: tuple[tuple[int, int], ...] = ()
    replacements: Mapping[int, tuple[tuple[TextPart, Addr], ...]] = field(
        default_factory=dict[int, tuple[tuple[TextPart, Addr], ...]]
    )
    annexes: Mapping[int, TextPart] = field(default_factory=dict[int, TextPart])
    forbidden: tuple[Forbidden, ...] = ()
    probed: tuple[Forbidden, ...] = ()
    forbidden_names: frozenset[str] = frozenset()
    returns: frozenset[int] = frozenset()
    indirect: frozenset[int] = frozenset()
    has_jump_tables: bool = True
    has_landing_pads: bool = True
    no_return: frozenset[int] = frozenset()
    missing: str = ""

    @cached_property
    def table_targets(self) -> frozenset[int]:
        """Where the exception table and jump labels lead."""
        return frozenset((*self.exceptions.values(), *self.jump_labels.values()))

    @cached_property
    def table_sources(self) -> frozenset[int]:
        """The instructions that these belong to."""
        return frozenset((*self.exceptions, *self.jump_labels))


class Parameter(Struct, frozen=True, kw_only=True):
    """One parameter of a function: its name, its type as C writes it, and that type's number."""

    name: str
    type: str
    number: int = 0


class Prototype(Struct, frozen=True, kw_only=True):
    """A function's signature.

    Attributes:
        returned: the number of the type that it returns; 0 is void.
    """

    name: str
    returns: str
    parameters: tuple[Parameter, ...]
    returned: int = 0


class TypeKind(StrEnum):
    """What a type is once typedefs and qualifiers are taken off."""

    VOID = "void"
    INT = "int"
    POINTER = "pointer"
    AGGREGATE = "aggregate"
    ARRAY = "array"
    ENUM = "enum"
    OTHER = "other"


class CType(Struct, frozen=True, kw_only=True):
    """One type without its typedefs and qualifiers.

    Attributes:
        kind: AGGREGATE is a struct or a union; OTHER are floats, functions, unknown structs.
        number: by which the types know it.
        name: of an aggregate, an enum or an INT; ``""`` when it has none.
        size: bytes; 0 where the types do not say.
        target: number of what a pointer points to, or an array consists of.
        count: elements of an array.
        bits: that an INT has, which are fewer than its bytes in some old bit-fields.
        bit_offset: of those in the INT's bytes.
        is_signed: of an INT.
    """

    kind: TypeKind
    number: int
    name: str = ""
    size: int = 0
    target: int = 0
    count: int = 0
    bits: int = 0
    bit_offset: int = 0
    is_signed: bool = False


def value_range(type_: CType) -> range | None:
    """Return the numbers that a type's values are, or None where they are not numbers.

    A pointer may be written as a negative errno, too.
    """
    match type_.kind:
        case TypeKind.INT if type_.name == "_Bool":
            return range(2)
        case TypeKind.INT | TypeKind.ENUM if 0 < type_.size <= 8:
            bits = 8 * type_.size
            if type_.kind is TypeKind.ENUM:
                return range(-(1 << bits - 1), 1 << bits)
            return range(-(1 << bits - 1), 1 << bits - 1) if type_.is_signed else range(1 << bits)
        case TypeKind.POINTER:
            return range(-(1 << 63), 1 << 64)
        case _:
            return None


class MemberPlace(Struct, frozen=True, kw_only=True):
    """Where a member is in its aggregate, those of anonymous ones inside included.

    Attributes:
        bit_offset: from the aggregate's beginning.
        bit_size: of a bit-field, else 0.
        number: of the member's type.
    """

    bit_offset: int
    bit_size: int
    number: int


class Types(Protocol):
    """The types of one kernel.

    Numbers name types that have no name of their own; they come from ``function``, ``struct``
    and the answers about other types, and mean nothing to another kernel's.
    """

    def offset(self, struct: str, path: str) -> int:
        """Return the byte offset of ``path`` (``a.b``; anonymous members are transparent).

        Raises:
            UnknownTypeError: no such struct or member, or a bit-field.
        """
        ...

    def member_size(self, struct: str, path: str) -> int:
        """Return the size in bytes of that member; UnknownTypeError as for ``offset``."""
        ...

    def size(self, struct: str) -> int:
        """Return a struct's size in bytes; UnknownTypeError when there is none."""
        ...

    def enumerator(self, name: str) -> int:
        """Return an enumerator's value by its name alone; UnknownTypeError when there is none."""
        ...

    def function(self, name: str) -> Prototype | None:
        """Return a function's signature, or None when the types have none."""
        ...

    def struct(self, name: str) -> int | None:
        """Return the number of the struct of this name, or None when there is none."""
        ...

    def describe(self, number: int) -> CType:
        """Return what a type is."""
        ...

    def member(self, number: int, name: str) -> MemberPlace | None:
        """Return where an aggregate has a member, or None when it has none of this name."""
        ...

    def enumerators(self, number: int) -> tuple[tuple[int, str], ...]:
        """Return value and name of each enumerator of an enum, in their order."""
        ...

    def member_names(self, number: int) -> tuple[str, ...]:
        """Return the names of an aggregate's members, those of anonymous ones inside included."""
        ...

    def named(self, name: str) -> int | None:
        """Return the number of a type by its name in C: ``struct file``, ``size_t``; or None."""
        ...

    def type_name(self, number: int) -> str:
        """Return how C writes a type."""
        ...


SYSTEM_CALLS = ("__x64_sys_", "__arm64_sys_")
"""What the names of system calls' functions begin with, since 4.17."""
_VERSION = re.compile(r"(\d+)\.(\d+)")


class Kernel(Struct, frozen=True, kw_only=True, eq=False):
    """What planning and compiling know of the target's kernel.

    Attributes:
        release: ``uname -r``, such as ``6.1.0-56-cloud-amd64``.
        banner: the whole "Linux version" line.
        arch: the registry name of its architecture, ``x86_64`` or ``aarch64``.
        build_id: of its vmlinux, or b"" when the kernel does not carry one.
        slide: KASLR's shift of the kernel's text, bytes.
        text: addresses [start, stop) of ``_stext`` to ``_etext``.
        init_text: of ``_sinittext`` to ``_einittext`` while it is there: boot frees it.
        symbols: its names, at their running addresses.
        types: its BTF, or None when it has none.
        module_types: of each loaded module that brings types, together with the kernel's.
        members: where there are no types, places that were found without, by ``struct.path``.
    """

    release: str
    banner: str
    arch: str
    build_id: bytes
    slide: int
    text: tuple[Addr, Addr]
    symbols: Symbols
    types: Types | None
    module_types: Mapping[str, Types] = field(default_factory=dict[str, Types])
    members: Mapping[str, int] = field(default_factory=dict[str, int])
    init_text: tuple[Addr, Addr] | None = None

    @property
    def texts(self) -> tuple[tuple[Addr, Addr], ...]:
        """The kernel's own text that is there now, that of modules not among it."""
        return (self.text,) if self.init_text is None else (self.text, self.init_text)

    def has_text(self, addr: int) -> bool:
        """Whether an address is in the kernel's own text, as it is there now."""
        return any(start <= addr < stop for start, stop in self.texts)

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor of the release."""
        return version_of(self.release)

    def offset(self, struct: str, path: str) -> int:
        """Return the byte offset of a member that probing itself needs; see ``Types.offset``.

        Raises:
            UnknownTypeError: there is no such member, or no types, and it was not found without.
        """
        if self.types is not None:
            return self.types.offset(struct, path)
        place = self.members.get(f"{struct}.{path}")
        if place is None:
            raise UnknownTypeError(
                f"kernel {self.release} carries no type information (CONFIG_DEBUG_INFO_BTF), and "
                f"where {struct} has its {path} is not known: give --vmlinux a file of this build "
                "with BTF or debug info"
            )
        return place

    def types_for(self, module: str) -> Types | None:
        """Return the types that code of a module, or of the kernel itself (``""``), has."""
        return self.module_types.get(module, self.types) if module else self.types


def version_of(release: str) -> tuple[int, int]:
    """Return major and minor of a release."""
    found = _VERSION.match(release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
