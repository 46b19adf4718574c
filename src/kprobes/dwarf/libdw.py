"""elfutils' libdw, which reads DWARF for perf, too: the functions of it that we use.

    typedef struct { void *addr; Dwarf_CU *cu; Dwarf_Abbrev *abbrev; long padding; } Dwarf_Die;
    typedef struct { unsigned code, form; unsigned char *valp; Dwarf_CU *cu; } Dwarf_Attribute;
    typedef struct { uint8_t atom; Dwarf_Word number, number2, offset; } Dwarf_Op;
    typedef struct { int (*find_elf)(...); int (*find_debuginfo)(...);
                     int (*section_address)(..., const char *name, ..., Dwarf_Addr *addr);
                     char **debuginfo_path; } Dwfl_Callbacks;

Written down in elfutils/libdw.h and libdwfl.h. It finds a function among a kernel's 600 MB in a
tenth of a second; a reader in Python takes minutes.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char_p,
    c_int,
    c_long,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_void_p,
)
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kprobes.errors import FormatError, UsageError
from kprobes.formats.elf import global_data, section_addresses

_LIBRARY = "libdw.so.1"
_AT_FILE, _OP_ADDR, _INDEXED = 0x3A, 0x03, (0xA1, 0xFB)
_SKELETON = 4
"""DW_UT_skeleton."""
_READ = 0
"""DWARF_C_READ."""


class Die(Structure):
    """One entry: Dwarf_Die."""

    _fields_ = (("addr", c_void_p), ("cu", c_void_p), ("abbrev", c_void_p), ("padding", c_long))


class _Attribute(Structure):
    _fields_ = (("code", c_uint), ("form", c_uint), ("valp", c_void_p), ("cu", c_void_p))


class _Op(Structure):
    _fields_ = (
        ("atom", c_ubyte),
        ("number", c_uint64),
        ("number2", c_uint64),
        ("offset", c_uint64),
    )


class Op(NamedTuple):
    """One operation of a location: its code, and its operands as unsigned numbers."""

    atom: int
    number: int = 0
    second: int = 0


class LineRow(NamedTuple):
    """One row of a line table.

    Attributes:
        addr: as linked.
        is_statement: whether a statement begins there.
        is_end: whether it only says where code ends.
    """

    addr: int
    file: str
    line: int
    is_statement: bool
    is_end: bool


_UNPLACED = (1 << 64) - 1
_FindElf = CFUNCTYPE(c_int, c_void_p, c_void_p, c_char_p, c_uint64, c_void_p, c_void_p)
_FindDebugInfo = CFUNCTYPE(
    c_int, c_void_p, c_void_p, c_char_p, c_uint64, c_char_p, c_char_p, c_uint, c_void_p
)
_SectionAddress = CFUNCTYPE(
    c_int,
    c_void_p,
    c_void_p,
    c_char_p,
    c_uint64,
    c_char_p,
    c_uint,
    c_void_p,
    POINTER(c_uint64),
)


class _Callbacks(Structure):
    _fields_ = (
        ("find_elf", _FindElf),
        ("find_debuginfo", _FindDebugInfo),
        ("section_address", _SectionAddress),
        ("debuginfo_path", c_void_p),
    )


_die, _ops, _size = POINTER(Die), POINTER(POINTER(_Op)), POINTER(c_size_t)
_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "dwarf_begin": (c_void_p, (c_int, c_int)),
    "dwarf_end": (c_int, (c_void_p,)),
    "dwarf_addrdie": (c_void_p, (c_void_p, c_uint64, _die)),
    "dwarf_offdie": (c_void_p, (c_void_p, c_uint64, _die)),
    "dwarf_nextcu": (
        c_int,
        (c_void_p, c_uint64, POINTER(c_uint64), _size, c_void_p, c_void_p, c_void_p),
    ),
    "dwarf_child": (c_int, (_die, _die)),
    "dwarf_siblingof": (c_int, (_die, _die)),
    "dwarf_tag": (c_int, (_die,)),
    "dwarf_diename": (c_char_p, (_die,)),
    "dwarf_haspc": (c_int, (_die, c_uint64)),
    "dwarf_entrypc": (c_int, (_die, POINTER(c_uint64))),
    "dwarf_ranges": (
        c_long,
        (_die, c_long, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint64)),
    ),
    "dwarf_attr_integrate": (c_void_p, (_die, c_uint, POINTER(_Attribute))),
    "dwarf_formref_die": (c_void_p, (POINTER(_Attribute), _die)),
    "dwarf_formudata": (c_int, (POINTER(_Attribute), POINTER(c_uint64))),
    "dwarf_cu_info": (
        c_int,
        (c_void_p, c_void_p, POINTER(c_ubyte), c_void_p, _die, c_void_p, c_void_p, c_void_p),
    ),
    "dwarf_diecu": (c_void_p, (_die, _die, c_void_p, c_void_p)),
    "dwarf_decl_line": (c_int, (_die, POINTER(c_int))),
    "dwarf_decl_file": (c_char_p, (_die,)),
    "dwarf_getsrclines": (c_int, (_die, POINTER(c_void_p), _size)),
    "dwarf_getsrcfiles": (c_int, (_die, POINTER(c_void_p), _size)),
    "dwarf_filesrc": (c_char_p, (c_void_p, c_size_t, c_void_p, c_void_p)),
    "dwarf_onesrcline": (c_void_p, (c_void_p, c_size_t)),
    "dwarf_lineaddr": (c_int, (c_void_p, POINTER(c_uint64))),
    "dwarf_lineno": (c_int, (c_void_p, POINTER(c_int))),
    "dwarf_linesrc": (c_char_p, (c_void_p, c_void_p, c_void_p)),
    "dwarf_linebeginstatement": (c_int, (c_void_p, POINTER(c_bool))),
    "dwarf_lineendsequence": (c_int, (c_void_p, POINTER(c_bool))),
    "dwarf_getlocation_addr": (c_int, (POINTER(_Attribute), c_uint64, _ops, _size, c_size_t)),
    "dwarf_getlocations": (
        c_long,
        (
            POINTER(_Attribute),
            c_long,
            POINTER(c_uint64),
            POINTER(c_uint64),
            POINTER(c_uint64),
            _ops,
            _size,
        ),
    ),
    "dwarf_getlocation_attr": (
        c_int,
        (POINTER(_Attribute), POINTER(_Op), POINTER(_Attribute)),
    ),
    "dwarf_formaddr": (c_int, (POINTER(_Attribute), POINTER(c_uint64))),
    "dwarf_getelf": (c_void_p, (c_void_p,)),
    "dwelf_elf_gnu_build_id": (c_long, (c_void_p, POINTER(c_void_p))),
    "dwarf_getcfi": (c_void_p, (c_void_p,)),
    "dwarf_getcfi_elf": (c_void_p, (c_void_p,)),
    "dwarf_cfi_addrframe": (c_int, (c_void_p, c_uint64, POINTER(c_void_p))),
    "dwarf_frame_cfa": (c_int, (c_void_p, _ops, _size)),
    "dwfl_begin": (c_void_p, (POINTER(_Callbacks),)),
    "dwfl_end": (None, (c_void_p,)),
    "dwfl_report_begin": (None, (c_void_p,)),
    "dwfl_report_module": (c_void_p, (c_void_p, c_char_p, c_uint64, c_uint64)),
    "dwfl_report_end": (c_int, (c_void_p, c_void_p, c_void_p)),
    "dwfl_module_getdwarf": (c_void_p, (c_void_p, POINTER(c_uint64))),
}


def _load() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise UsageError(
            f"{_LIBRARY}, which reads debug information, is not there: apt install libdw1"
        ) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Dwarf:
    """One file's debug information, as long as it is open.

    Attributes:
        path: of the file.
        sections: where an object's sections were loaded, by name, those that are known; None of a
            linked file.

    Raises:
        UsageError: libdw is not there.
        FormatError: the file has none.
    """

    def __init__(self, path: Path, sections: Mapping[str, range] | None = None) -> None:
        self.path = path
        self.sections = sections
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._relocated: _Relocated | None = None
        try:
            self._lib = _load()
        except UsageError:
            os.close(self._file)
            raise
        self._libc = ctypes.CDLL(None)
        self._libc.free.argtypes = (c_void_p,)
        if sections is None:
            self._dwarf = self._lib.dwarf_begin(self._file, _READ)
        else:
            self._relocated = _Relocated(self._lib, self._file, sections)
            self._dwarf = self._relocated.dwarf
        self._cfi: Sequence[Any] | None = None
        if not self._dwarf:
            self.close()
            raise FormatError(f"{path}: no debug information (DWARF)")

    def close(self) -> None:
        """Let go of it; whatever came of it is gone then."""
        if self._relocated is not None:
            self._relocated.close()
        elif self._dwarf:
            self._lib.dwarf_end(self._dwarf)
        os.close(self._file)

    def reopened(self) -> "Dwarf":
        """Return the same file's, opened once more."""
        return Dwarf(self.path, self.sections)

    def is_loaded(self, addr: int) -> bool:
        """Whether it is known what is at an address; of an object only in its known sections."""
        return self.sections is None or any(addr in each for each in self.sections.values())

    @property
    def build_id(self) -> bytes:
        """The file's build id, or b""."""
        found = c_void_p()
        elf = self._lib.dwarf_getelf(self._dwarf)
        size = self._lib.dwelf_elf_gnu_build_id(elf, byref(found))
        return ctypes.string_at(found, size) if size > 0 else b""

    def section(self, name: str) -> range:
        """Return the addresses of a section that is loaded, as linked; none where there is none.

        Raises:
            FormatError: the file's table of sections is damaged.
        """
        if self.sections is not None:
            return self.sections.get(name, range(0))
        return section_addresses(lambda at, size: os.pread(self._file, size, at), name)

    def global_data(self) -> dict[str, int]:
        """Return the addresses of a linked file's global variables by name; none of an object's.

        Raises:
            FormatError: the file's symbols are damaged.
        """
        if self.sections is not None:
            return {}
        return global_data(lambda at, size: os.pread(self._file, size, at))

    def addresses(self, names: Mapping[str, str]) -> dict[str, int | None]:
        """Return where functions of libdw are.

        Args:
            names: of the functions, by what they are wanted as.
        """
        return {
            key: ctypes.cast(getattr(self._lib, name), c_void_p).value
            for key, name in names.items()
        }

    def unit_at(self, addr: int) -> Die | None:
        """Return the compilation unit that has an address, or None."""
        die = Die()
        if self._lib.dwarf_addrdie(self._dwarf, addr, byref(die)):
            return self._whole(die)
        # clang makes no .debug_aranges.
        units = (unit for unit in self._parts() if self.has(unit, addr))
        return next(map(self._whole, units), None)

    def units(self) -> Iterator[Die]:
        """Return all compilation units."""
        return map(self._whole, self._parts())

    def _parts(self) -> Iterator[Die]:
        return (die for offset in self.unit_offsets() if (die := self.die(offset)) is not None)

    def _whole(self, unit: Die) -> Die:
        # The rest of it, where -gsplit-dwarf has left a skeleton, and that is still there.
        kind, rest = c_ubyte(), Die()
        self._lib.dwarf_cu_info(unit.cu, None, byref(kind), None, byref(rest), None, None, None)
        if kind.value != _SKELETON or not rest.addr:
            return unit
        # libdw takes its files for read when it is asked for one, and aborts where they are not.
        files, count = c_void_p(), c_size_t()
        is_unread = self._lib.dwarf_getsrcfiles(byref(rest), byref(files), byref(count))
        return unit if is_unread else rest

    def unit_offsets(self) -> list[int]:
        """Return where the entries of all compilation units are."""
        at, following, header = 0, c_uint64(), c_size_t()
        found: list[int] = []
        while not self._lib.dwarf_nextcu(
            self._dwarf, at, byref(following), byref(header), None, None, None
        ):
            found.append(at + header.value)
            at = following.value
        return found

    def die(self, offset: int) -> Die | None:
        """Return the entry at an offset, or None."""
        die = Die()
        return die if self._lib.dwarf_offdie(self._dwarf, offset, byref(die)) else None

    def children(self, die: Die) -> Iterator[Die]:
        """Return what an entry has directly inside."""
        found = Die()
        status = self._lib.dwarf_child(byref(die), byref(found))
        while status == 0:
            yield _copy(found)
            status = self._lib.dwarf_siblingof(byref(found), byref(found))

    def tag(self, die: Die) -> int:
        """Return what an entry is: DW_TAG_..."""
        return int(self._lib.dwarf_tag(byref(die)))

    def name(self, die: Die) -> str:
        """Return an entry's name, that of its abstract origin if it has none, or ""."""
        name = self._lib.dwarf_diename(byref(die))
        return name.decode(errors="backslashreplace") if name else ""

    def has(self, die: Die, addr: int) -> bool:
        """Whether an address is in an entry's code."""
        return self._lib.dwarf_haspc(byref(die), addr) == 1

    def entry(self, die: Die) -> int | None:
        """Return where an entry's code begins, or None where it has none."""
        addr, base, end = c_uint64(), c_uint64(), c_uint64()
        if self._lib.dwarf_entrypc(byref(die), byref(addr)) == 0:
            return addr.value
        # Where it does not say so its first range is taken, as perf does.
        found = self._lib.dwarf_ranges(byref(die), 0, byref(base), byref(addr), byref(end))
        return addr.value if found > 0 else None

    def reference(self, die: Die, attribute: int) -> Die | None:
        """Return the entry that an attribute refers to, or None."""
        found, target = self._attribute(die, attribute), Die()
        if found is None or not self._lib.dwarf_formref_die(byref(found), byref(target)):
            return None
        return target

    def has_attribute(self, die: Die, attribute: int) -> bool:
        """Whether an entry has an attribute."""
        return self._attribute(die, attribute) is not None

    def number(self, die: Die, attribute: int) -> int | None:
        """Return the 64 bits of an attribute that is a number, or None.

        Only DW_FORM_sdata has a sign: gcc writes what is negative so, and no other.
        """
        found, value = self._attribute(die, attribute), c_uint64()
        if found is None or self._lib.dwarf_formudata(byref(found), byref(value)):
            return None
        return value.value

    def declared(self, die: Die) -> tuple[str, int] | None:
        """Return the file and the line where something is declared, or None."""
        line = c_int()
        if self._lib.dwarf_decl_line(byref(die), byref(line)):
            return None
        file = self._lib.dwarf_decl_file(byref(die))
        if file:
            return file.decode(errors="backslashreplace"), line.value
        # In DWARF 5 the unit's own is number 0, which libdw takes for none before 0.192.
        unit = Die()
        has_number = self.number(die, _AT_FILE) == 0
        if not has_number or not self._lib.dwarf_diecu(byref(die), byref(unit), None, None):
            return None
        return next(((name, line.value) for name in self.files(unit)), None)

    def files(self, unit: Die) -> list[str]:
        """Return the source files that a unit is made of."""
        files, count = c_void_p(), c_size_t()
        if self._lib.dwarf_getsrcfiles(byref(unit), byref(files), byref(count)):
            return []
        found = (self._lib.dwarf_filesrc(files, n, None, None) for n in range(count.value))
        return [each.decode(errors="backslashreplace") for each in found if each]

    def rows(self, unit: Die) -> list[LineRow]:
        """Return a unit's line table, by address."""
        lines, count = c_void_p(), c_size_t()
        lib = self._lib
        if lib.dwarf_getsrclines(byref(unit), byref(lines), byref(count)):
            return []
        addr, line, is_statement, is_end = c_uint64(), c_int(), c_bool(), c_bool()
        names: dict[bytes, str] = {}
        found: list[LineRow] = []
        for number in range(count.value):
            row = lib.dwarf_onesrcline(lines, number)
            lib.dwarf_lineaddr(row, byref(addr))
            lib.dwarf_lineno(row, byref(line))
            lib.dwarf_linebeginstatement(row, byref(is_statement))
            lib.dwarf_lineendsequence(row, byref(is_end))
            file = lib.dwarf_linesrc(row, None, None) or b""
            if file not in names:
                names[file] = file.decode(errors="backslashreplace")
            found.append(
                LineRow(addr.value, names[file], line.value, is_statement.value, is_end.value)
            )
        return found

    def location(self, die: Die, attribute: int, addr: int) -> list[Op] | None:
        """Return where something is when the CPU is at an address, or None where it is nowhere.

        Args:
            die: of a variable, or a function.
            attribute: DW_AT_location or DW_AT_frame_base.
            addr: as linked.
        """
        found, ops, count = self._attribute(die, attribute), POINTER(_Op)(), c_size_t()
        if found is None:
            return None
        done = self._lib.dwarf_getlocation_addr(byref(found), addr, byref(ops), byref(count), 1)
        return self._read(found, ops, count.value) if done == 1 else None

    def locations(self, die: Die, attribute: int) -> Iterator[tuple[int, int, list[Op]]]:
        """Return from where to where something is in which place; addresses as linked."""
        found, ops, count = self._attribute(die, attribute), POINTER(_Op)(), c_size_t()
        base, start, end = c_uint64(), c_uint64(), c_uint64()
        at = 0
        while found is not None:
            at = self._lib.dwarf_getlocations(
                byref(found), at, byref(base), byref(start), byref(end), byref(ops), byref(count)
            )
            if at <= 0:
                return
            yield start.value, end.value, self._read(found, ops, count.value)

    def frame(self, addr: int) -> list[Op] | None:
        """Return how the frame of the function at an address is found (its CFA), or None."""
        lib = self._lib
        if self._cfi is None:
            # .debug_frame, which kernels have, and .eh_frame, of which an object's is as linked.
            found = [lib.dwarf_getcfi(self._dwarf)]
            if self._relocated is None:
                found.append(lib.dwarf_getcfi_elf(lib.dwarf_getelf(self._dwarf)))
            self._cfi = [each for each in found if each]
        frame, ops, count = c_void_p(), POINTER(_Op)(), c_size_t()
        for cfi in self._cfi:
            if lib.dwarf_cfi_addrframe(cfi, addr, byref(frame)) == 0:
                try:
                    done = lib.dwarf_frame_cfa(frame, byref(ops), byref(count))
                    return _read_ops(ops, count.value) if done == 0 else None
                finally:
                    self._libc.free(frame)
        return None

    def _read(self, attribute: _Attribute, ops: Any, count: int) -> list[Op]:
        found = _read_ops(ops, count)
        for number, op in enumerate(found):
            if op.atom in _INDEXED:
                # A number of the table of addresses, as clang has it.
                place, addr = _Attribute(), c_uint64()
                raw = byref(ops[number])
                if not self._lib.dwarf_getlocation_attr(byref(attribute), raw, byref(place)):
                    self._lib.dwarf_formaddr(byref(place), byref(addr))
                    found[number] = Op(_OP_ADDR, addr.value)
        return found

    def _attribute(self, die: Die, attribute: int) -> _Attribute | None:
        found = _Attribute()
        if not self._lib.dwarf_attr_integrate(byref(die), attribute, byref(found)):
            return None
        return found


class _Relocated:
    # libdwfl's, which has an object's debug information relocated to where its sections are.
    def __init__(self, lib: Any, file: int, sections: Mapping[str, range]) -> None:
        self._lib = lib
        # As long as they may be called.
        self._callbacks = _Callbacks(
            find_elf=_FindElf(lambda *_: os.dup(file)),
            find_debuginfo=_FindDebugInfo(lambda *_: -1),
            section_address=_SectionAddress(partial(_section_address, sections)),
        )
        self._dwfl = lib.dwfl_begin(byref(self._callbacks))
        lib.dwfl_report_begin(self._dwfl)
        module = lib.dwfl_report_module(self._dwfl, b"module", 0, _UNPLACED)
        lib.dwfl_report_end(self._dwfl, None, None)
        self.dwarf = lib.dwfl_module_getdwarf(module, byref(c_uint64()))

    def close(self) -> None:
        self._lib.dwfl_end(self._dwfl)


def _section_address(sections: Mapping[str, range], *arguments: Any) -> int:
    # What is not loaded, or nobody knows where, becomes 0.
    *_, name, _, _, addr = arguments
    place = sections.get(name.decode(errors="backslashreplace"))
    addr[0] = _UNPLACED if place is None else place.start
    return 0


def _copy(die: Die) -> Die:
    return Die.from_buffer_copy(die)


def _read_ops(ops: Any, count: int) -> list[Op]:
    return [
        Op(ops[number].atom, ops[number].number, ops[number].number2) for number in range(count)
    ]
