"""Kernels on this machine that could be probed: guests under QEMU, and its own.

No stub is connected to and no guest stands still: what runs in one is read from its memory. A
kernel's release and build id are in its VMCOREINFO, which has a page of its own.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct

from kprobes.errors import KprobesError
from kprobes.formats.vmcoreinfo import VmcoreInfo, find
from kprobes.guest.journal import Entry, process_start
from kprobes.transport.connect import is_process_paused
from kprobes.transport.find_ram import Mapping
from kprobes.transport.running import Qemu, find_qemus
from kprobes.units import MIB

_PAGE = 4096
_STEP = 64 * MIB
_LONGEST_S = 2.0
"""For one guest's memory: some 8 GiB that are in use."""
_PRESENT = np.uint64(1 << 63)
"""Of /proc/PID/pagemap, Documentation/admin-guide/mm/pagemap.rst: the page is in memory."""


class LocalGuest(Struct, frozen=True, kw_only=True):
    """One guest under QEMU.

    Attributes:
        name: what ``--target`` names it by.
        qemu: its process.
        is_paused: whether it stands still; None where nothing tells.
        release, build_id: of its kernel; "" where that was not found, or has none.
        is_stub_free: whether nobody uses its stub, if it has one.
        ram: how its memory can be reached: ``shared``, ``process``, or ``stub``.
        tracers: journals of those who have something in it.
    """

    name: str
    qemu: Qemu
    is_paused: bool | None
    release: str
    build_id: str
    is_stub_free: bool
    ram: str
    tracers: tuple[Entry, ...]


def local_guests(entries: Iterable[Entry]) -> list[LocalGuest]:
    """Return the guests that this user may look at, without any standing still for it.

    Args:
        entries: journals of this machine.
    """
    journals, qemus = list(entries), find_qemus()
    names = [qemu.command.name for qemu in qemus]
    return [
        _describe(qemu, [each for each in journals if _is_of(each, qemu)], names) for qemu in qemus
    ]


def _describe(qemu: Qemu, journals: Sequence[Entry], names: Sequence[str]) -> LocalGuest:
    command = qemu.command
    info = read_kernel(qemu)
    is_named = bool(command.name) and names.count(command.name) == 1
    return LocalGuest(
        name=f"name:{command.name}" if is_named else f"pid:{qemu.pid}",
        qemu=qemu,
        is_paused=is_process_paused(qemu.pid),
        release=info.release if info is not None else "",
        build_id=info.build_id.hex() if info is not None else "",
        is_stub_free=bool(command.stub) and qemu.is_free(command.stub),
        ram=_backend(qemu),
        tracers=tuple(journals),
    )


def read_kernel(qemu: Qemu, *, at_most_s: float = _LONGEST_S) -> VmcoreInfo | None:
    """Return what a guest's kernel says about itself in its memory.

    None where nothing was found in the time, or more than one kernel, as after a reboot.

    Args:
        qemu: its process.
        at_most_s: CPU time that it may take; of the clock's, others may have most.
    """
    found: dict[tuple[str, bytes], VmcoreInfo] = {}
    if qemu.ram is not None:
        deadline = time.thread_time() + at_most_s
        with suppress(OSError, KprobesError):
            for data in _pages(Path("/proc", str(qemu.pid)), qemu.ram):
                found |= {(each.release, each.build_id): each for each in find(data)}
                if time.thread_time() > deadline:
                    return None
    return next(iter(found.values())) if len(found) == 1 else None


def _pages(process: Path, ram: Mapping) -> Iterator[bytes]:
    # Only what is in memory: a page that was never touched is not made by reading it.
    with (
        (process / "pagemap").open("rb", buffering=0) as pagemap,
        (process / "mem").open("rb", buffering=0) as memory,
    ):
        for start in range(ram.start, ram.stop, _STEP):
            stop = min(start + _STEP, ram.stop)
            entries = os.pread(pagemap.fileno(), (stop - start) // _PAGE * 8, start // _PAGE * 8)
            present = np.frombuffer(entries, np.uint64) & _PRESENT != 0
            edges = np.flatnonzero(np.diff(np.r_[False, present, False].astype(np.int8)))
            for first, end in edges.reshape(-1, 2).tolist():
                yield os.pread(memory.fileno(), (end - first) * _PAGE, start + first * _PAGE)


def _backend(qemu: Qemu) -> str:
    if qemu.ram is None or not os.access(f"/proc/{qemu.pid}/mem", os.R_OK | os.W_OK):
        return "stub"
    return "shared" if qemu.ram.flags[3] == "s" and qemu.ram.inode else "process"


def _is_of(entry: Entry, qemu: Qemu) -> bool:
    if entry.window is not None:
        window = entry.window
        return window.pid == qemu.pid and process_start(qemu.pid) == window.started
    address = entry.target.removeprefix("qemu:")
    return address in qemu.command.stubs or address in qemu.command.monitors
