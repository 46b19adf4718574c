"""The functions of an ELF file of any kind, their bytes, and the tables that name places in them.

    Elf64_Shdr, Elf64_Sym, Elf64_Rela: as in ``formats.elf``

In an object (ET_REL) a place is an offset in its section, and what a table or an operand holds is
in relocations. In a linked file places are addresses; a position-independent one has its tables'
entries in relocations of the kind RELATIVE, and others' functions behind slots that the dynamic
linker fills. System V ABI, chapters 4 and 5, and the processors' supplements.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator

from msgspec import Struct

from kprobes.errors import FormatError
from kprobes.formats.elf import (
    EM_AARCH64,
    EM_X86_64,
    ET_REL,
    HEADER,
    MAGIC,
    RELA,
    SECTION,
    SHT_NOBITS,
    SHT_SYMTAB,
    SYMBOL,
)

_SHT_RELA, _SHT_DYNSYM = 4, 11
_STT_FUNC = 2
_RELATIVE = {EM_X86_64: 8, EM_AARCH64: 1027}
_WORD = 8
_MAX_SECTIONS = 1 << 16

Place = tuple[int, int]
"""The number of a section and an offset in an object; 0 and an address in a linked file."""


class ElfFunction(Struct, frozen=True, kw_only=True):
    """One function.

    Attributes:
        name: its symbol; of several the first.
        place: where it begins.
        size: bytes.
        section: the name of its section.
    """

    name: str
    place: Place
    size: int
    section: str


class _Section(Struct, frozen=True, kw_only=True):
    name: str
    type: int
    addr: int
    offset: int
    size: int
    link: int
    info: int


class _Symbol(Struct, frozen=True, kw_only=True):
    name: str
    is_function: bool
    section: int
    value: int
    size: int


class ElfFunctions:
    """What a file has.

    Attributes:
        machine: the ISA, an ``EM_`` number.
    """

    def __init__(self, data: bytes) -> None:
        """Read the tables of a file.

        Raises:
            FormatError: no 64-bit little endian ELF file, damaged, or one without symbols.
        """
        if not data.startswith(MAGIC):
            raise FormatError("not a 64-bit little endian ELF file")
        self._data = data
        try:
            header = HEADER.unpack_from(data)
            self._is_object, self.machine = header[1] == ET_REL, header[2]
            self._sections = self._read_sections(header)
            self._read()
        except (struct.error, IndexError, OverflowError, ValueError) as error:
            raise FormatError(f"ELF: it is damaged: {error}") from error

    def functions(self) -> Iterator[ElfFunction]:
        """Yield the functions that have code here, by place."""
        found: dict[Place, ElfFunction] = {}
        for symbol in self._symbols:
            if symbol.is_function and 0 < symbol.section < len(self._sections):
                place = self._place(symbol)
                found.setdefault(
                    place,
                    ElfFunction(
                        name=symbol.name,
                        place=place,
                        size=symbol.size,
                        section=self._sections[symbol.section].name,
                    ),
                )
        yield from (found[place] for place in sorted(found))

    def around(self, place: Place, before: int, after: int) -> tuple[bytes, bytes]:
        """Return bytes that end where a place is, and such that begin there: what its section has.

        Args:
            place: in code.
            before: bytes at most.
            after: likewise.
        """
        section = self._section_of(place)
        if section is None or section.type == SHT_NOBITS:
            return b"", b""
        start, at = section.offset, place[1] - (0 if self._is_object else section.addr)
        if not 0 <= at <= section.size:
            return b"", b""
        stop = min(at + after, section.size)
        return (
            self._data[start + max(at - before, 0) : start + at],
            self._data[start + at : start + stop],
        )

    def has_data(self, place: Place, before: int) -> bool:
        """Return whether symbols tell of data in the bytes before a place, as arm64's ``$d`` do."""
        section, start = place
        return any((section, at) in self._data_at for at in range(start - before, start))

    def listed(self, name: str) -> set[Place]:
        """Return the places that all tables of a name have."""
        found: set[Place] = set()
        for number, section in enumerate(self._sections):
            if section.name == name and section.type not in (_SHT_RELA, SHT_NOBITS):
                found.update(self._entries(number, section))
        return found

    def symbol_of(self, place: Place, size: int) -> str:
        """Return the symbol that an object's relocation puts into an instruction, or ""."""
        names = self._relocated.get(place[0], {}) if self._is_object else {}
        return next((names[at] for at in range(place[1], place[1] + size) if at in names), "")

    def slot(self, addr: int) -> str:
        """Return the symbol whose address the dynamic linker puts into a slot, or ""."""
        return self._slots.get(addr, "")

    def function_at(self, addr: int) -> str:
        """Return the name of a linked file's function that begins at an address, or ""."""
        return "" if self._is_object else self._named.get((0, addr), "")

    def has_function(self, name: str) -> bool:
        """Return whether there is a function of a name."""
        return name in self._names

    def linkage(self, addr: int) -> bytes:
        """Return code of a procedure linkage table at an address, or b"": one entry at most."""
        section = self._section_of((0, addr))
        is_linkage = section is not None and section.name.startswith(".plt")
        return self.around((0, addr), 0, 32)[1] if is_linkage and not self._is_object else b""

    def _read_sections(self, header: tuple[int, ...]) -> list[_Section]:
        table, count, names = header[6], header[12], header[13]
        if not 0 < count < _MAX_SECTIONS:
            raise ValueError("it has no sections")
        raw: list[tuple[int, ...]]
        raw = [SECTION.unpack_from(self._data, table + SECTION.size * n) for n in range(count)]
        for each in raw:
            if each[1] != SHT_NOBITS and each[4] + each[5] > len(self._data):
                raise ValueError("a section reaches beyond the file's end")
        if sum(each[5] for each in raw if each[1] == _SHT_RELA) > len(self._data):
            raise ValueError("relocations lie in each other")
        strings = self._bytes(raw[names][4], raw[names][5])
        return [
            _Section(
                name=_text(strings, each[0]),
                type=each[1],
                addr=each[3],
                offset=each[4],
                size=each[5],
                link=each[6],
                info=each[7],
            )
            for each in raw
        ]

    def _read(self) -> None:
        tables = {each.type: each for each in self._sections}
        chosen = tables.get(SHT_SYMTAB) or tables.get(_SHT_DYNSYM)
        if chosen is None:
            raise ValueError("it has no symbols")
        self._symbols = self._read_symbols(chosen)
        self._named = {self._place(each): each.name for each in self._symbols if each.is_function}
        self._names = {each.name for each in self._symbols if each.is_function}
        of_data = (each for each in self._symbols if each.name.partition(".")[0] == "$d")
        self._data_at = {self._place(each) for each in of_data}
        self._relocated: dict[int, dict[int, str]] = defaultdict(dict)
        self._entries_of: dict[int, list[Place]] = defaultdict(list)
        self._slots: dict[int, str] = {}
        self._relative: dict[int, int] = {}
        symbols = {0: list[_Symbol]()}
        for section in self._sections:
            if section.type == _SHT_RELA:
                if section.link not in symbols:
                    symbols[section.link] = self._read_symbols(self._sections[section.link])
                self._read_relocations(section, symbols[section.link])

    def _read_symbols(self, section: _Section) -> list[_Symbol]:
        strings = self._sections[section.link]
        names = self._bytes(strings.offset, strings.size)
        return [
            _Symbol(
                name=_text(names, name),
                is_function=info & 0xF == _STT_FUNC,
                section=number,
                value=value,
                size=size,
            )
            for name, info, _, number, value, size in self._rows(SYMBOL, section)
        ]

    def _rows(self, form: struct.Struct, section: _Section) -> "Iterator[tuple[int, ...]]":
        data = self._bytes(section.offset, section.size)
        return form.iter_unpack(data[: len(data) // form.size * form.size])

    def _read_relocations(self, section: _Section, symbols: list[_Symbol]) -> None:
        for offset, info, addend in self._rows(RELA, section):
            kind, number = info & 0xFFFF_FFFF, info >> 32
            if self._is_object:
                symbol = symbols[number]
                self._relocated[section.info][offset] = symbol.name
                self._entries_of[section.info].append((symbol.section, symbol.value + addend))
            elif kind == _RELATIVE.get(self.machine):
                self._relative[offset] = addend
            elif 0 < number < len(symbols):
                self._slots[offset] = symbols[number].name

    def _entries(self, number: int, section: _Section) -> Iterator[Place]:
        if self._is_object:
            yield from self._entries_of.get(number, ())
            return
        data = self._bytes(section.offset, section.size)
        for at in range(0, len(data) - _WORD + 1, _WORD):
            found = int.from_bytes(data[at : at + _WORD], "little")
            yield 0, self._relative.get(section.addr + at, found)

    def _place(self, symbol: _Symbol) -> Place:
        return (symbol.section, symbol.value) if self._is_object else (0, symbol.value)

    def _section_of(self, place: Place) -> _Section | None:
        if self._is_object:
            return self._sections[place[0]]
        return next(
            (each for each in self._code if each.addr <= place[1] < each.addr + each.size), None
        )

    @property
    def _code(self) -> Iterator[_Section]:
        return (each for each in self._sections if each.addr)

    def _bytes(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode(errors="backslashreplace")
