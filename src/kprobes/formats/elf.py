"""ELF of 64 bits: what a file loads where, its build id, and the parts of a relocatable object.

    Elf64_Phdr: u32 type, u32 flags, u64 offset, u64 vaddr, u64 paddr, u64 filesz, u64 memsz, ...
    Elf64_Nhdr: u32 namesz, u32 descsz, u32 type; then name and desc, each padded to 4 bytes

    Elf64_Shdr: u32 name, u32 type, u64 flags, u64 addr, u64 offset, u64 size, u32 link, u32 info,
                u64 addralign, u64 entsize
    Elf64_Sym:  u32 name, u8 info, u8 other, u16 shndx, u64 value, u64 size
    Elf64_Rela: u64 offset, u64 info (symbol << 32 | type), s64 addend

Written down in the System V ABI, chapters 4 and 5. Reading an object takes 0.1 ms; importing a
library that could takes 50, of a guest's first armed probe.
"""

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from msgspec import Struct

from kprobes.errors import FormatError

MAGIC = b"\x7fELF\x02\x01"
"""64-bit, little endian."""

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_NOTE = struct.Struct("<III")
_PT_LOAD, _PT_INTERP, _PT_NOTE = 1, 3, 4
_NT_GNU_BUILD_ID = 3
_MAX_SEGMENTS = 256
_MAX_NOTES = 1024
_MAX_NOTE = 1 << 16
_BUILD_ID = re.compile(rb"\x04\0\0\0([\x04-\x40])\0\0\0\x03\0\0\0GNU\0", re.DOTALL)

EM_X86_64 = 62
EM_AARCH64 = 183


class Segment(Struct, frozen=True, kw_only=True):
    """One piece of a file that is loaded.

    Attributes:
        addr: where, as linked.
        data: its bytes in the file; memory after them up to its full size is zero.
    """

    addr: int
    data: bytes


class Image(Struct, frozen=True, kw_only=True):
    """What an ELF file loads.

    Attributes:
        machine: the ISA, an ``EM_`` number.
        segments: by address.
        build_id: b"" when it has none.
        needs_loader: it names an interpreter (PT_INTERP), as dynamic programs do.
    """

    machine: int
    segments: tuple[Segment, ...]
    build_id: bytes
    needs_loader: bool = False


def parse(data: bytes) -> Image:
    """Return what an ELF file loads.

    Raises:
        FormatError: no 64-bit little endian ELF, or one that is cut off.
    """
    if not data.startswith(MAGIC) or len(data) < HEADER.size:
        raise FormatError("not a 64-bit little endian ELF file")
    _, _, machine, _, _, table, _, _, _, size, count, *_ = HEADER.unpack_from(data)
    if size != _PROGRAM.size or count > _MAX_SEGMENTS or table + size * count > len(data):
        raise FormatError("ELF: the program headers are damaged")
    headers = [_PROGRAM.unpack_from(data, table + size * i) for i in range(count)]
    if sum(header[5] for header in headers if header[0] in (_PT_LOAD, _PT_NOTE)) > 2 * len(data):
        # Each is copied; a note may lie in what is loaded.
        raise FormatError("ELF: the program headers are damaged")
    loads = [_segment(data, header) for header in headers if header[0] == _PT_LOAD]
    notes = [_segment(data, header) for header in headers if header[0] == _PT_NOTE]
    ids = (build_id(note.data) for note in notes)
    return Image(
        machine=machine,
        segments=tuple(sorted(loads, key=lambda segment: segment.addr)),
        build_id=next((found for found in ids if found), b""),
        needs_loader=any(header[0] == _PT_INTERP for header in headers),
    )


def noted_build_id(read: Callable[[int, int], bytes]) -> bytes:
    """Return a file's build id, of which only its headers and notes are read; b"" if it has none.

    Args:
        read: returns what is at an offset in the file, as many bytes or as there are.
    """
    head = read(0, HEADER.size)
    if not head.startswith(MAGIC) or len(head) < HEADER.size:
        return b""
    notes = ((read(at, size), size) for at, size in _note_places(read, head) if size <= _MAX_NOTE)
    ids = (build_id(note) for note, size in notes if len(note) == size)
    return next((each for each in ids if each), b"")


def _note_places(read: Callable[[int, int], bytes], head: bytes) -> list[tuple[int, int]]:
    # Offset and size in the file; an object has them in sections.
    kind = HEADER.unpack_from(head)[1]
    if kind == ET_REL:
        try:
            headers, _ = _section_headers(read)
        except (struct.error, IndexError):
            return []
        return [(each[4], each[5]) for each in headers if each[1] == _SHT_NOTE]
    return [(each[2], each[5]) for each in _programs(read, head) if each[0] == _PT_NOTE]


def load_places(read: Callable[[int, int], bytes]) -> list[tuple[int, int, int]]:
    """Return offset in the file, bytes, and address as linked, of each piece that is loaded.

    Args:
        read: as of ``noted_build_id``.
    """
    head = read(0, HEADER.size)
    if not head.startswith(MAGIC) or len(head) < HEADER.size:
        return []
    return [(each[2], each[5], each[3]) for each in _programs(read, head) if each[0] == _PT_LOAD]


def _programs(read: Callable[[int, int], bytes], head: bytes) -> list[tuple[int, ...]]:
    # The program headers: none where they cannot be.
    _, _, _, _, _, table, _, _, _, size, count, *_ = HEADER.unpack_from(head)
    if size != _PROGRAM.size or count > _MAX_SEGMENTS:
        return []
    data = read(table, size * count)
    return [_PROGRAM.unpack_from(data, at) for at in range(0, len(data) - size + 1, size)]


def section_addresses(read: Callable[[int, int], bytes], name: str) -> range:
    """Return the addresses of a file's section that is loaded, as linked; none where there is none.

    Args:
        read: as for ``noted_build_id``; the names of all sections are read, and nothing in them.
        name: of the section.

    Raises:
        FormatError: the table of sections is damaged.
    """
    try:
        found, strings = _section_headers(read)
        loaded = (each for each in found if each[2] & _ALLOCATED)
        wanted = next((each for each in loaded if _name(strings, each[0]) == name), None)
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(f"ELF: the section headers are damaged: {error}") from error
    return range(0) if wanted is None else range(wanted[3], wanted[3] + wanted[5])


def _section_headers(read: Callable[[int, int], bytes]) -> tuple[list[tuple[int, ...]], bytes]:
    # And their names.
    header = _unpacked(HEADER, read(0, HEADER.size), 0)
    table, count, names = header[6], header[12], header[13]
    data = read(table, count * SECTION.size)
    found = [_unpacked(SECTION, data, SECTION.size * number) for number in range(count)]
    return found, read(found[names][4], found[names][5])


class LoadedSection(Struct, frozen=True, kw_only=True):
    """A section of an object that is loaded.

    Attributes:
        name: of it.
        size: bytes.
        symbols: offsets in it by the names that the file has once.
    """

    name: str
    size: int
    symbols: Mapping[str, int]


def loaded_sections(read: Callable[[int, int], bytes]) -> list[LoadedSection]:
    """Return what of an object is loaded; none of what is no object.

    Args:
        read: as for ``noted_build_id``; only names and symbols are read.

    Raises:
        FormatError: its sections or symbols are damaged.
    """
    try:
        if not (start := read(0, HEADER.size)).startswith(MAGIC):
            return []
        headers, strings = _section_headers(read)
        is_object = _unpacked(HEADER, start, 0)[1] == ET_REL
        symbols = _by_section(_read_symbols(read, headers))
        return [
            LoadedSection(
                name=_name(strings, each[0]), size=each[5], symbols=symbols.get(number, {})
            )
            for number, each in enumerate(headers)
            if is_object and each[2] & _ALLOCATED
        ]
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(f"ELF: the sections or symbols are damaged: {error}") from error


def _by_section(symbols: Iterable["_Symbol"]) -> dict[int, dict[str, int]]:
    # By the number of their section, those that the file has once.
    seen = Counter[str]()
    found: dict[int, dict[str, int]] = {}
    for name, _, section, value in symbols:
        if name and section:
            seen[name] += 1
            found.setdefault(section, {})[name] = value
    return {
        section: {name: value for name, value in each.items() if seen[name] == 1}
        for section, each in found.items()
    }


def global_data(read: Callable[[int, int], bytes]) -> dict[str, int]:
    """Return the addresses of what a linked file has for its other files but code, by name.

    Args:
        read: as for ``noted_build_id``; only symbols and their names are read.

    Raises:
        FormatError: its symbols are damaged.
    """
    return {
        name: value
        for name, info, section, value in _symbols_of(read)
        if info in _GLOBAL_DATA and section not in (_UNDEFINED, _ABSOLUTE)
    }


def undefined(read: Callable[[int, int], bytes]) -> frozenset[str]:
    """Return the names of what an object expects of others.

    Args:
        read: as for ``noted_build_id``; only symbols and their names are read.

    Raises:
        FormatError: its symbols are damaged.
    """
    return frozenset(
        name for name, _, section, _ in _symbols_of(read) if name and section == _UNDEFINED
    )


class _Symbol(NamedTuple):
    name: str
    info: int
    section: int
    value: int


def _read_symbols(
    read: Callable[[int, int], bytes], headers: Sequence[tuple[int, ...]]
) -> Iterator[_Symbol]:
    table = next((each for each in headers if each[1] == SHT_SYMTAB), None)
    if table is None:
        return
    names = headers[table[6]]
    strings = read(names[4], names[5])
    for at, info, _, section, value, _ in SYMBOL.iter_unpack(read(table[4], table[5])):
        yield _Symbol(_name(strings, at), info, section, value)


def _symbols_of(read: Callable[[int, int], bytes]) -> Iterator[_Symbol]:
    try:
        headers, _ = _section_headers(read)
        yield from _read_symbols(read, headers)
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(f"ELF: the symbols are damaged: {error}") from error


def _segment(data: bytes, header: tuple[int, ...]) -> Segment:
    _, _, offset, vaddr, _, size, _, _ = header
    if offset + size > len(data):
        raise FormatError("ELF: a segment reaches beyond the file's end")
    return Segment(addr=vaddr, data=data[offset : offset + size])


def build_id(notes: bytes) -> bytes:
    """Return the build id in a note section, or b"" when there is none."""
    for owner, kind, desc in _notes(notes):
        if owner == b"GNU\0" and kind == _NT_GNU_BUILD_ID:
            return desc
    return b""


def _notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    at = 0
    for _ in range(_MAX_NOTES):
        if at + _NOTE.size > len(data):
            return
        name_size, desc_size, kind = _NOTE.unpack_from(data, at)
        name_at = at + _NOTE.size
        desc_at = name_at + name_size + -name_size % 4
        at = desc_at + desc_size + -desc_size % 4
        if at > len(data) + 3:
            return
        yield data[name_at : name_at + name_size], kind, data[desc_at : desc_at + desc_size]


def build_id_notes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Return place and value of everything in some bytes that looks like a build id note."""
    for match in _BUILD_ID.finditer(data):
        size = match[1][0]
        yield match.start(), data[match.end() : match.end() + size]


SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELA = struct.Struct("<QQq")
SHT_SYMTAB, _SHT_NOTE, SHT_NOBITS = 2, 7, 8
ET_REL = 1
PER_CPU_SECTION = ".data..percpu"
"""Where a kernel, or a module, has what each CPU has."""
_ALLOCATED = 2
"""SHF_ALLOC."""
_UNDEFINED, _ABSOLUTE = 0, 0xFFF1
_GLOBAL_DATA = (0x10, 0x11, 0x20, 0x21)
"""Global and weak symbols of no type, or of an object's."""


class Section(Struct, frozen=True, kw_only=True):
    """One section: its name, type, size, bytes (none of .bss), and the section it refers to."""

    name: str
    type: int
    size: int
    data: bytes
    link: int


class Rela(Struct, frozen=True, kw_only=True):
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
        raw, strings = _section_headers(lambda at, size: data[at : at + size])
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
    places = range(0, len(symbols.data), SYMBOL.size)
    table = [_name(names, _unpacked(SYMBOL, symbols.data, at)[0]) for at in places]
    return [_rela(rela.data, at, table) for at in range(0, len(rela.data), RELA.size)]


def _rela(data: bytes, at: int, names: list[str]) -> Rela:
    offset, info, addend = _unpacked(RELA, data, at)
    return Rela(offset=offset, kind=info & 0xFFFF_FFFF, symbol=names[info >> 32], addend=addend)


def _unpacked(form: struct.Struct, data: bytes, at: int) -> tuple[int, ...]:
    return cast("tuple[int, ...]", form.unpack_from(data, at))


def _bytes(data: bytes, section: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size, *_ = section
    return b"" if kind == SHT_NOBITS else data[offset : offset + size]


def _name(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
