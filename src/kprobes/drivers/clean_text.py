"""Kernel text as it was compiled: without what anybody's probes have put there.

It decides where instructions begin, where they lead and how functions are left.
"""

import bisect
from collections.abc import Callable, Iterable

from kprobes.model.plan import Patch
from kprobes.ports import Memory

_DEEPEST = 4
"""Patches at one place, each on top of another's."""
_LONGEST = 32
"""Bytes of a patch, and what planning compared with it."""


class CleanText:
    """Kernel text without patches. Implements ``ports.Memory``."""

    def __init__(self, memory: Memory, read_patches: Callable[[], Iterable[Patch]]) -> None:
        """Take back what is there of some patches.

        Args:
            memory: the text as it is.
            read_patches: returns what others may have written there by now; the same object as
                before when nothing has changed.
        """
        self._memory = memory
        self._read_patches = read_patches
        self._latest: Iterable[Patch] | None = None
        self._patches: list[Patch] = []

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        # What is patched while this runs is known before the bytes are read, or after.
        if self._latest is None:
            self._look()
        code = self._memory.read(addr, size)
        self._look()
        near = self._near(addr, addr + size)
        if not near:
            return code
        start = min(addr, near[0].addr)
        stop = max(addr + size, *(patch.addr + len(patch.new) for patch in near))
        whole = bytearray(self._whole(addr, code, start, stop))
        for _ in range(_DEEPEST):
            if not sum(_take_back(whole, patch.addr - start, patch) for patch in near):
                break
        return bytes(whole[addr - start : addr - start + size])

    def _whole(self, addr: int, code: bytes, start: int, stop: int) -> bytes:
        # Patches that begin before the bytes, or end behind them.
        after = addr + len(code)
        before = self._memory.read(start, addr - start) if start < addr else b""
        return before + code + (self._memory.read(after, stop - after) if after < stop else b"")

    def _look(self) -> None:
        found = self._read_patches()
        if found is not self._latest:
            self._latest = found
            # What was there before may be in bytes that were read before.
            known = dict.fromkeys((*self._patches, *found))
            self._patches = sorted(known, key=lambda patch: patch.addr)

    def _near(self, start: int, stop: int) -> list[Patch]:
        low = bisect.bisect_left(self._patches, start - _LONGEST, key=lambda patch: patch.addr)
        high = bisect.bisect_left(self._patches, stop, key=lambda patch: patch.addr)
        return [p for p in self._patches[low:high] if p.addr + len(p.new) > start]


def _take_back(code: bytearray, at: int, patch: Patch) -> bool:
    if patch.new == patch.old or bytes(code[at : at + len(patch.new)]) != patch.new:
        return False
    code[at : at + len(patch.new)] = patch.old
    return True
