"""QEMU's ``info mtree -f``: where guest RAM is, as text to runs.

One paragraph per flat view (QEMU, softmmu/memory.c, mtree_print_flatview)::

    FlatView #0
     AS "memory", root: system
     Root memory region: system
      0000000000100000-000000001fffffff (prio 0, ram): pc.ram @0000000000100000 KVM

From 7.2 to 10.x only the accelerator's name at the end came and went.
"""

import re

from msgspec import Struct

from kprobes.errors import FormatError
from kprobes.units import Phys

MAX_RUNS = 4096
"""Runs that we accept; machines with 1,000 DIMMs do not exist."""
_SYSTEM = ' AS "memory", root: system'
_MAX_ADDR = 1 << 56
# Priority 0 leaves out the RAM of PCI cards (their BARs are mapped with priority 1): frame
# buffers hold nothing of the kernel's and are not part of the memory backend.
_LINE = re.compile(
    r"^ +([0-9a-f]{16})-([0-9a-f]{16}) \(prio 0, (?:nv-)?ram\): (.*?)(?: @([0-9a-f]{16}))?"
    r"(?: (?:KVM|HVF|WHPX|NVMM|MSHV|Xen))?$"
)


class RamRun(Struct, frozen=True, kw_only=True):
    """Guest-physical addresses that are one stretch of a RAM block.

    Attributes:
        block: QEMU's name for the block, such as ``pc.ram``.
        offset: of ``start`` in the block.
    """

    start: Phys
    size: int
    block: str
    offset: int

    @property
    def stop(self) -> int:
        """The first address after it."""
        return self.start + self.size


def parse_mtree(text: str) -> tuple[RamRun, ...]:
    """Return the runs of RAM in the system's memory, ascending; ROM and devices are left out.

    Neighbours of one block that also lie side by side in the block are one run.

    Raises:
        FormatError: no flat view of the system's memory, or one that makes no sense.
    """
    runs: list[RamRun] = []
    for line in _system_view(text):
        found = _LINE.match(line)
        if found:
            _append(runs, _run(found))
    if not runs:
        raise FormatError("info mtree shows no RAM in the system's memory")
    return tuple(runs)


def _system_view(text: str) -> list[str]:
    for paragraph in text.replace("\r", "").split("\n\n"):
        lines = paragraph.split("\n")
        if any(line.startswith(_SYSTEM) for line in lines):
            return lines
    raise FormatError("info mtree shows no flat view of the system's memory")


def _run(found: re.Match[str]) -> RamRun:
    start, last = int(found[1], 16), int(found[2], 16)
    if not start <= last < _MAX_ADDR:
        raise FormatError(f"info mtree shows RAM from {start:#x} to {last:#x}")
    offset = int(found[4] or "0", 16)
    return RamRun(start=Phys(start), size=last - start + 1, block=found[3], offset=offset)


def _append(runs: list[RamRun], run: RamRun) -> None:
    before = runs[-1] if runs else None
    if before is not None and run.start < before.stop:
        raise FormatError(f"info mtree shows RAM twice at {run.start:#x}")
    if before is not None and _is_next(before, run):
        size = before.size + run.size
        runs[-1] = RamRun(start=before.start, size=size, block=run.block, offset=before.offset)
    elif len(runs) == MAX_RUNS:
        raise FormatError(f"info mtree shows more than {MAX_RUNS} runs of RAM")
    else:
        runs.append(run)


def _is_next(before: RamRun, run: RamRun) -> bool:
    is_near = before.stop == run.start and before.offset + before.size == run.offset
    return is_near and before.block == run.block
