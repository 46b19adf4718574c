"""Kernel text as it was before anybody's probes: what decides where instructions begin."""

from collections.abc import Iterator

from kprobes.drivers.specimen import Specimen
from kprobes.errors import MemoryFault


class CleanText:
    """Kernel text without anybody's patches. Implements ``ports.Memory``."""

    def __init__(self, specimen: Specimen) -> None:
        self._specimen = specimen

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        specimen = self._specimen
        found = specimen.now(addr, size)
        if found is None:
            if specimen.image is None:
                raise MemoryFault(addr, size)
            return specimen.image.read(addr - specimen.kernel.slide, size)
        code = bytearray(found)
        # The guest's own were there first, mostly, and ours are taken off before.
        for place, new, old in (*_ours(specimen), *_guests(specimen)):
            _take_back(code, place - addr, new, old)
        return bytes(code)


def _ours(specimen: Specimen) -> Iterator[tuple[int, bytes, bytes]]:
    for entry in specimen.entries:
        for undo in entry.undos:
            yield undo.addr, undo.new, undo.old


def _guests(specimen: Specimen) -> Iterator[tuple[int, bytes, bytes]]:
    jump, size = specimen.arch.listing.jump_target, specimen.arch.site.size
    for probe in specimen.probes:
        if probe.is_ftrace or probe.is_disabled:
            continue
        if probe.detour is not None:
            code = specimen.now(probe.addr, size) or b""
            if jump(probe.addr, code) == probe.detour:
                yield probe.addr, code, probe.opcode + probe.copied
        yield probe.addr, specimen.arch.patch.breakpoint, probe.opcode


def _take_back(code: bytearray, at: int, new: bytes, old: bytes) -> None:
    if at >= 0 and bytes(code[at : at + len(new)]) == new:
        code[at : at + len(new)] = old[: len(new)]
