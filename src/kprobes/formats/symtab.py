"""Names in a file: the symbol table of an ELF file, or a kernel's as text, as nm prints it.

    ffffffff81000000 T _stext        System.map, /proc/kallsyms: an address, nm's letter, a name

    Elf64_Sym:  u32 name, u8 info (binding << 4 | type), u8 other, u16 shndx, u64 value, u64 size

Of a kernel, what its own table leaves out (scripts/mksysmap, scripts/kallsyms.c) is left out here.
"""

import re
import struct
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats.elf import MAGIC
from kprobes.formats.kallsyms import SymbolTable

_DIGITS = 16
_HEAD = _DIGITS + len(" T ")

_HEADER = struct.Struct("<40xQ10xHHH")
_SECTIONS = np.dtype(
    {
        "names": ("type", "flags", "offset", "size", "link"),
        "formats": ("<u4", "<u8", "<u8", "<u8", "<u4"),
        "offsets": (4, 8, 24, 32, 40),
        "itemsize": 64,
    }
)
_SYMBOLS = np.dtype(
    {
        "names": ("name", "info", "section", "value", "size"),
        "formats": ("<u4", "u1", "<u2", "<u8", "<u8"),
        "offsets": (0, 4, 6, 8, 16),
        "itemsize": 24,
    }
)
_SHT_SYMTAB, _SHT_NOBITS, _SHT_DYNSYM = 2, 8, 11
_SHF_WRITE, _SHF_EXECINSTR = 1, 4
_STT_FUNC, _STT_SECTION, _STT_GNU_IFUNC = 2, 3, 10
_STB_LOCAL, _STB_WEAK = 0, 2
_SHN_ABS = 0xFFF1
_HIDDEN = re.compile(rb"\$|\.L|__crc_|__kstrtab|L0|__kcfi_typeid_|__pi_\$|__efistub_\$")
_UPPER = ord("a") - ord("A")


def from_text(text: bytes) -> SymbolTable:
    """Return the symbols of a System.map, or of /proc/kallsyms, in their order.

    Raises:
        FormatError: a line is not a symbol of a 64-bit kernel.
    """
    # In columns, not line by line: there are some 120,000.
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    lines = np.concatenate([np.zeros(min(1, len(ends)), np.intp), ends[:-1] + 1])
    if (ends - lines < _HEAD).any():
        raise FormatError("lines that are not symbols of a 64-bit kernel")
    heads = data[lines[:, None] + np.arange(_HEAD)]
    is_name = np.ones(len(data), np.bool_)
    is_name[lines[:, None] + np.arange(_HEAD)] = False
    return SymbolTable(
        addrs=_hex(heads[:, :_DIGITS]),
        types=heads[:, _DIGITS + 1].tobytes(),
        blob=b"\0" + data[is_name].tobytes().replace(b"\n", b"\0"),
        starts=(lines - _HEAD * np.arange(len(lines)) + 1).astype(np.uint32),
    )


def _hex(digits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    values = np.where(digits >= ord("a"), digits - (ord("a") - 10), digits - ord("0"))
    shifts = np.arange(4 * (_DIGITS - 1), -1, -4, dtype=np.uint64)
    return (values.astype(np.uint64) << shifts).sum(axis=1, dtype=np.uint64)


def from_elf(data: bytes) -> SymbolTable | None:
    """Return the symbols of a vmlinux, by address; None where it is stripped.

    Raises:
        FormatError: no 64-bit little endian ELF, or damaged.
    """
    with _as_format_errors():
        found = _read(data, _SHT_SYMTAB)
        return None if found is None else _table(*found)


class ProgramFunctions(Struct, frozen=True, kw_only=True, eq=False):
    """The functions of a program, or of a library, as linked.

    Attributes:
        starts, sizes: uint64 (n,), ascending by start; bytes, 0 where nobody knows.
        names: of each.
    """

    starts: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    names: tuple[bytes, ...]


def functions(data: bytes, *, is_dynamic: bool = False) -> ProgramFunctions | None:
    """Return the functions that a file's symbols tell; None where they tell none.

    Args:
        data: the file.
        is_dynamic: whether by those for dynamic linking, which a stripped file has still.

    Raises:
        FormatError: no 64-bit little endian ELF, or damaged.
    """
    with _as_format_errors():
        found = _read(data, _SHT_DYNSYM if is_dynamic else _SHT_SYMTAB)
        if found is None:
            return None
        symbols, _, strings = found
        is_function = np.isin(symbols["info"] & 15, (_STT_FUNC, _STT_GNU_IFUNC))
        symbols = symbols[is_function & (symbols["section"] > 0)]
        symbols = symbols[np.argsort(symbols["value"], kind="stable")]
        if not len(symbols):
            return None
        starts: list[int] = symbols["name"].tolist()
        return ProgramFunctions(
            starts=symbols["value"].astype(np.uint64),
            sizes=symbols["size"].astype(np.uint64),
            names=tuple(strings[start : strings.index(b"\0", start)] for start in starts),
        )


@contextmanager
def _as_format_errors() -> Generator[None]:
    try:
        yield
    except (ValueError, IndexError, OverflowError, struct.error) as error:
        raise FormatError(f"ELF: the symbol table is damaged: {error}") from error


def _read(data: bytes, kind: int) -> tuple[np.ndarray, np.ndarray, bytes] | None:
    # The symbols of a table, all sections, and the table's names.
    if not data.startswith(MAGIC):
        raise FormatError("not a 64-bit little endian ELF file")
    place, _, count, _ = cast("tuple[int, int, int, int]", _HEADER.unpack_from(data))
    sections = np.frombuffer(data, _SECTIONS, count, place)
    tables = np.flatnonzero(sections["type"] == kind)
    if not len(tables):
        return None
    table = sections[tables[0]]
    n = int(table["size"]) // _SYMBOLS.itemsize
    symbols = np.frombuffer(data, _SYMBOLS, n, int(table["offset"]))
    names = sections[int(table["link"])]
    return symbols, sections, data[int(names["offset"]) :][: int(names["size"])]


def _table(symbols: np.ndarray, sections: np.ndarray, strings: bytes) -> SymbolTable:
    is_local = symbols["info"] >> 4 == _STB_LOCAL
    is_absolute = symbols["section"] == _SHN_ABS
    kept = (symbols["info"] & 15 < _STT_SECTION) & (symbols["section"] > 0) & (symbols["name"] > 0)
    symbols = symbols[kept & ~(is_absolute & is_local)]
    symbols = symbols[np.argsort(symbols["value"], kind="stable")]
    starts: list[int] = symbols["name"].tolist()
    names = [strings[start : strings.index(b"\0", start)] for start in starts]
    shown = np.array([_HIDDEN.match(name) is None for name in names], np.bool_)
    symbols, names = symbols[shown], [name for name in names if _HIDDEN.match(name) is None]
    sizes = np.array([len(name) + 1 for name in names], np.int64)
    return SymbolTable(
        addrs=symbols["value"].astype(np.uint64),
        types=_letters(symbols, sections).tobytes(),
        blob=b"\0" + b"".join(name + b"\0" for name in names),
        starts=(np.cumsum(sizes) - sizes + 1).astype(np.uint32),
    )


def _letters(symbols: np.ndarray, sections: np.ndarray) -> NDArray[np.uint8]:
    # As nm has them, as far as the kernel minds: what is text, and what is global.
    kinds = np.full(len(sections), ord("r"), np.uint8)
    kinds[sections["flags"] & _SHF_WRITE > 0] = ord("d")
    kinds[sections["type"] == _SHT_NOBITS] = ord("b")
    kinds[sections["flags"] & _SHF_EXECINSTR > 0] = ord("t")
    is_absolute = symbols["section"] >= len(sections)
    letters = np.where(is_absolute, ord("a"), kinds[np.where(is_absolute, 0, symbols["section"])])
    binding = symbols["info"] >> 4
    letters = letters - np.where(binding != _STB_LOCAL, _UPPER, 0)
    weak = np.where(letters == ord("T"), ord("W"), ord("V"))
    return np.where(binding == _STB_WEAK, weak, letters).astype(np.uint8)
