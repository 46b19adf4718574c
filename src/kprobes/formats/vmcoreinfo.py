"""VMCOREINFO: what a kernel writes about itself for crash dumps, as ``KEY=value`` lines.

    OSRELEASE=6.1.0-56-cloud-amd64
    BUILD-ID=3b43fad5034874490492495d552c0af6a5fab235
    SYMBOL(swapper_pg_dir)=ffffffffa0210000      # hexadecimal
    NUMBER(phys_base)=-157286400                 # decimal, or hexadecimal with 0x
    KERNELOFFSET=1d800000                        # hexadecimal, the slide

Written down in Documentation/admin-guide/kdump/vmcoreinfo.rst. Kernels without CRASH_CORE
have none.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

_SIZE = 4096
"""The kernel keeps it in one page."""
_START = re.compile(rb"OSRELEASE=(?=[0-9])")
_LINE = re.compile(r"(?:(\w+)\(([\w.]+)\)|([\w-]+))=(.*)")


class VmcoreInfo(Struct, frozen=True, kw_only=True):
    """One VMCOREINFO text.

    Attributes:
        release: ``uname -r``.
        build_id: b"" when it is not given.
        slide: KASLR's shift, or None when it is not given.
        symbols: addresses in the running kernel.
        numbers: as the kernel names them.
    """

    release: str
    build_id: bytes
    slide: int | None
    symbols: Mapping[str, int]
    numbers: Mapping[str, int]


def parse(text: bytes) -> VmcoreInfo:
    """Turn a text into its facts; what cannot be read is left out."""
    bare: dict[str, str] = {}
    tables: dict[str, dict[str, int]] = {"SYMBOL": {}, "NUMBER": {}}
    for line in text.split(b"\0")[0].decode(errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        table, name, key, value = match.groups()
        number = _number(value, 16 if table == "SYMBOL" else 0)
        if key:
            bare[key] = value
        elif table in tables and number is not None:
            tables[table][name] = number
    return VmcoreInfo(
        release=bare.get("OSRELEASE", ""),
        build_id=_build_id(bare.get("BUILD-ID", "")),
        slide=_number(bare.get("KERNELOFFSET", ""), 16),
        symbols=tables["SYMBOL"],
        numbers=tables["NUMBER"],
    )


def find(data: bytes) -> Iterator[VmcoreInfo]:
    """Return every text in a piece of memory that names a symbol."""
    return (info for text in find_texts(data) if (info := parse(text)).symbols)


def texts_at(read: Callable[[int, int], bytes], pointer: int) -> Iterator[bytes]:
    """Return every text in the page that a pointer of the kernel's leads to.

    Args:
        read: returns what is at an address, or raises MemoryFault.
        pointer: the address of ``vmcoreinfo_data``.
    """
    return find_texts(read(int.from_bytes(read(pointer, 8), "little"), _SIZE))


def find_texts(data: bytes) -> Iterator[bytes]:
    """Return every text in a piece of memory, up to its NUL."""
    for match in _START.finditer(data):
        yield data[match.start() : match.start() + _SIZE].split(b"\0")[0]


def _number(value: str, base: int) -> int | None:
    try:
        return int(value, base)
    except ValueError:
        return None


def _build_id(value: str) -> bytes:
    try:
        return bytes.fromhex(value)
    except ValueError:
        return b""
