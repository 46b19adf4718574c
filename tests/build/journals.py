"""Journals on disk, and as they are read."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from kprobes.guest.allocations import Allocation, Call, Kind
from kprobes.guest.armed import ArmedPatch
from kprobes.guest.journal import Boot, Entry, Journal, MarkPlace, directory, process_start, read
from kprobes.guest.patches import check_unchanged
from kprobes.units import Addr, Phys
from tests.build.pages import FakeRam, Pages
from tests.build.stub import CORE, G_SIZE, FakeStub

MARK = bytes(range(16))
MARK_AT = Phys(0x3000)
BOOT = Boot(addr=Addr(0xFFFF_FFFF_8200_0000), phys=Phys(0x8000), value=b"canary.1")
OLD, NEW = b"\x0f\x1f\x44\x00\x00", b"\xe8abcd"
"""Of what ``patched`` patches."""
_PLACES = (0x100, 0x180)
_TABLES, _RAM = 0x4000, 0x10000
_LENT = Allocation(kind=Kind.DATA, addr=0x5000, size=4096)
_MTREE = """FlatView #0
 AS "memory", root: system
 Root memory region: system
  0000000000000000-000000000000ffff (prio 0, ram): pc.ram
"""


def lend(stub: FakeStub, journal: Journal, *, state: int | None = None) -> None:
    """Put a session's mark into a guest, which has allocated it memory.

    Args:
        stub: of the guest.
        journal: of the session.
        state: how often its patches have changed; by default as often as the journal says.
    """
    journal.note_boot(BOOT)
    journal.allocations.begin(Call(frame=0, trap=0, allocates=_LENT))
    journal.allocations.end(0)
    journal.note_mark(MarkPlace(allocation=Addr(_LENT.addr), phys=MARK_AT))
    mark_guest(stub, journal.mark, journal.state if state is None else state)


def patched(stub: FakeStub, *, held: bytes = NEW) -> Journal:
    """Return the journal of a session that has patched two places of a guest from OLD to NEW.

    Args:
        stub: of the guest.
        held: what is there now.
    """
    journal = Journal.create("/somewhere")
    journal.record(
        [ArmedPatch(phys=Phys(p), addr=Addr(p), old=OLD, new=NEW, what="vfs_read") for p in _PLACES]
    )
    lend(stub, journal)
    for place in _PLACES:
        stub.physical[place : place + len(held)] = held
    return journal


def text_of(stub: FakeStub) -> list[bytes]:
    """Return what is at the places that ``patched`` has patched."""
    return [bytes(stub.physical[at : at + len(OLD)]) for at in _PLACES]


def take_nothing_back(_stub: object, _entry: object, left: Sequence[ArmedPatch]) -> tuple[int, int]:
    """Do as ``free_after_crash`` does where the guest has no kernel."""
    check_unchanged(left)
    return 0, 0


def mark_guest(stub: FakeStub, mark: bytes = MARK, state: int = 0) -> None:
    """Put a mark and a boot into a guest, and have its monitor say where its RAM is."""
    stub.physical.extend(bytes(_RAM - len(stub.physical)))
    stub.physical[MARK_AT : MARK_AT + 24] = mark + state.to_bytes(8, "little")
    stub.physical[BOOT.phys : BOOT.phys + 8] = BOOT.value
    ram = FakeRam(0)
    ram.data = stub.physical
    Pages(ram, _TABLES).map(BOOT.addr, BOOT.phys)
    core = CORE.replace(b"</feature>", b'<reg name="cr3" bitsize="64" regnum="4"/></feature>')
    stub.answers[b"qXfer:features:read:core.xml"] = b"l" + core
    stub.answers[b"g"] = b"x" * 2 * G_SIZE + (_TABLES.to_bytes(8, "little").hex().encode())
    for asked, said in (
        (b"info mtree -f", _MTREE.encode()),
        (b"gpa2hva", b"Host virtual address for 0x0 (pc.ram) is 0x1000"),
    ):
        stub.answers[b"qRcmd," + asked.hex().encode()] = said.hex().encode()


@cache
def dead_pid() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def make_patch(
    phys: int, *, old: bytes = b"old!", new: bytes = b"new!", what: str = "e"
) -> ArmedPatch:
    """Return one patch; its kernel address follows from the physical one."""
    addr = Addr(0xFFFF_FFFF_8100_0000 + phys)
    return ArmedPatch(phys=Phys(phys), addr=addr, old=old, new=new, what=what)


def make_entry(target: str, *patches: ArmedPatch, is_live: bool = False) -> Entry:
    """Return a journal that is on no disk."""
    return Entry(
        path=Path("/nonexistent/journal.jsonl"),
        target=target,
        build_id="",
        release="6.1.0-56-cloud-amd64",
        pid=os.getpid() if is_live else dead_pid(),
        started=process_start(os.getpid()),
        patches=patches,
    )


def write_journal(
    target: str, *patches: ArmedPatch, name: str = "1", is_live: bool = False
) -> Entry:
    """Write a journal where journals are kept, as ``guest.journal`` writes it."""
    path = directory() / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "version": 1,
            "target": target,
            "pid": os.getpid() if is_live else dead_pid(),
            "started": process_start(os.getpid()),
            "mark": MARK.hex(),
        },
        {"boot": {"addr": BOOT.addr, "phys": BOOT.phys, "value": BOOT.value.hex()}},
        *([] if not patches else _marked()),
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
                for undo in patches
            ]
        },
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read(path)


def _marked() -> list[dict[str, Any]]:
    call = {"frame": 0, "landing": 0, "lends": asdict(_LENT), "returns": None}
    marked = {"loan": _LENT.addr, "phys": MARK_AT}
    return [{"begin": call}, {"end": 0}, {"marked": marked}]
