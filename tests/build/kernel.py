"""A kernel of few names for tests: symbols, types and resolved probes."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import AmbiguousSymbolError, UnknownSymbolError, UnknownTypeError
from kprobes.lang.parser import parse
from kprobes.model.abi import WALK_STACK, WALK_USER_STACK
from kprobes.model.definition import Definition, SyntheticFields
from kprobes.model.kernel import CType, Kernel, MemberPlace, Prototype, Symbol, Types
from kprobes.model.resolved import Resolved
from kprobes.resolve.resolve import resolve
from kprobes.units import Addr

TEXT = 0xFFFF_FFFF_8100_0000
SITE = TEXT + 0x1000
DATA_SYMBOL = TEXT + 0x8000
THIS_CPU_OFF = 0x1A000


def symbol(name: str, addr: int, *, type: str = "T", size: int = 0x40, module: str = "") -> Symbol:
    """Return one symbol; text of the kernel itself unless told otherwise."""
    return Symbol(addr=Addr(addr), name=name, type=type, size=size, module=module)


class FakeSymbols(Struct, frozen=True):
    """Names in a list. Implements ``model.kernel.Symbols``."""

    all: Sequence[Symbol]

    def __len__(self) -> int:
        return len(self.all)

    def named(self, name: str) -> Symbol:
        found = self.all_named(name)
        if not found:
            near = difflib.get_close_matches(name, [symbol.name for symbol in self.all])
            raise UnknownSymbolError(name, tuple(near))
        if len({symbol.addr for symbol in found}) > 1:
            raise AmbiguousSymbolError(name, tuple(symbol.addr for symbol in found))
        return found[0]

    def find(self, name: str) -> Symbol | None:
        return next(iter(self.all_named(name)), None)

    def all_named(self, name: str) -> tuple[Symbol, ...]:
        return tuple(symbol for symbol in self.all if symbol.name == name)

    def is_unique(self, name: str) -> bool:
        return len(self.all_named(name)) == 1

    def at(self, addr: int) -> Symbol | None:
        inside = (s for s in self.all if s.addr <= addr < s.addr + s.size)
        return next(inside, None)

    def is_fleeting(self, addr: int) -> bool:
        del addr
        return False

    def glob(self, pattern: str) -> tuple[Symbol, ...]:
        return tuple(s for s in self.all if fnmatch.fnmatchcase(s.name, pattern))


class FakeTypes(Struct, frozen=True):
    """Struct members at offsets, by ``struct.path``. Implements ``model.kernel.Types``."""

    members: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def offset(self, struct: str, path: str) -> int:
        return self._member(struct, path)[0]

    def member_size(self, struct: str, path: str) -> int:
        return self._member(struct, path)[1]

    def size(self, struct: str) -> int:
        ends = [sum(place) for path, place in self.members.items() if path.startswith(f"{struct}.")]
        if not ends:
            raise UnknownTypeError(struct)
        return max(ends)

    def enumerator(self, name: str) -> int:
        raise UnknownTypeError(name)

    def function(self, name: str) -> Prototype | None:
        del name
        return None

    def struct(self, name: str) -> int | None:
        del name
        return None

    def describe(self, number: int) -> CType:
        raise UnknownTypeError(str(number))

    def member(self, number: int, name: str) -> MemberPlace | None:
        raise UnknownTypeError(f"{number}.{name}")

    def enumerators(self, number: int) -> tuple[tuple[int, str], ...]:
        raise UnknownTypeError(str(number))

    def member_names(self, number: int) -> tuple[str, ...]:
        raise UnknownTypeError(str(number))

    def named(self, name: str) -> int | None:
        del name
        return None

    def type_name(self, number: int) -> str:
        raise UnknownTypeError(str(number))

    def _member(self, struct: str, path: str) -> tuple[int, int]:
        if f"{struct}.{path}" not in self.members:
            raise UnknownTypeError(f"{struct}.{path}")
        return self.members[f"{struct}.{path}"]


def make_kernel(
    symbols: Sequence[Symbol],
    *,
    types: Types | Mapping[str, tuple[int, int]] | None = None,
    release: str = "6.1.0-56-cloud-amd64",
) -> Kernel:
    """Return a kernel of these symbols; without types unless some, or members, are given."""
    return Kernel(
        release=release,
        banner=f"Linux version {release}",
        arch="x86_64",
        build_id=bytes(range(20)),
        slide=0,
        text=(Addr(TEXT), Addr(TEXT + 0x100_0000)),
        symbols=FakeSymbols(symbols),
        types=FakeTypes(types) if isinstance(types, Mapping) else types,
    )


def read(text: str) -> Definition:
    """Parse one definition for x86-64."""
    return parse(text, registers=X86_64.registers)


def make_probe(
    text: str | Definition,
    *,
    event_id: int = 1,
    addr: int = SITE,
    this_cpu_off: int = THIS_CPU_OFF,
) -> Resolved:
    """Resolve a definition on a function ``f`` that begins at its ftrace site."""
    kernel = make_kernel(
        [
            symbol("f", addr),
            symbol("data", DATA_SYMBOL, type="D"),
            symbol("this_cpu_off", this_cpu_off, type="d"),
            symbol(WALK_STACK, TEXT),
            symbol(WALK_USER_STACK, TEXT),
        ]
    )
    definition = read(text) if isinstance(text, str) else text
    return resolve(definition, kernel, X86_64, event_id=event_id, locate=lambda each: each.addr)


def make_extra(text: str, synthetic_fields: SyntheticFields) -> Resolved:
    """Resolve a definition on a function ``f`` with extra fields."""
    definition = replace(read(text), synthetic_fields=synthetic_fields)
    walkers = [symbol(WALK_STACK, TEXT), symbol(WALK_USER_STACK, TEXT)]
    kernel = make_kernel([symbol("f", SITE), *walkers])
    return resolve(definition, kernel, X86_64, event_id=1, locate=lambda symbol: symbol.addr)
