"""Changes of what is armed: all of one or nothing, journal first, and breakpoints always found."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64 import slot
from kprobes.codegen.breakpoint import BLOCK_MASK, BLOCK_TABLE, first_entry
from kprobes.errors import GuestGoneError, KprobesError, MemoryFault, StateError, TargetError
from kprobes.guest import arm, journal
from kprobes.guest.allocations import Allocation, Call, Kind
from kprobes.guest.arm import StagedChange, TextPatcher
from kprobes.guest.armed import ArmedPatch
from kprobes.guest.identity import check
from kprobes.guest.journal import Journal, MarkPlace
from kprobes.guest.notes import MAGIC, find_notes
from kprobes.guest.patches import restore_text
from kprobes.model.plan import Displaced, Plan, Site, Strategy
from kprobes.plan.ftrace import DISABLED
from kprobes.units import Addr, Phys
from tests.build.guest import DATA, NOP, GuestWithSites, make_arena, make_guest
from tests.build.kernel import TEXT, make_probe
from tests.build.machine import ABI

ARENA = replace(make_arena(), patches=32)
CODE = bytes.fromhex("4883c001 4883c002 4883c003 4883c004")
"""Four times ``add $n,%rax``, at FIRST, SECOND, ..."""
FIRST, SECOND, THIRD = (Addr(TEXT + 0x2000 + 4 * n) for n in range(3))
INT3 = b"\xcc"
ENTRY = 16


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def apply(patcher: TextPatcher, change: StagedChange) -> int:
    count = patcher.apply(change)
    patcher.commit(change)
    return count


def _plan(addr: Addr, strategy: Strategy, event_id: int) -> Plan:
    count = 2 if strategy is Strategy.JUMP else 1
    at = addr - FIRST
    code = CODE[at : at + 4 * count]
    displaced = Displaced(addr=addr, code=code, count=count, stop=Addr(addr + len(code)))
    site = Site(strategy=strategy, addr=addr, old=code, displaced=displaced)
    return Plan(site=site, probes=(make_probe("p f a=%bx", event_id=event_id, addr=addr),))


@dataclass(kw_only=True)
class Scene:
    """A guest with four ftrace sites, a jump and a breakpoint armed, and what comes next.

    Attributes:
        at_first: its text before anything was armed.
        armed: the text before the change.
        gone, new: plans of the change.
    """

    made: GuestWithSites
    patcher: TextPatcher
    written: Journal
    at_first: bytes
    armed: bytes
    gone: list[Plan]
    new: list[Plan]

    def stage(self) -> StagedChange:
        programs, _ = self.patcher.linker.link(self.new)
        self.patcher.load(self.patcher.codes(programs))
        return self.patcher.stage(programs, self.gone)

    def patches(self) -> set[ArmedPatch]:
        return set(journal.read(self.written.path).patches)

    def detour(self, addr: Addr) -> int | None:
        """Look a breakpoint up as the guest does."""
        memory, block = self.made.guest.memory, ARENA.block
        table, mask = memory.u64(block + BLOCK_TABLE), memory.u64(block + BLOCK_MASK)
        at = first_entry(addr, mask)
        while found := memory.u64(table + ENTRY * (at & mask)):
            if found == addr:
                return memory.u64(table + ENTRY * (at & mask) + 8)
            at += 1
        return None

    def breakpoints(self) -> dict[Addr, int | None]:
        """Return where breakpoints are, and where they lead."""
        memory = self.made.guest.memory
        return {a: self.detour(a) for a in (FIRST, SECOND, THIRD) if memory.read(a, 1) == INT3}


def _scene() -> Scene:
    """Of the sites one changes and one goes; the jump gives way to two breakpoints, one goes."""
    made, written = make_guest(["p f a=$arg1"] * 4), Journal.create("fake")
    allocation = Allocation(kind=Kind.DATA, addr=DATA, size=1 << 22)
    written.allocations.begin(Call(frame=1, trap=2, allocates=allocation))
    written.allocations.end(0)
    made.guest.memory.write(FIRST, CODE)
    at_first = made.text()
    patcher = TextPatcher(made.guest, ARENA, ABI, written)
    jump, breakpoint_ = _plan(FIRST, Strategy.JUMP, 5), _plan(THIRD, Strategy.BREAKPOINT, 6)
    programs, _ = patcher.linker.link([*made.plans, jump, breakpoint_])
    patcher.load(patcher.codes(programs))
    apply(patcher, patcher.stage(programs))
    changing, going, *_ = made.plans
    changed = replace(changing, probes=(*changing.probes, make_probe("p f", event_id=7)))
    between = [_plan(addr, Strategy.BREAKPOINT, n) for n, addr in ((5, FIRST), (8, SECOND))]
    return Scene(
        made=made,
        patcher=patcher,
        written=written,
        at_first=at_first,
        armed=made.text(),
        gone=[changing, going, jump, breakpoint_],
        new=[changed, *between],
    )


def _flags(made: GuestWithSites, number: int) -> int:
    record = made.plans[number].site.record
    assert record is not None
    return made.guest.memory.u64(record + 8)


WRITES = 14
"""Of text, records of ftrace and where breakpoints lead: those of notes, which come last, aside."""


def test_a_change_is_made_at_every_site_and_nowhere_else() -> None:
    scene = _scene()
    memory, sites = scene.made.guest.memory, scene.made.sites
    before = memory.read(sites[2], 0x40)

    change = scene.stage()
    apply(scene.patcher, change)

    changed, *between = change.programs
    assert slot.call_target(sites[0], memory.read(sites[0], slot.SIZE)) == changed.entry
    assert memory.read(sites[1], slot.SIZE) == NOP
    assert [_flags(scene.made, n) for n in range(4)] == [DISABLED, 0, DISABLED, DISABLED]
    assert memory.read(sites[2], 0x40) == before
    assert memory.read(FIRST, len(CODE)) == INT3 * 8 + CODE[8:]
    assert scene.breakpoints() == {p.plan.site.addr: p.entry for p in between}
    assert scene.detour(THIRD) is None
    assert {p.plan.site.addr for p in scene.patcher.programs} == {
        *(sites[0], sites[2], sites[3]),
        *(FIRST, SECOND),
    }


def test_after_a_change_the_journal_and_the_notes_have_what_is_armed_and_no_more() -> None:
    scene = _scene()

    change = scene.stage()
    apply(scene.patcher, change)

    found = scene.patches()
    assert found.issuperset(change.made)
    assert found.isdisjoint(change.restored)
    assert len(found) == 2 * 3 + 2
    (notes,) = find_notes(scene.made.guest)
    assert notes.patches is not None
    assert {(p.phys, p.new) for p in notes.patches} == {(p.phys, p.new[:8]) for p in found}
    assert scene.patcher.disarm() == 0
    assert scene.made.text() == scene.at_first


def test_every_patch_of_a_change_is_in_the_journal_on_disk_before_it_is_made() -> None:
    scene = _scene()
    change, seen = scene.stage(), list[bool]()
    made = {(patch.phys, patch.new) for patch in change.made}

    def look(addr: int, data: bytes) -> None:
        if (addr, data) in made:
            seen.append((addr, data) in {(p.phys, p.new) for p in scene.patches()})

    scene.made.stub.before_write = look
    apply(scene.patcher, change)

    assert seen == [True] * len(made)


def test_the_writes_of_the_change_are_as_many_as_these_tests_think() -> None:
    scene = _scene()
    change, before = scene.stage(), scene.made.stub.writes

    apply(scene.patcher, change)

    assert scene.made.stub.writes - before == WRITES + len(change.restored) + 1


@pytest.mark.parametrize("n", range(WRITES))
def test_a_write_that_fails_in_a_change_leaves_all_as_before(n: int) -> None:
    scene = _scene()
    change = scene.stage()
    patches = scene.patches() - set(change.made)
    breakpoints = scene.breakpoints()
    scene.made.stub.fails_at = scene.made.stub.writes + n

    with pytest.raises(MemoryFault):
        apply(scene.patcher, change)

    assert scene.made.text() == scene.armed
    assert scene.breakpoints() == breakpoints
    assert scene.patches() == patches
    assert len(scene.patcher.programs) == 6
    assert scene.patcher.disarm() == 0
    assert scene.made.text() == scene.at_first
    assert scene.written.is_clear


@pytest.mark.parametrize("n", range(WRITES))
def test_a_tracer_that_dies_in_a_change_leaves_a_guest_that_runs_and_can_be_put_right(
    n: int,
) -> None:
    scene = _scene()
    change = scene.stage()
    scene.made.stub.dies_at = scene.made.stub.writes + n

    with pytest.raises(GuestGoneError):
        apply(scene.patcher, change)

    # It runs until the guardian has put it right.
    assert None not in scene.breakpoints().values()
    scene.made.stub.dies_at = None
    restore_text(journal.read(scene.written.path).patches, scene.made.stub)
    assert scene.made.text() == scene.at_first


def test_what_is_new_may_be_where_something_goes() -> None:
    scene = _scene()
    apply(scene.patcher, scene.patcher.stage((), [_plan(FIRST, Strategy.JUMP, 5)]))
    scene.gone = [_plan(THIRD, Strategy.BREAKPOINT, 6)]
    scene.new = [_plan(SECOND, Strategy.JUMP, 9)]

    apply(scene.patcher, scene.stage())

    text = scene.made.guest.memory.read(FIRST, len(CODE))
    # What is displaced and not the jump is int3: the guest's kernel has no kprobe there.
    assert (text[:4], text[9:]) == (CODE[:4], INT3 * 3 + CODE[12:])
    assert text[4:9] != CODE[4:9]
    scene.patcher.disarm()
    assert scene.made.text() == scene.at_first


Harm = Callable[[Scene], None]


def _harm_new(scene: Scene) -> None:
    scene.made.guest.memory.write(SECOND, b"\x90")


def _harm_gone(scene: Scene) -> None:
    scene.made.guest.memory.write(scene.made.sites[1], b"\xe8what")


@pytest.mark.parametrize("harm", [_harm_new, _harm_gone])
def test_a_place_that_somebody_else_changed_stops_the_change(harm: Harm) -> None:
    scene = _scene()
    change = scene.stage()
    patches = scene.patches() - set(change.made)
    harm(scene)
    before = scene.made.text()

    with pytest.raises(TargetError, match="holds"):
        apply(scene.patcher, change)

    assert scene.made.text() == before
    assert scene.patches() == patches


def test_a_place_that_somebody_else_put_back_is_counted_when_it_goes() -> None:
    scene = _scene()
    change = scene.stage()
    scene.made.guest.memory.write(scene.made.sites[1], NOP)

    assert apply(scene.patcher, change) == 1


def test_when_the_last_one_goes_the_journal_has_nothing_to_undo() -> None:
    scene = _scene()
    plans = [each.plan for each in scene.patcher.programs]

    apply(scene.patcher, scene.patcher.stage((), plans))

    assert scene.made.text() == scene.at_first
    assert not scene.patcher.is_armed
    assert scene.written.is_clear
    assert scene.patches() == set()


def _again_and_again(scene: Scene, times: int) -> None:
    """Have a site lead elsewhere so often."""
    plan = scene.made.plans[0]
    for n in range(times):
        new = replace(plan, probes=(make_probe("p f", event_id=100 + n),))
        programs, _ = scene.patcher.linker.link([new])
        scene.patcher.load(scene.patcher.codes(programs))
        change = scene.patcher.stage(programs, [plan])
        apply(scene.patcher, change)
        linker = scene.patcher.linker
        linker.retire(change.left)
        linker.free_retired([False] * len(linker.pool.retired), ())
        plan = new
    scene.made.plans[0] = plan


def test_the_journal_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm, "_MOST_GONE", 4)
    scene = _scene()
    _again_and_again(scene, 20)
    before = len(scene.written.path.read_bytes().split(b"\n"))

    _again_and_again(scene, 40)

    assert len(scene.written.path.read_bytes().split(b"\n")) <= before + 3 * 2 * 12
    assert len(scene.patches()) == 2 * 4 + 2
    scene.patcher.disarm()
    assert scene.made.text() == scene.at_first


def test_notes_in_the_guest_take_the_room_of_what_is_gone() -> None:
    scene = _scene()

    _again_and_again(scene, ARENA.patches)

    (notes,) = find_notes(scene.made.guest)
    assert notes.patches is not None
    found = {(patch.phys, patch.new) for patch in notes.patches}
    assert found == {(patch.phys, patch.new[:8]) for patch in scene.patches()}
    assert notes.state == scene.written.state


def test_what_is_staged_and_not_made_is_forgotten() -> None:
    scene = _scene()
    patches = scene.patches()
    change = scene.stage()
    assert scene.patches() == patches | set(change.made)

    for _ in range(2):
        scene.patcher.unstage()

    assert scene.patches() == patches
    (notes,) = find_notes(scene.made.guest)
    assert notes.patches is not None
    assert len(notes.patches) == len(patches)


def test_what_cannot_be_staged_leaves_all_as_before() -> None:
    scene = _scene()

    def refuse() -> None:
        raise KprobesError("the guest was rebooted")

    scene.written.watch(refuse)
    with pytest.raises(KprobesError, match="rebooted"):
        scene.stage()

    assert scene.made.text() == scene.armed


def test_what_fails_when_the_text_has_changed_leaves_sites_that_can_be_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = _scene()
    change = scene.stage()

    def full(patches: object, sites: object) -> None:
        del patches, sites
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(scene.written, "restored", full)
        with pytest.raises(OSError, match="No space"):
            apply(scene.patcher, change)

    assert scene.patcher.leads_to(change.programs)
    assert not scene.patcher.leads_to(change.left)
    scene.patcher.disarm()
    assert scene.made.text() == scene.at_first
    assert scene.written.is_clear


def _watched(scene: Scene) -> None:
    # The mark is looked at, and the state after it, before anything is written.
    guest, written = scene.made.guest, scene.written
    at = guest.memory.physical(ARENA.notes) + len(MAGIC)
    place = MarkPlace(allocation=Addr(DATA), phys=Phys(at))
    written.note_mark(place)
    written.watch(lambda: check(written, guest.memory.ram.read))


_ENDS = {"full": OSError(errno.ENOSPC, "No space left on device"), "ctrl-c": KeyboardInterrupt()}


@pytest.mark.parametrize("end", _ENDS.values(), ids=list(_ENDS))
def test_a_journal_that_is_not_written_leaves_a_guest_that_can_be_changed_and_put_right(
    end: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = _scene()
    _watched(scene)
    patches, state = scene.patches(), scene.written.state
    monkeypatch.setattr(os, "fsync", partial(_raise, end))

    for _ in range(2):
        with pytest.raises((StateError, KeyboardInterrupt)):
            scene.stage()
        scene.patcher.unstage()
    monkeypatch.undo()

    assert scene.patches() == patches
    assert scene.made.text() == scene.armed
    apply(scene.patcher, scene.stage())
    assert scene.written.state > state
    scene.patcher.disarm()
    assert scene.made.text() == scene.at_first
    assert journal.read(scene.written.path).patches == ()


def _raise(error: BaseException, *given: object) -> None:
    del given
    raise error


@pytest.mark.parametrize("what", ["restored", "keep"])
def test_an_interrupt_before_the_guest_hears_of_a_state_is_made_good_by_the_next_change(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = _scene()
    _watched(scene)
    change = scene.stage()
    scene.patcher.apply(change)
    own = getattr(scene.written, what)
    if what == "keep":
        monkeypatch.setattr(arm, "_MOST_GONE", -100)

    def interrupted(*given: object) -> None:
        own(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(scene.written, what, interrupted)
    with pytest.raises(KeyboardInterrupt):
        scene.patcher.commit(change)
    monkeypatch.undo()

    scene.written.check()
    assert scene.written.state == scene.written.noted + 1
    scene.patcher.disarm()
    assert scene.made.text() == scene.at_first
    assert scene.written.state == scene.written.noted
