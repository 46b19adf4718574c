"""A session's notes in its guest: written, found, and turned into a journal again."""

import struct
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.errors import RESTORED, GuestReplacedError
from kprobes.guest import journal
from kprobes.guest.allocations import Allocation, Call, Kind
from kprobes.guest.arena import NOTES_PAGE
from kprobes.guest.armed import FLAGS, ArmedPatch
from kprobes.guest.journal import Boot, Journal
from kprobes.guest.notes import NotesWriter, as_journal, begin_notes, find_notes
from kprobes.model.plan import InstanceTable
from kprobes.plan.ftrace import DISABLED
from kprobes.units import Addr, Phys
from tests.build.guest import CODE, DATA, GuestWithSites, make_arena, make_guest

ARENA = replace(make_arena(), patches=8)
INSTANCES = InstanceTable(addr=Addr(0x10), count=4, stride=64, trampoline=Addr(0x20))
BOOT = Boot(addr=Addr(0x30), phys=Phys(0x40), value=b"\1" * 8)


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def made() -> GuestWithSites:
    return make_guest(["p f", "p f"])


def _allocated() -> Journal:
    written = Journal.create("fake")
    for allocation in (
        Allocation(kind=Kind.DATA, addr=DATA, size=1 << 22),
        Allocation(kind=Kind.PER_CPU, addr=0x100, size=32),
    ):
        written.allocations.begin(Call(frame=1, trap=2, allocates=allocation))
        written.allocations.end(0)
    return written


def _patches(made: GuestWithSites) -> list[ArmedPatch]:
    site = made.sites[0]
    (flags,) = (plan.site.record for plan in made.plans[:1])
    assert flags is not None
    patches = [
        (flags + 8, bytes(8), DISABLED.to_bytes(8, "little"), FLAGS),
        (site, b"\x0f\x1f\x44\0\0" + b"rest of a run", b"\xe9\1\2\3\4" + b"rest of a run", "a"),
        (site + 0x20, b"\x90", b"\xcc", "b"),
    ]
    where = made.guest.memory.physical
    return [
        ArmedPatch(phys=where(addr), addr=Addr(addr), old=old, new=new, what=what)
        for addr, old, new, what in patches
    ]


def test_what_was_noted_is_found_and_says_what_the_journal_said(made: GuestWithSites) -> None:
    written, patches = _allocated(), _patches(made)
    begin_notes(made.guest.memory, ARENA.notes, ARENA.data, written)
    written.allocations.keep_instances([INSTANCES])
    written.record(patches)
    NotesWriter(made.guest.memory, ARENA, written).write(patches)

    (notes,) = find_notes(made.guest)
    again = journal.read(as_journal(notes, "fake", BOOT).path)
    entry = journal.read(written.path)

    assert (again.mark, again.state, again.mark_place) == (
        *(entry.mark, entry.state),
        entry.mark_place,
    )
    assert (again.allocations.live, again.allocations.instances) == (
        entry.allocations.live,
        (INSTANCES,),
    )
    assert [(u.phys, u.addr, u.old, u.new, u.what == FLAGS) for u in again.patches] == [
        (u.phys, u.addr, u.old, u.new, u.what == FLAGS) for u in patches
    ]
    assert again.boot == BOOT


def test_notes_that_an_older_version_left_are_found(made: GuestWithSites) -> None:
    written, patches = _allocated(), _patches(made)
    begin_notes(made.guest.memory, ARENA.notes, ARENA.data, written)
    written.record(patches)
    NotesWriter(made.guest.memory, ARENA, written).write()
    undos = [struct.pack("<QQ8s8s", p.addr, len(p.old[:8]), p.old[:8], p.new[:8]) for p in patches]
    made.guest.memory.write(ARENA.notes, b"kprobes session\0")
    made.guest.memory.write(Addr(ARENA.notes + 56), struct.pack("<Q", len(patches)))
    made.guest.memory.write(Addr(ARENA.notes + NOTES_PAGE), b"".join(undos))

    (notes,) = find_notes(made.guest)

    found = [(u.addr, u.old, u.new, u.what == FLAGS) for u in notes.patches or ()]
    assert found == [(u.addr, u.old[:8], u.new[:8], u.what == FLAGS) for u in patches]


def test_a_patch_of_memory_that_is_not_mapped_any_more_is_gone(made: GuestWithSites) -> None:
    written, patches = _allocated(), _patches(made)
    begin_notes(made.guest.memory, ARENA.notes, ARENA.data, written)
    written.record(patches)
    gone = replace(patches[-1], addr=Addr(0xFFFF_FFFF_9999_0000))
    NotesWriter(made.guest.memory, ARENA, written).write([gone, *patches])

    (notes,) = find_notes(made.guest)

    assert [each.addr for each in notes.patches or ()] == [each.addr for each in patches]


def test_notes_of_memory_that_was_given_back_are_not_found(made: GuestWithSites) -> None:
    written = _allocated()
    begin_notes(made.guest.memory, ARENA.notes, ARENA.data, written)
    phys = made.guest.memory.physical(ARENA.notes)
    page = made.guest.memory.ram.read(phys, 4096)

    # The page has another address now.
    made.guest.memory.ram.write(phys, bytes(4096))
    made.guest.memory.ram.write(made.guest.memory.physical(ARENA.data), page)

    assert list(find_notes(made.guest)) == []


def test_nothing_is_noted_in_another_state_of_the_guest(made: GuestWithSites) -> None:
    written, patches = _allocated(), _patches(made)
    begin_notes(made.guest.memory, ARENA.notes, ARENA.data, written)
    notes = NotesWriter(made.guest.memory, ARENA, written)
    written.record(patches)
    before = bytes(NOTES_PAGE + 256)
    made.guest.memory.write(ARENA.notes, before)

    def is_another() -> None:
        raise GuestReplacedError(RESTORED)

    written.check = is_another
    for write in (partial(notes.write, patches), partial(notes.change, (), patches)):
        with pytest.raises(GuestReplacedError):
            write()

    assert made.guest.memory.read(ARENA.notes, len(before)) == before


def test_what_there_is_no_room_for_is_told(made: GuestWithSites) -> None:
    written, patches = _allocated(), _patches(made)
    written.allocations.keep_instances([INSTANCES] * 1000)

    NotesWriter(made.guest.memory, replace(ARENA, patches=2), written).write(patches)

    (notes,) = find_notes(made.guest)
    assert (notes.patches, notes.instances, len(notes.live)) == (None, None, 2)


def test_notes_of_more_memory_than_they_have_room_for_are_none(made: GuestWithSites) -> None:
    written = _allocated()
    for number in range(100):
        point = Allocation(kind=Kind.TRACEPOINT, addr=DATA + number, size=CODE)
        written.allocations.begin(Call(frame=1, trap=2, allocates=point))
        written.allocations.end(0)
    before = made.guest.memory.read(ARENA.notes + NOTES_PAGE, 16)

    NotesWriter(made.guest.memory, ARENA, written).write()

    assert [*find_notes(made.guest)] == []
    assert made.guest.memory.read(ARENA.notes + NOTES_PAGE, 16) == before


@pytest.mark.parametrize("at", [32, 40, 48, 56, 64, 70])
def test_notes_that_a_guest_forged_are_passed_over(made: GuestWithSites, at: int) -> None:
    written = _allocated()
    NotesWriter(made.guest.memory, ARENA, written).write()
    made.guest.memory.write(ARENA.notes + at, b"\xfe" * 8)

    found = list(find_notes(made.guest))

    # Any state may be true.
    assert len(found) == (1 if at == 32 else 0)
