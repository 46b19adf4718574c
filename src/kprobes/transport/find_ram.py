"""Finds the quickest way to a guest's RAM: what the stub's monitor and /proc say, to a Ram.

``/proc/PID/maps`` and ``map_files`` are written down in proc(5).
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from msgspec import Struct

from kprobes.errors import FormatError, MemoryFault, TargetError
from kprobes.formats.mtree import RamRun, parse_mtree
from kprobes.transport.ram import (
    FileRun,
    GuestRam,
    ProcessPlace,
    ProcessRam,
    ProcessRun,
    SharedRam,
    StubRam,
)
from kprobes.transport.stub import Stub
from kprobes.units import Phys

RAM_BACKENDS = ("shared", "process", "stub")
"""From the quickest to the slowest."""
_MAX_MAPPINGS = 1 << 17
_SAMPLES = 64
_SAMPLE_SIZE = 64
_HOST_ADDR = re.compile(r"Host virtual address for 0x[0-9a-f]+ \(.*\) is (?:0x)?([0-9a-f]{1,16})$")
_MAPPING = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) [0-9a-f]+:[0-9a-f]+ ([0-9]+) *(.*)"
)


class Mapping(Struct, frozen=True, kw_only=True):
    """One line of ``/proc/PID/maps``.

    Attributes:
        flags: such as ``rw-s``: s for shared.
        offset: of ``start`` in the file.
        inode: of the file; 0 for none.
    """

    start: int
    stop: int
    flags: str
    offset: int
    inode: int
    path: str


def open_ram(stub: Stub, *, backends: Sequence[str] = RAM_BACKENDS) -> GuestRam:
    """Open a stopped guest's RAM by the first way that works.

    Args:
        stub: of the guest; serves the last way, and tells where RAM is for all.
        backends: those to try, in this order.

    Raises:
        TargetError: none of them works.
    """
    runs = parse_mtree(stub.monitor("info mtree -f"))
    spans = [(run.start, run.size) for run in runs]
    placed = _place(stub, runs) if {"shared", "process"} & set(backends) else []
    pid = stub.peer() if placed else None
    why = ["the QEMU process is not on this machine, or hidden"] if pid is None else []
    for backend in backends:
        if backend == "stub":
            return StubRam(stub, spans)
        if pid is not None:
            try:
                ram = _open_files(pid, placed) if backend == "shared" else ProcessRam(pid, placed)
            except (OSError, ValueError) as e:
                why.append(f"{backend}: {e}")
                continue
            if _is_same(stub, ram):
                ram.host = ProcessPlace(pid=pid, runs=tuple(placed))
                return ram
            ram.close()
            why.append(f"{backend}: process {pid} is not the one that runs this guest")
    raise TargetError(f"no way to the guest's RAM: {'; '.join(why)}")


def parse_host_address(text: str) -> int:
    """Read what ``gpa2hva`` prints."""
    found = _HOST_ADDR.search(text.strip())
    if found is None:
        raise FormatError(f"gpa2hva printed {text.strip()[:80]!r}")
    return int(found[1], 16)


def parse_maps(lines: Iterator[str]) -> list[Mapping]:
    """Read ``/proc/PID/maps``, in ascending order as it comes."""
    mappings: list[Mapping] = []
    for line in islice(lines, _MAX_MAPPINGS):
        found = _MAPPING.match(line)
        if found is None:
            raise FormatError(f"no line of /proc/PID/maps: {line[:80]!r}")
        start, stop, offset = (int(found[i], 16) for i in (1, 2, 4))
        mappings.append(
            Mapping(
                start=start,
                stop=stop,
                flags=found[3],
                offset=offset,
                inode=int(found[5]),
                path=found[6],
            )
        )
    return mappings


def _place(stub: Stub, runs: Sequence[RamRun]) -> list[ProcessRun]:
    # One question per block: its runs lie in the process as they lie in the block.
    bases: dict[str, int] = {}
    for run in runs:
        if run.block not in bases:
            host = parse_host_address(stub.monitor(f"gpa2hva {run.start:#x}"))
            bases[run.block] = host - run.offset
    return [
        ProcessRun(start=run.start, size=run.size, addr=bases[run.block] + run.offset)
        for run in runs
    ]


def _open_files(pid: int, placed: Sequence[ProcessRun]) -> SharedRam:
    with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="replace") as lines:
        mappings = parse_maps(iter(lines))
    return SharedRam([part for run in placed for part in _file_runs(pid, run, mappings)])


def _file_runs(pid: int, run: ProcessRun, mappings: Sequence[Mapping]) -> Iterator[FileRun]:
    at = run.addr
    for mapping in mappings:
        if mapping.start <= at < mapping.stop and at < run.addr + run.size:
            if mapping.flags[:2] + mapping.flags[3:] != "rws" or not mapping.inode:
                break
            size = min(mapping.stop, run.addr + run.size) - at
            yield FileRun(
                start=Phys(run.start + at - run.addr),
                size=size,
                path=_find_file(pid, mapping),
                offset=mapping.offset + at - mapping.start,
            )
            at += size
    if at < run.addr + run.size:
        raise ValueError(f"RAM at {run.start:#x} is not in a shared file")


def _find_file(pid: int, mapping: Mapping) -> Path:
    # Names exactly this file, also a deleted one or a memfd, but needs privileges.
    exact = Path(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.stop:x}")
    if os.access(exact, os.R_OK | os.W_OK):
        return exact
    for path in (Path(mapping.path), *sorted(Path(f"/proc/{pid}/fd").iterdir())):
        if _is_file(path, mapping):
            return path
    raise ValueError(f"the file {mapping.path} is not to be found")


def _is_file(path: Path, mapping: Mapping) -> bool:
    # The device is not compared: overlayfs and btrfs show another in /proc than stat does. The
    # contents are, afterwards.
    try:
        is_it = path.stat().st_ino == mapping.inode
    except OSError:
        return False
    return is_it and os.access(path, os.R_OK | os.W_OK)


def _is_same(stub: Stub, ram: SharedRam | ProcessRam) -> bool:
    # The process that listens need not be the one that runs the guest.
    spans = _samples(ram.runs)
    try:
        return ram.read_many(spans) == stub.read_physical_many(spans)
    except MemoryFault:
        return False


def _samples(runs: Sequence[tuple[Phys, int]]) -> list[tuple[int, int]]:
    step = max(sum(size for _, size in runs) // _SAMPLES, _SAMPLE_SIZE)
    spans = [
        (addr, _SAMPLE_SIZE)
        for start, size in runs
        for addr in range(start, start + size - _SAMPLE_SIZE + 1, step)
    ]
    return spans[: 4 * _SAMPLES]
