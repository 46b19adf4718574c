"""A guest's ftrace sites in memory: their list as the kernel keeps it, and their bytes."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from kprobes.errors import MemoryFault
from kprobes.model.kernel import Kernel
from tests.build.kernel import TEXT, make_kernel, symbol

NOP = bytes.fromhex("0f1f440000")
OLD_NOP = bytes.fromhex("6666666690")
ENABLED, DISABLED = 1 << 31, 1 << 25
_PAGES_START = TEXT + 0x80_0000
_PAGE, _RECORDS = 0xFFFF_8880_0000_0000, 0xFFFF_8880_0001_0000


@dataclass
class SparseMemory:
    """Bytes at some addresses. Implements ``ports.Memory``."""

    pieces: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def read(self, addr: int, size: int) -> bytes:
        for start, data in self.pieces.items():
            if start <= addr and addr + size <= start + len(data):
                return data[addr - start : addr - start + size]
        raise MemoryFault(addr, size)


def make_sites(
    sites: Mapping[int, bytes], *, flags: Mapping[int, int] | None = None, is_readable: bool = True
) -> tuple[SparseMemory, Kernel]:
    """Return memory with these bytes at sites, and a kernel with a function at each.

    Args:
        sites: address to bytes; all within one stretch of text.
        flags: of the records; 0 where none is given.
        is_readable: whether the text is there.
    """
    records = b"".join(struct.pack("<QQ", addr, (flags or {}).get(addr, 0)) for addr in sites)
    memory = SparseMemory()
    memory.pieces[_PAGES_START] = struct.pack("<Q", _PAGE)
    memory.pieces[_PAGE] = struct.pack("<QQI", 0, _RECORDS, len(sites))
    memory.pieces[_RECORDS] = records
    if is_readable and sites:
        text = bytearray(max(sites) + 5 - min(sites))
        for addr, code in sites.items():
            text[addr - min(sites) : addr - min(sites) + 5] = code
        memory.pieces[min(sites)] = bytes(text)
    functions = [symbol(f"f{n}", addr) for n, addr in enumerate(sites)]
    return memory, make_kernel([*functions, symbol("ftrace_pages_start", _PAGES_START, type="d")])
