"""One build of a kernel, extracted from its memory or file: symbols, types, banner, build id."""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.errors import FormatError, MemoryFault, TargetError
from kprobes.formats import btf_index, elf, kallsyms
from kprobes.formats.kallsyms import SymbolTable
from kprobes.formats.strtab import Names
from kprobes.image.symbols import ModuleSymbols, SymbolMap
from kprobes.image.types import BtfTypes, parse_types
from kprobes.model.kernel import Kernel
from kprobes.ports import Memory
from kprobes.units import Addr

_BANNER = re.compile(rb"Linux version ([0-9]+\.[0-9]+[^\s\0]*)[^\0\n]{0,1000}")
_NUMBER = re.compile(rb" #[0-9]")
_MAX_BANNER = 1024
_MAX_NOTES = 1 << 16
_MAX_BTF = 1 << 28
_MAX_BTFS = 64
_HEAD = 64
_CALLS = b"sys_call_table"
_SOME_CALLS = 256

Source = tuple[int, int]
"""(addr, size) of memory."""


class Region(Struct, frozen=True, kw_only=True):
    """A piece of a kernel's image and its address."""

    addr: Addr
    data: bytes


class Build(Struct, frozen=True, kw_only=True, eq=False):
    """What every boot of one kernel file shares.

    Attributes:
        banner: the whole "Linux version" line.
        build_id: b"" when the kernel has none.
        table: its symbols.
        btf: its types, b"" when it has none or they are damaged.
        btf_at: where they are in memory.
        type_places: uint32 (types,), as ``btf_index.places_of`` says; empty when they are damaged.
        head: the first bytes of the first source, to tell builds apart quickly.
        digest: of all sources' bytes.
    """

    banner: str
    build_id: bytes
    table: SymbolTable
    btf: bytes
    btf_at: int
    type_places: NDArray[np.uint32]
    head: bytes
    digest: bytes

    @property
    def types(self) -> BtfTypes | None:
        """What ``btf`` says, parsed anew; None when there is none, or it is damaged."""
        return parse_types(self.btf, self.type_places) if len(self.type_places) else None

    @property
    def text(self) -> int | None:
        """Where the kernel's text begins, or None when no symbol says."""
        return self.address(b"_text") or self.address(b"_stext")

    @property
    def release(self) -> str:
        """``uname -r``."""
        return self.banner.split()[2]

    @property
    def sources(self) -> tuple[Source, ...]:
        """The memory that symbols and types were made of."""
        types = ((self.btf_at, len(self.btf)),) if self.btf else ()
        return (*self.table.sources, *types)

    def shifted(self, by: int) -> "Build":
        """Return the same build at another place in memory."""
        return replace(self, table=self.table.shifted(by), btf_at=self.btf_at + by)

    def with_data(self, found: Mapping[str, int]) -> "Build":
        """Return the same build with names of data that its table lacked."""
        return replace(self, table=self.table.with_data(found))

    def extent(self, name: bytes) -> tuple[int, int] | None:
        """Return address and size of the first symbol of a name, or None."""
        addr = self.address(name)
        if addr is None:
            return None
        following = int(np.searchsorted(self.table.addrs, np.uint64(addr), side="right"))
        ends = self.table.addrs[following : following + 1].tolist() or [addr]
        return addr, ends[0] - addr

    def address(self, name: bytes) -> int | None:
        """Return where the first symbol of a name is, or None."""
        number = Names(self.table.blob, self.table.starts).first(name)
        return None if number is None else int(self.table.addrs[number])


SymbolFiles = Callable[[str, bytes], Iterable[SymbolTable]]
"""(release, build id) to tables of files that may be a kernel's, at the addresses of its link."""


def no_files(release: str, build_id: bytes) -> Iterable[SymbolTable]:
    """Return none."""
    del release, build_id
    return ()


def extract(
    memory: Memory,
    regions: Iterable[Region],
    files: SymbolFiles = no_files,
    *,
    is_file: bool = False,
) -> Build:
    """Find a kernel's symbols, types and names of itself.

    Args:
        memory: the whole kernel, at the same addresses as the regions.
        regions: where the tables may be, the likeliest first; read only as far as needed.
        files: asked for symbols where the kernel has none of its own.
        is_file: whether it is a file's memory, which may not be relocated yet.

    Raises:
        TargetError: there is no Linux kernel, or it has no intact symbols.
    """
    banner = ""
    for region in regions:
        match = _BANNER.search(region.data)
        banner = banner or (match[0].decode(errors="replace") if match else "")
        table = kallsyms.find(region.data, region.addr)
        if table is None and match is not None:
            tables = files(match[1].decode(errors="replace"), _last_build_id(region))
            table = _first_of(tables, memory, region, is_file=is_file)
        if table is not None:
            return _assembled(memory, region, table)
    if not banner:
        raise TargetError("no Linux kernel there: nothing says 'Linux version'")
    raise TargetError(
        f"{banner.split(' (')[0]}: no intact kallsyms tables in its memory: name its System.map "
        "or vmlinux with --symbols"
    )


def _first_of(
    tables: Iterable[SymbolTable], memory: Memory, region: Region, *, is_file: bool
) -> SymbolTable | None:
    banners = [region.addr + found.start() for found in _BANNER.finditer(region.data)]
    for table in tables:
        at = Names(table.blob, table.starts).first(b"linux_banner")
        for banner in banners if at is not None else ():
            moved = table.shifted(banner - int(table.addrs[at]))
            if _is_of(memory, moved, is_file=is_file):
                return moved
    return None


def _is_of(memory: Memory, table: SymbolTable, *, is_file: bool) -> bool:
    # Another build has its functions elsewhere. These are pointers to some hundred of them.
    at = Names(table.blob, table.starts).first(_CALLS)
    if at is None:
        return False
    try:
        words = np.frombuffer(memory.read(int(table.addrs[at]), 8 * _SOME_CALLS), "<u8")
    except MemoryFault:
        return False
    filled = words[words != 0]
    return bool(np.isin(filled, table.addrs).all()) and (is_file or len(filled) == len(words))


def _last_build_id(region: Region) -> bytes:
    # The last one: the vDSO's images, which have notes too, come before the kernel's own.
    ids = [value for _, value in elf.build_id_notes(region.data)]
    return ids[-1] if ids else b""


def digest_of(pieces: Iterable[bytes]) -> bytes:
    """Return what tells a build's sources from all others."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()


def _assembled(memory: Memory, region: Region, table: SymbolTable) -> Build:
    names = _Located(memory, region, table)
    btf_at, btf = names.btf()
    # Of the copy that was decoded, not of memory that a hostile guest may have changed since.
    pieces = [region.data[at - region.addr :][:size] for at, size in table.sources]
    return Build(
        banner=names.banner(),
        build_id=names.build_id(),
        table=table,
        btf=btf,
        btf_at=btf_at,
        type_places=_type_places(btf),
        head=pieces[0][:_HEAD] if pieces else b"",
        digest=digest_of([*pieces, btf] if btf else pieces),
    )


def _type_places(btf: bytes) -> NDArray[np.uint32]:
    with suppress(FormatError):
        return btf_index.places_of(btf)
    return np.empty(0, np.uint32)


class _Located:
    # What a kernel's symbols point at; without them, what can be found in the region.
    def __init__(self, memory: Memory, region: Region, table: SymbolTable) -> None:
        self._memory, self._region = memory, region
        self._names, self._addrs = Names(table.blob, table.starts), table.addrs

    def banner(self) -> str:
        text = self._between("linux_banner", None, _MAX_BANNER) or b""
        match = _BANNER.search(text)
        found = [match[0]] if match else [m[0] for m in _BANNER.finditer(self._region.data)]
        if not found:
            raise TargetError("a kernel with symbols, but without a 'Linux version' line")
        # Since 2df8220cc511 ("kbuild: build init/built-in.a just once") (v6.1) there is another
        # one, of before the build had its number.
        numbered = [banner for banner in found if _NUMBER.search(banner)]
        return (numbered or found)[0].decode(errors="replace").rstrip()

    def build_id(self) -> bytes:
        notes = self._between("__start_notes", "__stop_notes", _MAX_NOTES)
        if notes is not None:
            return elf.build_id(notes)
        return _last_build_id(self._region)

    def btf(self) -> tuple[int, bytes]:
        data = self._between("__start_BTF", "__stop_BTF", _MAX_BTF)
        if data is not None:
            size = btf_index.size_at(data, 0)
            return (self._address("__start_BTF") or 0, data[:size]) if size else (0, b"")
        found = re.finditer(re.escape(btf_index.MAGIC), self._region.data)
        for match in itertools.islice(found, _MAX_BTFS):
            size = btf_index.size_at(self._region.data, match.start())
            data = self._region.data[match.start() : match.start() + (size or 0)]
            if data and parse_types(data) is not None:
                return self._region.addr + match.start(), data
        return 0, b""

    def _address(self, name: str) -> int | None:
        number = self._names.first(name.encode())
        return None if number is None else int(self._addrs[number])

    def _between(self, start: str, stop: str | None, limit: int) -> bytes | None:
        # None when no symbols say where; empty when nothing is there.
        first = self._address(start)
        last = (first or 0) + limit if stop is None else self._address(stop)
        if first is None or last is None or not 0 < last - first <= limit:
            return None
        try:
            return self._memory.read(first, last - first)
        except MemoryFault:
            return b""


def kernel_of(
    build: Build,
    types: BtfTypes | None,
    *,
    arch: str,
    slide: int,
    modules: tuple[ModuleSymbols, ...] = (),
) -> Kernel:
    """Return the kernel that a build is, at the addresses of its table.

    Args:
        build: what was found in an image or in RAM.
        types: its BTF, or None.
        arch: of the kernel.
        slide: what KASLR has added to its addresses.
        modules: symbols of those that are loaded.

    Raises:
        TargetError: its symbols do not say where its text is.
    """
    start, stop = build.address(b"_stext"), build.address(b"_etext")
    if start is None or stop is None or start >= stop:
        raise TargetError(f"{build.release}: its symbols do not say where its text is")
    return Kernel(
        release=build.release,
        banner=build.banner,
        arch=arch,
        build_id=build.build_id,
        slide=slide,
        text=(Addr(start), Addr(stop)),
        symbols=SymbolMap(build.table, modules),
        types=types,
    )
