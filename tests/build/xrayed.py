"""Output of the real ``kprobe xray``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kprobes.transport.qemu import Machine

_KPROBE = Path(sys.executable).with_name("kprobe")


def xray(*words: str) -> dict[str, Any]:
    """Return what ``kprobe xray`` says."""
    done = subprocess.run(
        [_KPROBE, "xray", "--format", "json", *words], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)


def look(machine: Machine, *words: str) -> dict[str, Any]:
    """Return what it says of a guest."""
    return xray("--target", f"qemu:{machine.stub_address}", *words)


def held(seen: dict[str, Any], mark: dict[str, Any], side: str) -> str:
    """Return the bytes that a side has of a mark."""
    start, stop = (int(mark[edge], 16) for edge in ("start", "stop"))
    rows = [row for row in seen["text"] if row["side"] in (side, "both")]
    found = {int(row["address"], 16): row["bytes"] for row in rows}
    return "".join(code for at, code in sorted(found.items()) if start <= at < stop)


def shown_at(seen: dict[str, Any], mark: dict[str, Any]) -> str:
    """Return the instruction in memory that a mark begins at."""
    (text,) = (
        row["text"]
        for row in seen["text"]
        if row["address"] == mark["start"] and row["side"] in ("memory", "both")
    )
    return text


def mark_by(seen: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the one mark that somebody left."""
    (mark,) = [mark for mark in seen["marks"] if mark["author"] == source]
    return mark


def notes(seen: dict[str, Any], title: str) -> list[str]:
    """Return what is noted in the one detour whose title begins so."""
    (detour,) = [d for d in seen["detours"] if d["title"].startswith(title)]
    return [row["note"] for row in detour["text"] if "note" in row]
