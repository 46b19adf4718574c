"""The module of tests/build/objects as a kernel may have loaded it, in a memory of its own."""

from collections.abc import Mapping

import numpy as np

from kprobes.errors import MemoryFault
from kprobes.image.modules import table_of
from kprobes.image.symbols import ModuleSymbols
from tests.build.objects import FOLDER

MODULE = FOLDER / "module.ko"
BUILD_ID = bytes(range(1, 9))
NOTE = b"\x04\0\0\0\x08\0\0\0\x03\0\0\0GNU\0" + BUILD_ID
TEXT, DATA, NOTES = 0xFFFF_FFFF_C010_0000, 0xFFFF_FFFF_C020_0000, 0xFFFF_FFFF_C030_0000
PER_CPU = 0x2_F0C0
SYMBOLS = {"serves": TEXT, "limit": DATA, "calls": PER_CPU}
"""What is there of it when it has begun: what it did that with is gone."""


def loaded(symbols: Mapping[str, int] = SYMBOLS, *, name: str = "module") -> ModuleSymbols:
    """Return a module of these names; its notes begin a page that nothing is mapped before."""
    names = [each.encode() for each in symbols]
    table = table_of(names, np.array([*symbols.values()], np.uint64), b"t" * len(names))
    ranges = ((TEXT, TEXT + 0x1000), (NOTES - 0x1000, NOTES + 0x1000))
    return ModuleSymbols(name=name, table=table, ranges=ranges)


class ModuleMemory:
    """Pages of nothing, one of which has a note. Implements ``ports.Memory``."""

    def __init__(self, note: bytes = NOTE) -> None:
        self._note = note

    def read(self, addr: int, size: int) -> bytes:
        if NOTES - 0x1000 <= addr < NOTES:
            raise MemoryFault(addr, size)
        found = bytes(0x40) + self._note if addr == NOTES else b""
        return found.ljust(size, b"\0")
