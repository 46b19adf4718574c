"""A relocatable ELF object's sections, symbols and relocations, as a compiler writes them.

    Elf64_Shdr: u32 name, u32 type, u64 flags, u64 addr, u64 offset, u64 size, u32 link, u32 info,
                u64 addralign, u64 entsize
    Elf64_Sym:  u32 name, u8 info, u8 other, u16 shndx, u64 value, u64 size
    Elf64_Rela: u64 offset, u64 info (symbol << 32 | type), s64 addend

Written down in the System V ABI, chapter 4. Reading one takes 0.1 ms; importing a library that
could takes 50, of a guest's first armed probe.
"""

import struct
from dataclasses import dataclass
from typing import cast

from kprobes.errors import FormatError
from kprobes.formats.elf import MAGIC

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")
_NOBITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section: its name, type, size, bytes (none of .bss), and the section it refers to."""

    name: str
    type: int
    size: int
    data: bytes
    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rela:
    """One relocation: the symbol's name, and the number that the ABI gives its kind."""

    offset: int
    kind: int
    symbol: str
    addend: int


def sections(data: bytes) -> list[Section]:
    """Return an object's sections, in file order.

    Raises:
        FormatError: no 64-bit little endian ELF, or damaged.
    """
    if not data.startswith(MAGIC):
        raise FormatError("not a 64-bit little endian ELF object")
    try:
        header = _unpacked(_HEADER, data, 0)
        table, count, names = header[6], header[12], header[13]
        raw = [_unpacked(_SECTION, data, table + _SECTION.size * i) for i in range(count)]
        strings = _bytes(data, raw[names])
    except (struct.error, IndexError) as error:
        raise FormatError(f"ELF: the section headers are damaged: {error}") from error
    return [
        Section(name=_name(strings, s[0]), type=s[1], size=s[5], data=_bytes(data, s), link=s[6])
        for s in raw
    ]


def relocations(found: list[Section], of: str) -> list[Rela]:
    """Return the relocations of a section, by its name."""
    rela = next((section for section in found if section.name == f".rela{of}"), None)
    if rela is None:
        return []
    symbols = found[rela.link]
    names = found[symbols.link].data
    places = range(0, len(symbols.data), _SYMBOL.size)
    table = [_name(names, _unpacked(_SYMBOL, symbols.data, at)[0]) for at in places]
    return [_rela(rela.data, at, table) for at in range(0, len(rela.data), _RELA.size)]


def _rela(data: bytes, at: int, names: list[str]) -> Rela:
    offset, info, addend = _unpacked(_RELA, data, at)
    return Rela(offset=offset, kind=info & 0xFFFF_FFFF, symbol=names[info >> 32], addend=addend)


def _unpacked(form: struct.Struct, data: bytes, at: int) -> tuple[int, ...]:
    return cast("tuple[int, ...]", form.unpack_from(data, at))


def _bytes(data: bytes, section: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size, *_ = section
    return b"" if kind == _NOBITS else data[offset : offset + size]


def _name(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
