"""What this machine's tasks are called: from /proc, and from what its tracer has noted."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kprobes.model.layout import COMM_SIZE

PROC = Path("/proc")
_WORKER = re.compile(rb"kworker/(?!R-)[^-+]*")


def running_comms(proc: Path = PROC) -> dict[int, bytes]:
    """Return the names of all tasks that run now, threads too, by pid."""
    found: dict[int, bytes] = {}
    for comm in proc.glob("[0-9]*/task/[0-9]*/comm"):
        # Tasks end while we look.
        with suppress(OSError):
            found[int(comm.parent.name)] = _own_name(comm.read_bytes().removesuffix(b"\n"))
    return found


def saved_comms(tracing: Path) -> Mapping[int, bytes]:
    """Return what ``saved_cmdlines`` of a tracefs has, by pid; nothing when it has no such."""
    try:
        lines = (tracing / "saved_cmdlines").read_bytes().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(b" ") for line in lines)
    return {int(pid): comm for pid, _, comm in pairs if pid.isdigit()}


def _own_name(name: bytes) -> bytes:
    # proc_task_name(): the whole name of a kernel's thread, and what a worker works on behind
    # its own; rescuers are called R-NAME.
    worker = _WORKER.match(name)
    return (name if worker is None else worker[0])[: COMM_SIZE - 1]
