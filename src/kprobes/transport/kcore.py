"""The memory of the kernel that this machine runs, through /proc/kcore: an ELF core file (proc(5)).

struct Elf64_Ehdr { ...; u64 e_phoff /* 32 */; ...; u16 e_phentsize /* 54 */, e_phnum; ... };
struct Elf64_Phdr { u32 p_type, p_flags; u64 p_offset, p_vaddr, p_paddr, p_filesz, ...; };
"""

import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

from kprobes.errors import MemoryFault, UnreachableError

_KCORE = Path("/proc/kcore")
_MAGIC = b"\x7fELF\x02\x01"
_LOAD = 1
_HEADER = 64
_MAX_SEGMENTS = 1 << 16


class Kcore:
    """Kernel memory that can only be read."""

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
        self._segments = _segments(self._handle, path)

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


def _segments(handle: int, path: Path) -> list[tuple[int, int, int]]:
    # (address, bytes, offset in the file)
    header = os.pread(handle, _HEADER, 0)
    if not header.startswith(_MAGIC) or len(header) < _HEADER:
        os.close(handle)
        raise UnreachableError(f"{path} is no core file of a 64-bit kernel")
    (at,), (size, count) = (
        struct.unpack_from("<Q", header, 32),
        struct.unpack_from("<HH", header, 54),
    )
    table = os.pread(handle, size * min(count, _MAX_SEGMENTS), at)
    found: list[tuple[int, int, int]] = []
    for begin in range(0, len(table) - size + 1, size):
        kind, _, offset, addr, _, length = struct.unpack_from("<IIQQQQ", table, begin)
        if kind == _LOAD:
            found.append((addr, length, offset))
    return found
