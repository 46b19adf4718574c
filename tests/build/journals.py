"""Journals on disk, and as they are read."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from kprobes.drivers.journal import Entry, Undo, directory, process_start, read
from kprobes.units import Addr, Phys


@cache
def dead_pid() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def make_undo(phys: int, *, old: bytes = b"old!", new: bytes = b"new!", what: str = "e") -> Undo:
    """Return one patch; its kernel address follows from the physical one."""
    addr = Addr(0xFFFF_FFFF_8100_0000 + phys)
    return Undo(phys=Phys(phys), addr=addr, old=old, new=new, what=what)


def make_entry(target: str, *undos: Undo, is_live: bool = False) -> Entry:
    """Return a journal that is on no disk."""
    return Entry(
        path=Path("/nonexistent/journal.jsonl"),
        target=target,
        build_id="",
        release="6.1.0-56-cloud-amd64",
        pid=os.getpid() if is_live else dead_pid(),
        started=process_start(os.getpid()),
        undos=undos,
    )


def write_journal(target: str, *undos: Undo, name: str = "1", is_live: bool = False) -> Entry:
    """Write a journal where journals are kept, as ``drivers.journal`` writes it."""
    path = directory() / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "version": 1,
            "target": target,
            "pid": os.getpid() if is_live else dead_pid(),
            "started": process_start(os.getpid()),
        },
        {"build_id": "", "release": "6.1.0-56-cloud-amd64"},
        {
            "undos": [
                {
                    "phys": undo.phys,
                    "addr": undo.addr,
                    "old": undo.old.hex(),
                    "new": undo.new.hex(),
                    "what": undo.what,
                }
                for undo in undos
            ]
        },
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read(path)
