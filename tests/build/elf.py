"""Small ELF files, notes and boot images."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

EM_X86_64 = 62


def note(owner: bytes, kind: int, desc: bytes) -> bytes:
    name = owner + b"\0"
    padded = (part + bytes(-len(part) % 4) for part in (name, desc))
    return struct.pack("<III", len(name), len(desc), kind) + b"".join(padded)


def build_id_note(build_id: bytes) -> bytes:
    return note(b"GNU", 3, build_id)


def vmlinux(
    segments: Sequence[tuple[int, bytes]],
    *,
    notes: bytes = b"",
    machine: int = EM_X86_64,
    interpreter: bytes = b"",
) -> bytes:
    """An ELF file that loads (address, bytes) pairs, with a note segment and an interpreter."""
    pieces = [(1, addr, data) for addr, data in segments] + [(4, 0, notes)] * bool(notes)
    pieces += [(3, 0, interpreter)] * bool(interpreter)
    offset = 64 + 56 * len(pieces)
    headers = b""
    for kind, addr, data in pieces:
        headers += struct.pack("<IIQQQQQQ", kind, 5, offset, addr, addr, len(data), len(data), 4096)
        offset += len(data)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, 0, 64, 0, 0, 64, 56, len(pieces), 0, 0, 0
    )
    return header + headers + b"".join(data for _, _, data in pieces)


def bzimage(payload: bytes, *, setup_sects: int = 3) -> bytes:
    """A boot image with a payload as it is given, its size appended as the kernel's build does."""
    payload += struct.pack("<I", 0)
    head = bytearray((setup_sects + 1) * 512)
    head[0x1F1] = setup_sects
    head[0x1FE:0x200] = b"\x55\xaa"
    head[0x202:0x206] = b"HdrS"
    head[0x248:0x250] = struct.pack("<II", 64, len(payload))
    return bytes(head) + bytes(64) + payload + bytes(512)


def gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(data) + packer.flush()


@dataclass(frozen=True, kw_only=True)
class ElfSymbol:
    """One symbol, in a section of ``Elf``, or ``absolute`` or ``undefined``."""

    name: str
    addr: int
    section: str
    is_global: bool = False
    is_weak: bool = False
    kind: int = 0


_SECTIONS = {".text": (1, 6), ".rodata": (1, 2), ".data": (1, 3), ".bss": (8, 3)}
"""Type and flags of each."""
_SPECIAL = {"absolute": 0xFFF1, "undefined": 0}
_SYMTAB, _STRTAB = 2, 3


@dataclass(frozen=True, kw_only=True)
class Elf:
    """A file with sections and, unless it is stripped, symbols."""

    symbols: Sequence[ElfSymbol] | None

    @property
    def data(self) -> bytes:
        """The file: header, symbols, their names, section headers."""
        strings, table = b"\0", bytes(24)
        for symbol in self.symbols or ():
            binding = 2 if symbol.is_weak else int(symbol.is_global)
            table += struct.pack(
                "<IBBHQQ",
                len(strings) if symbol.name else 0,
                binding << 4 | symbol.kind,
                0,
                self._number(symbol.section),
                symbol.addr,
                8,
            )
            strings += symbol.name.encode() + b"\0"
        sections = [(0, 0, 0, 0, 0)]
        sections += [(kind, flags, 0, 0, 0) for kind, flags in _SECTIONS.values()]
        if self.symbols is not None:
            sections.append((_SYMTAB, 0, 64, len(table), len(sections) + 1))
            sections.append((_STRTAB, 0, 64 + len(table), len(strings), 0))
        headers = b"".join(
            struct.pack("<IIQQQQIIQQ", 0, kind, flags, 0, at, size, link, 0, 0, 0)
            for kind, flags, at, size, link in sections
        )
        shoff = 64 + len(table) + len(strings)
        ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        header = ident + struct.pack(
            "<HHIQQQIHHHHHH", 2, EM_X86_64, 1, 0, 0, shoff, 0, 64, 56, 0, 64, len(sections), 0
        )
        return header + table + strings + headers

    @staticmethod
    def _number(section: str) -> int:
        return _SPECIAL[section] if section in _SPECIAL else 1 + list(_SECTIONS).index(section)
