"""Notes of a session in its memory in the guest: its mark, and how to restore the guest.

A snapshot of a guest has its probes, but not their journal. So what the journal says is in the
guest, too, after the arena's data; little endian, and on a page of its own:

    struct notes {
        char magic[16];          // "kprobes notes 2"
        char mark[16];           // of the session
        u64  state;              // how often the patches changed; see guest.identity
        u64  addr;               // of this struct: a page that was freed is no longer mapped there
        u64  live_size, undos;  // undos is ~0 where they did not fit
        char loans[];            // a JSON object; "frames" is null where they did not fit
    };                           // one page
    struct { u64 addr, size; char old[32], new[32]; } undo[];    // size 0: of none

Before, magic was "kprobes session", and old and new were 8 bytes: snapshots may have such.

The guest may be hostile, and have written this itself: what it says is used for this guest alone.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import MemoryFault
from kprobes.guest.allocations import Allocation, AllocationLog, Call, Kind
from kprobes.guest.arena import NOTES_PAGE, UNDO_SIZE, Arena
from kprobes.guest.armed import FLAGS, ArmedPatch
from kprobes.guest.guest import Guest, GuestMemory, remembering
from kprobes.guest.journal import Boot, Journal, MarkPlace
from kprobes.guest.rings import MappedRange
from kprobes.model.plan import LONGEST_PATCH, InstanceTable
from kprobes.plan.ftrace import DISABLED
from kprobes.ports import Ram
from kprobes.transport.ram import StubRam
from kprobes.units import MIB, Addr, Phys

MAGIC = b"kprobes notes 2\0"
_HEAD = struct.Struct("<16s16sQQQQ")
_UNDO = struct.Struct(f"<QQ{LONGEST_PATCH}s{LONGEST_PATCH}s")
_UNDOS = {MAGIC: _UNDO, b"kprobes session\0": struct.Struct("<QQ8s8s")}
"""By the notes' magic."""
_MARK_OFFSET = 16
_FLAGS_SIZE = 8
_TOO_MANY = (1 << 64) - 1
_MAX_UNDOS, _MAX_NOTES = 1 << 20, 64
_STEP = 64 * MIB


class Notes(Struct, frozen=True, kw_only=True):
    """What a session has left in a guest.

    Attributes:
        mark, state: of the session.
        place: of the mark.
        live: that the guest has made it.
        instances: of calls that return to code of the session, or None where there was no room.
        patches: of its patches, or None where there was no room.
    """

    mark: bytes
    state: int
    place: Phys
    live: tuple[Allocation, ...]
    instances: tuple[InstanceTable, ...] | None
    patches: tuple[ArmedPatch, ...] | None

    @property
    def memory(self) -> int:
        """Bytes that are allocated."""
        return sum(
            allocation.size for allocation in self.live if allocation.kind in (Kind.DATA, Kind.CODE)
        )


class NotesWriter:
    """Writes a session's notes into its arena: of patches only what changes."""

    def __init__(self, memory: GuestMemory, arena: Arena, journal: Journal) -> None:
        """Write nothing yet; ``arena`` has room for the notes."""
        size = NOTES_PAGE + arena.patches * UNDO_SIZE
        self._range = MappedRange(memory, arena.notes, size)
        self._arena = arena
        self._journal = journal
        self._slots: dict[tuple[Phys, bytes], int] = {}
        self._free: list[int] = []
        self._count = 0

    def write(self, patches: Sequence[ArmedPatch] = ()) -> None:
        """Write all of it, with these patches and no others; errors as for ``change``."""
        self._slots, self._free, self._count = {}, [], 0
        self.change((), patches)

    def change(self, gone: Sequence[ArmedPatch], new: Sequence[ArmedPatch]) -> None:
        """Write what is allocated and how often patches changed, with some patches more or less.

        Raises:
            GuestReplacedError: another guest runs there, or another state of it.
        """
        # The mark is in what is written: it would pass for one that was there.
        self._journal.check()
        room = self._arena.patches
        for patch in gone:
            slot = self._slots.pop((patch.phys, patch.new), None)
            if slot is not None:
                self._free.append(slot)
                if slot < room:
                    self._range.write(_offset(slot), bytes(UNDO_SIZE))
        for patch in new[: len(self._free)]:
            self._slots[patch.phys, patch.new] = slot = self._free.pop()
            if slot < room:
                self._range.write(_offset(slot), _record(patch))
        self._append([p for p in new if (p.phys, p.new) not in self._slots])
        self._write_head()

    def _append(self, patches: Sequence[ArmedPatch]) -> None:
        first = self._count
        for patch in patches:
            self._slots[patch.phys, patch.new] = self._count
            self._count += 1
        fitting = patches[: max(self._arena.patches - first, 0)]
        if fitting:
            self._range.write(_offset(first), b"".join(map(_record, fitting)))

    def _write_head(self) -> None:
        journal, addr = self._journal, self._arena.notes
        live = _live(journal.allocations)
        count = self._count if self._count <= self._arena.patches else _TOO_MANY
        head = _HEAD.pack(MAGIC, journal.mark, journal.state, addr, len(live), count)
        self._range.write(0, head + live)
        journal.noted = journal.state


def _offset(slot: int) -> int:
    return NOTES_PAGE + slot * UNDO_SIZE


def begin_notes(memory: GuestMemory, addr: Addr, allocation: Addr, journal: Journal) -> None:
    """Write notes without patches into memory that a call has allocated, as it is being noted."""
    call = journal.allocations.call
    new = None if call is None else call.allocates
    live = _live(journal.allocations, () if new is None else (replace(new, addr=allocation),))
    memory.write(addr, _HEAD.pack(MAGIC, journal.mark, journal.state, addr, len(live), 0) + live)
    journal.noted = journal.state
    journal.note_mark(
        MarkPlace(allocation=allocation, phys=Phys(memory.physical(addr) + _MARK_OFFSET))
    )


def can_search(guest: Guest) -> bool:
    """Whether a guest's memory is reached quickly enough to be searched for notes."""
    return not isinstance(guest.memory.ram, StubRam)


def find_notes(guest: Guest) -> Iterator[Notes]:
    """Yield the notes of every session that the guest has memory of."""
    for phys in islice(_pages(guest.memory.ram), _MAX_NOTES):
        with suppress(MemoryFault, ValueError, KeyError, TypeError, RecursionError):
            yield _read(guest.memory, phys)


def _record(patch: ArmedPatch) -> bytes:
    return _UNDO.pack(patch.addr, len(patch.old), patch.old, patch.new)


def _live(allocations: AllocationLog, more: Iterable[Allocation] = ()) -> bytes:
    live = (*allocations.live, *more)
    info: dict[str, Any] = {
        "loans": [[allocation.kind, allocation.addr, allocation.size] for allocation in live],
        "frames": [[f.addr, f.count, f.stride, f.trampoline] for f in allocations.instances],
    }
    room = NOTES_PAGE - _HEAD.size
    # Without calls they do not put a guest right, and without what is allocated they are none.
    texts = (json.dumps(each).encode() for each in (info, info | {"frames": None}, {}))
    return next(text for text in texts if len(text) <= room)


def _pages(ram: Ram) -> Iterator[int]:
    magics = [np.frombuffer(magic, np.uint64) for magic in _UNDOS]
    for start, size in ram.runs:
        for at in range(start, start + size, _STEP):
            data = ram.read(at, min(_STEP, start + size - at) // NOTES_PAGE * NOTES_PAGE)
            pages = np.frombuffer(data, np.uint64).reshape(-1, NOTES_PAGE // 8)
            found = np.any([(pages[:, :2] == magic).all(axis=1) for magic in magics], axis=0)
            for page in np.flatnonzero(found).tolist():
                yield at + page * NOTES_PAGE


def _read(memory: GuestMemory, phys: int) -> Notes:
    page = memory.ram.read(phys, NOTES_PAGE)
    magic, mark, state, addr, size, count = _HEAD.unpack_from(page)
    if memory.physical(addr) != phys:
        raise ValueError("a page that is no longer allocated")
    info = cast("dict[str, Any]", json.loads(page[_HEAD.size : _HEAD.size + size]))
    instances, live = (
        info["frames"],
        tuple(_allocation(*allocation) for allocation in info["loans"]),
    )
    if not any(each.kind is Kind.DATA and 0 <= addr - each.addr < each.size for each in live):
        raise ValueError("notes in memory that is not allocated")
    return Notes(
        mark=mark,
        state=state,
        place=Phys(phys + _MARK_OFFSET),
        live=live,
        instances=None if instances is None else tuple(_instances(*each) for each in instances),
        patches=None
        if count == _TOO_MANY
        else tuple(_patches(memory, addr + NOTES_PAGE, count, _UNDOS[magic])),
    )


def _allocation(kind: str, addr: int, size: int) -> Allocation:
    return Allocation(kind=Kind(kind), addr=int(addr), size=int(size))


def _instances(addr: int, count: int, stride: int, trampoline: int) -> InstanceTable:
    return InstanceTable(
        addr=Addr(int(addr)),
        count=int(count),
        stride=int(stride),
        trampoline=Addr(int(trampoline)),
    )


def as_journal(notes: Notes, target: str, boot: Boot) -> Journal:
    """Return a new journal that says what a guest's notes do.

    Args:
        notes: whose patches are all noted.
        target: the guest.
        boot: of it.
    """
    journal = Journal.create(target, mark=notes.mark)
    journal.note_boot(boot)
    for allocation in notes.live:
        journal.allocations.begin(Call(frame=0, trap=0, allocates=allocation))
        journal.allocations.end(0)
    data = next(allocation for allocation in notes.live if allocation.kind is Kind.DATA)
    journal.note_mark(MarkPlace(allocation=Addr(data.addr), phys=notes.place))
    journal.allocations.keep_instances(notes.instances or ())
    journal.state = journal.noted = notes.state - 1
    journal.record(notes.patches or ())
    return journal


def _patches(
    memory: GuestMemory, addr: int, count: int, undo: struct.Struct
) -> Iterator[ArmedPatch]:
    if count > _MAX_UNDOS:
        raise ValueError(f"notes of {count} patches")
    now = remembering(memory)
    for where, size, old, new in undo.iter_unpack(now.read(addr, count * undo.size)):
        if not size:
            # Of a patch that is gone.
            continue
        try:
            phys = now.physical(where)
        except MemoryFault:
            # What went with its module, or after boot.
            continue
        is_flags = size == _FLAGS_SIZE and _differ_by_flag(old, new)
        yield ArmedPatch(
            phys=phys,
            addr=Addr(where),
            old=old[:size],
            new=new[:size],
            what=FLAGS if is_flags else "a probe",
        )


def _differ_by_flag(old: bytes, new: bytes) -> bool:
    return int.from_bytes(old, "little") ^ int.from_bytes(new, "little") == DISABLED
