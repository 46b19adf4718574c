"""The memory of the kernel that this machine runs, through /proc/kcore: an ELF core file (proc(5)).

struct Elf64_Ehdr { ...; u64 e_phoff /* 32 */; ...; u16 e_phentsize /* 54 */, e_phnum; ... };
struct Elf64_Phdr { u32 p_type, p_flags; u64 p_offset, p_vaddr, p_paddr, p_filesz, ...; };
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from kprobes.errors import MemoryFault, UnreachableError

_KCORE = Path("/proc/kcore")
_MAGIC = b"\x7fELF\x02\x01"
_LOAD, _NOTE = 1, 4
_PROGRAM = struct.Struct("<IIQQQQ")
_HEADER = 64
_MAX_SEGMENTS = 1 << 16


class Kcore:
    """Kernel memory that can only be read.

    Attributes:
        notes: of the core file; VMCOREINFO is among them.
    """

    def __init__(self, path: Path = _KCORE) -> None:
        """Open it.

        Raises:
            UnreachableError: there is none, or it may not be read.
        """
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise UnreachableError(
                f"the running kernel's text cannot be read: {path}: {e.strerror} (it needs root, "
                "CONFIG_PROC_KCORE, and no lockdown of confidentiality)"
            ) from e
        try:
            headers = list(_headers(self._handle, path))
        except BaseException:
            self.close()
            raise
        self._segments = [(at, size, offset) for kind, at, size, offset in headers if kind == _LOAD]
        notes = [(size, offset) for kind, _, size, offset in headers if kind == _NOTE]
        self.notes = b"".join(os.pread(self._handle, *each) for each in notes)

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        for start, length, offset in self._segments:
            if start <= addr and addr + size <= start + length:
                return self._read(addr, size, offset + addr - start)
        raise MemoryFault(addr, size)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, addr: int, size: int, offset: int) -> bytes:
        found = b""
        while len(found) < size:
            try:
                more = os.pread(self._handle, size - len(found), offset + len(found))
            except OSError as e:
                raise MemoryFault(addr, size, e.strerror or "not readable") from e
            if not more:
                raise MemoryFault(addr, size)
            found += more
        return found


def _headers(handle: int, path: Path) -> Iterator[tuple[int, int, int, int]]:
    # (type, address, bytes, offset in the file)
    header = os.pread(handle, _HEADER, 0)
    if not header.startswith(_MAGIC) or len(header) < _HEADER:
        raise UnreachableError(f"{path} is no core file of a 64-bit kernel")
    (at,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    table = os.pread(handle, size * min(count, _MAX_SEGMENTS), at)
    for begin in range(0, len(table) - _PROGRAM.size + 1, max(size, _PROGRAM.size)):
        kind, _, offset, addr, _, length = _PROGRAM.unpack_from(table, begin)
        yield kind, addr, length, offset
