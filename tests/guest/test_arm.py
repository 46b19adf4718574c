"""Plans to armed text and back: all or nothing, journal first, whatever write fails."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64 import slot
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import (
    GuestGoneError,
    GuestReplacedError,
    KprobesError,
    MemoryFault,
    TargetError,
)
from kprobes.guest import ftrace_records, journal
from kprobes.guest.arena import HEAD_SIZE
from kprobes.guest.arm import StagedChange, TextPatcher
from kprobes.guest.guest import GuestMemory, InitText
from kprobes.guest.journal import Journal
from kprobes.guest.patches import restore_text
from kprobes.guest.release import CodeMemory
from kprobes.model.kernel import Kernel
from kprobes.model.plan import Plan
from kprobes.plan.ftrace import DISABLED
from kprobes.ports import Text
from kprobes.transport.ram import StubRam
from kprobes.transport.stub import Stub
from kprobes.units import Addr
from tests.build.guest import CODE, DATA, NOP, GuestWithSites, make_arena, make_guest
from tests.build.machine import ABI
from tests.build.pages import PAGE

TEXTS = ["p f a=$arg1", "p f a=$arg1", "p f a=%bx", "p f s=+0($arg1):string"]


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def _make() -> tuple[GuestWithSites, TextPatcher, Journal]:
    made = make_guest(TEXTS)
    written = Journal.create("fake")
    return made, TextPatcher(made.guest, make_arena(), ABI, written), written


def _staged(made: GuestWithSites, patcher: TextPatcher) -> StagedChange:
    programs, _ = patcher.linker.link(made.plans)
    patcher.load(patcher.codes(programs))
    return patcher.stage(programs)


def _arm(made: GuestWithSites, patcher: TextPatcher) -> None:
    patcher.apply(_staged(made, patcher))


def _flags(plan: Plan) -> int:
    assert plan.site.record is not None
    return plan.site.record + 8


def test_every_site_calls_the_code_that_was_made_for_it() -> None:
    made, patcher, _ = _make()
    programs, _ = patcher.linker.link(made.plans)

    patcher.load(patcher.codes(programs))
    patcher.apply(patcher.stage(programs))

    for addr, program in zip(made.sites, programs, strict=True):
        call = made.guest.memory.read(addr, slot.SIZE)
        assert slot.call_target(addr, call) == program.entry
        assert made.guest.memory.read(program.entry, len(program.code)) == program.code
    assert patcher.is_armed


def test_programs_lie_aligned_one_after_the_other() -> None:
    made, patcher, _ = _make()

    programs, _ = patcher.linker.link(made.plans)

    end = CODE + HEAD_SIZE
    for program in programs:
        assert end <= program.entry < end + 16
        assert program.entry % 16 == 0
        end = program.entry + len(program.code)


def test_the_guest_s_ftrace_is_told_to_leave_the_sites_alone() -> None:
    made, patcher, _ = _make()

    _arm(made, patcher)

    flags = [made.guest.memory.u64(_flags(plan)) for plan in made.plans]
    assert flags == [DISABLED] * len(TEXTS)


def test_flags_are_set_before_any_site_is_patched() -> None:
    made, patcher, _ = _make()
    change = _staged(made, patcher)
    made.stub.events.clear()

    patcher.apply(change)

    sizes = [len(data) for _, _, data in made.stub.events]
    assert sizes == [8] * len(TEXTS) + [slot.SIZE] * len(TEXTS)


def test_disarming_leaves_text_and_records_as_they_were() -> None:
    made, patcher, written = _make()
    before = made.text()
    _arm(made, patcher)
    assert made.text() != before

    assert patcher.disarm() == 0

    assert made.text() == before
    assert not patcher.is_armed
    assert written.is_clear
    assert journal.read(written.path).patches == ()


def test_every_patch_is_in_the_journal_on_disk_before_it_is_made() -> None:
    made, patcher, written = _make()
    change = _staged(made, patcher)
    seen: list[bool] = []

    def look(addr: int, data: bytes) -> None:
        patches = journal.read(written.path).patches
        seen.append(any((u.phys, u.new) == (addr, data) for u in patches))

    made.stub.before_write = look
    patcher.apply(change)

    assert seen == [True] * (2 * len(TEXTS))


@pytest.mark.parametrize("changed", range(len(TEXTS)))
def test_a_site_that_changed_since_planning_stops_everything(changed: int) -> None:
    made, patcher, written = _make()
    programs, _ = patcher.linker.link(made.plans)
    patcher.load(patcher.codes(programs))
    made.guest.memory.write(made.sites[changed], b"\xe8what")
    before = made.text()

    with pytest.raises(TargetError, match=r"holds e877686174, not .* nothing was patched"):
        patcher.apply(patcher.stage(programs))

    assert made.text() == before
    assert journal.read(written.path).patches == ()
    assert not patcher.is_armed


def test_a_record_whose_flags_changed_since_planning_stops_everything() -> None:
    made, patcher, _ = _make()
    programs, _ = patcher.linker.link(made.plans)
    patcher.load(patcher.codes(programs))
    made.guest.memory.set_u64(_flags(made.plans[0]), 1 << 31)
    before = made.text()

    with pytest.raises(TargetError, match=r"dyn_ftrace\.flags"):
        patcher.apply(patcher.stage(programs))

    assert made.text() == before


def _of_a_module() -> tuple[GuestWithSites, TextPatcher]:
    made = make_guest(TEXTS)
    guest = replace(made.guest, kernel=replace(made.guest.kernel, text=(Addr(0), Addr(1))))
    return made, TextPatcher(guest, make_arena(), ABI, Journal.create("fake"))


def _load(monkeypatch: pytest.MonkeyPatch, addr: Addr) -> None:
    def ranges(kernel: Kernel) -> list[Text]:
        del kernel
        return [(addr, Addr(addr + 1))]

    monkeypatch.setattr(ftrace_records, "module_ranges", ranges)


def test_a_record_that_went_with_its_module_is_not_written() -> None:
    made, patcher = _of_a_module()
    change = _staged(made, patcher)
    record = made.plans[1].site.record
    assert record is not None
    made.guest.memory.set_u64(record, 0x20_0000_4020_0BC3)
    before = made.text()

    with pytest.raises(TargetError, match="its module was unloaded, or boot is over; nothing"):
        patcher.apply(change)

    assert made.text() == before
    assert [made.guest.memory.u64(_flags(plan)) for plan in made.plans] == [0] * len(TEXTS)


@pytest.mark.parametrize("is_disarmed", [False, True])
def test_what_went_with_its_module_is_not_put_back(
    is_disarmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, patcher = _of_a_module()
    before = made.text()
    _arm(made, patcher)
    memory, gone, other = made.guest.memory, made.plans[0].site, made.plans[1].site
    assert gone.record is not None
    assert other.record is not None
    memory.write(gone.addr, b"other")
    for record in (gone.record, other.record):
        memory.set_u64(record, 0x20_0000_4020_0BC3)
    _load(monkeypatch, other.addr)

    if is_disarmed:
        patcher.disarm()
    else:
        patcher.apply(patcher.stage([], made.plans))

    assert memory.read(gone.addr, 5) == b"other"
    assert [memory.u64(_flags(plan)) for plan in made.plans[:2]] == [DISABLED] * 2
    assert not patcher.is_armed
    memory.write(gone.addr, gone.old)
    for site in (gone, other):
        assert site.record is not None
        memory.set_u64(site.record, site.addr)
        memory.set_u64(site.record + 8, 0)
    assert made.text() == before


def test_a_site_that_somebody_else_changed_in_a_module_that_is_loaded_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, patcher = _of_a_module()
    _arm(made, patcher)
    site = made.plans[0].site
    made.guest.memory.write(site.addr, b"other")
    _load(monkeypatch, site.addr)

    with pytest.raises(TargetError, match="neither ours nor the kernel's"):
        patcher.apply(patcher.stage([], made.plans))


STATE, INITIALISING, RUNNING = Addr(DATA + 0x100), 1, 3


def _of_boot() -> tuple[GuestWithSites, TextPatcher]:
    # All sites are in what only boot uses.
    made = make_guest(TEXTS)
    memory, start = made.guest.memory, made.sites[0]
    memory.write(STATE, bytes([INITIALISING]))
    init_text = InitText(
        start=start,
        stop=Addr(made.sites[-1] + 0x100),
        state=memory.physical(STATE),
        phys=memory.physical(start),
        head=memory.read(start, 0x40),
    )
    kernel = replace(made.guest.kernel, text=(Addr(0), Addr(1)))
    made.guest = replace(made.guest, kernel=kernel, init_text=init_text)
    return made, TextPatcher(made.guest, make_arena(), ABI, Journal.create("fake"))


def test_what_only_boot_uses_is_put_back_as_long_as_it_is_there() -> None:
    made, patcher = _of_boot()
    before = made.text()
    _arm(made, patcher)
    assert made.text() != before

    assert patcher.disarm() == 0

    assert made.text() == before


@pytest.mark.parametrize("is_disarmed", [False, True])
def test_what_boot_has_freed_is_not_written_whatever_is_there(is_disarmed: bool) -> None:
    made, patcher = _of_boot()
    _arm(made, patcher)
    memory = made.guest.memory
    memory.write(STATE, bytes([RUNNING]))
    for plan in made.plans:
        assert plan.site.record is not None
        memory.set_u64(plan.site.record, 0x20_0000_4020_0BC3)
    # Also where it holds what was patched.
    now = made.text()

    if is_disarmed:
        patcher.disarm()
    else:
        patcher.apply(patcher.stage([], made.plans))

    assert made.text() == now
    assert not patcher.is_armed


def test_what_boot_has_freed_meanwhile_is_not_patched() -> None:
    made, patcher = _of_boot()
    before, change = made.text(), _staged(made, patcher)
    made.guest.memory.write(STATE, bytes([RUNNING]))

    with pytest.raises(TargetError, match="boot is over; nothing was patched"):
        patcher.apply(change)

    assert made.text() == before


@pytest.mark.parametrize("n", range(2 * len(TEXTS)))
def test_a_write_that_fails_while_arming_leaves_nothing_patched(n: int) -> None:
    made, patcher, _ = _make()
    before, change = made.text(), _staged(made, patcher)
    made.stub.fails_at = made.stub.writes + n

    with pytest.raises(MemoryFault):
        patcher.apply(change)

    assert made.text() == before
    assert not patcher.is_armed


def test_what_could_not_be_taken_back_after_a_failure_is_not_forgotten() -> None:
    made, patcher, written = _make()
    before = made.text()
    stuck = made.guest.memory.physical(made.sites[2])

    def refuse(addr: int, data: bytes) -> None:
        if addr == stuck and data == NOP:
            raise MemoryFault(addr, len(data), "no RAM", verb="write")

    change = _staged(made, patcher)
    made.stub.before_write = refuse
    made.stub.fails_at = made.stub.writes + 2 * len(TEXTS) - 1
    with pytest.raises(MemoryFault):
        patcher.apply(change)

    assert not written.is_clear
    assert patcher.is_armed
    with pytest.raises(TargetError, match="could not be put back when arming failed"):
        patcher.check()
    made.stub.before_write = lambda _addr, _data: None
    assert patcher.disarm() == 0
    patcher.check()
    assert made.text() == before
    assert written.is_clear


def test_a_failure_that_was_taken_back_leaves_nothing_in_the_journal() -> None:
    made, patcher, written = _make()
    change = _staged(made, patcher)
    made.stub.fails_at = made.stub.writes + 3

    with pytest.raises(MemoryFault):
        patcher.apply(change)

    assert written.is_clear
    assert journal.read(written.path).patches == ()


def test_the_writes_of_arming_are_as_many_as_these_tests_think() -> None:
    made, patcher, _ = _make()
    change = _staged(made, patcher)
    before = made.stub.writes

    patcher.apply(change)

    assert made.stub.writes - before == 2 * len(TEXTS)


@pytest.mark.parametrize("n", range(2 * len(TEXTS) + 1))
def test_a_tracer_that_dies_while_arming_leaves_a_journal_that_puts_all_back(n: int) -> None:
    made, patcher, written = _make()
    before, change = made.text(), _staged(made, patcher)
    made.stub.dies_at = made.stub.writes + n

    # After the last write nothing more goes wrong.
    try:
        patcher.apply(change)
    except GuestGoneError:
        assert n < 2 * len(TEXTS)

    made.stub.dies_at = None
    assert restore_text(journal.read(written.path).patches, made.stub) == n
    assert made.text() == before


@pytest.mark.parametrize("n", range(2 * len(TEXTS)))
def test_a_write_that_fails_while_disarming_can_be_made_good_later(n: int) -> None:
    made, patcher, written = _make()
    before = made.text()
    _arm(made, patcher)
    made.stub.fails_at = made.stub.writes + n

    with pytest.raises(KprobesError):
        patcher.disarm()

    assert not written.is_clear
    assert patcher.disarm() == 0
    assert made.text() == before
    assert written.is_clear


def test_a_site_that_somebody_else_put_back_meanwhile_is_well_and_counted() -> None:
    made, patcher, written = _make()
    before = made.text()
    _arm(made, patcher)
    made.guest.memory.write(made.sites[2], NOP)

    assert patcher.disarm() == 1

    assert made.text() == before
    assert written.is_clear


def test_a_site_that_somebody_else_changed_meanwhile_is_named_and_the_rest_put_back() -> None:
    made, patcher, written = _make()
    before = made.text()
    _arm(made, patcher)
    made.guest.memory.write(made.sites[2], b"\xe8what")

    with pytest.raises(TargetError, match="neither ours nor the kernel's"):
        patcher.disarm()

    made.guest.memory.write(made.sites[2], NOP)
    assert made.text() == before
    assert not written.is_clear


def test_arming_again_after_disarming_works() -> None:
    made, patcher, _ = _make()
    before = made.text()
    for _ in range(2):
        _arm(made, patcher)
        patcher.disarm()

    assert made.text() == before


def test_code_that_does_not_fit_the_arena_is_refused_before_anything_is_written() -> None:
    made, _, written = _make()
    small = replace(make_arena(), code=CodeMemory(addr=Addr(CODE), size=256))
    patcher = TextPatcher(made.guest, small, ABI, written)

    with pytest.raises(TargetError, match="no room is left"):
        patcher.linker.link(made.plans)

    assert made.stub.writes == 0


def test_probes_of_one_shape_are_compiled_once() -> None:
    made, patcher, _ = _make()

    (first, second), _ = patcher.linker.link([made.plans[0], replace(made.plans[0])])

    assert first.code == second.code
    assert first.entry != second.entry


def test_no_programs_are_armed_without_a_word() -> None:
    made, patcher, _ = _make()

    before = made.text()

    patcher.load([])
    patcher.apply(patcher.stage([]))
    patcher.disarm()

    assert made.text() == before


def test_a_site_across_a_page_border_is_patched_and_put_back() -> None:
    made = make_guest(["p f"], at=0x1FFD)
    patcher = TextPatcher(made.guest, make_arena(), ABI, Journal.create("fake"))
    before = made.text()

    _arm(made, patcher)
    call = made.guest.memory.read(made.sites[0], slot.SIZE)
    patcher.disarm()

    assert slot.call_target(made.sites[0], call) == CODE + HEAD_SIZE
    assert made.text() == before


def _is_another() -> None:
    raise GuestReplacedError("the guest was rebooted")


@pytest.mark.parametrize("step", ["load_new", "load", "stage", "apply", "change", "disarm"])
def test_nothing_is_written_to_a_guest_that_is_another_one(step: str) -> None:
    made, patcher, written = _make()
    programs, _ = patcher.linker.link(made.plans)
    steps: dict[str, Callable[[], object]] = {
        "load_new": lambda: patcher.load_new(patcher.codes(programs)),
        "load": lambda: patcher.load(patcher.codes(programs)),
        "stage": lambda: staged.append(patcher.stage(programs)),
        "apply": lambda: patcher.apply(staged[-1]),
        "change": lambda: patcher.apply(patcher.stage((), made.plans)),
        "disarm": patcher.disarm,
    }
    staged: list[StagedChange] = []
    before = ["load_new", "load", "stage", "apply"]
    for each in before[: before.index(step) if step in before else None]:
        steps[each]()
    writes = made.stub.writes
    written.watch(_is_another)

    with pytest.raises(GuestReplacedError):
        steps[step]()

    assert made.stub.writes == writes


@pytest.mark.parametrize("number", range(2 * len(TEXTS)))
def test_what_a_loadvm_in_the_middle_of_arming_let_in_is_put_back(number: int) -> None:
    made, patcher, written = _make()
    programs, _ = patcher.linker.link(made.plans)
    patcher.load(patcher.codes(programs))
    change = patcher.stage(programs)
    before = made.text()
    made.stub.writes = 0

    def load(addr: int, data: bytes) -> None:
        del addr, data
        if made.stub.writes == number:
            for undo in change.made:
                made.stub.ram.write(undo.phys, undo.old)
            written.watch(_is_another)

    made.stub.before_write = load
    with pytest.raises(GuestReplacedError):
        patcher.apply(change)

    assert made.text() == before


@pytest.mark.parametrize("way", ["load_new", "load"])
def test_code_that_a_loadvm_let_into_somebody_elses_memory_is_taken_out_again(way: str) -> None:
    made, patcher, written = _make()
    programs, _ = patcher.linker.link(made.plans)
    size = 1024
    made.guest.memory.write(CODE, bytes(size))
    before, loaded = made.guest.memory.read(CODE, size), list[int]()

    def load(addr: int, data: bytes) -> None:
        del data
        made.stub.before_write = lambda _addr, _data: None
        loaded.append(addr)

    made.stub.before_write = load
    written.watch(lambda: _is_another() if loaded else None)
    with pytest.raises(GuestReplacedError):
        getattr(patcher, way)(patcher.codes(programs))

    assert made.guest.memory.read(CODE, size) == before


@pytest.mark.parametrize("held", [b"\0", X86_64.patch.filler])
def test_only_where_there_was_no_code_is_some_written_past_the_stub(
    monkeypatch: pytest.MonkeyPatch, held: bytes
) -> None:
    made, patcher, _ = _make()
    memory, start = made.guest.memory, CODE + PAGE - 0x20
    # Three pages; somebody has run something in the middle one, and the last is half and half.
    used, mixed = held * 8 + b"\x90" + held * (PAGE - 9), held * 8 + b"\x90\0\xcc"
    memory.write(start, held * 0x20 + used + mixed)
    codes = [(Addr(start), bytes(range(0x20))), (Addr(CODE + PAGE), b"\x55" * (PAGE + 16))]
    monkeypatch.setattr(made.stub, "write_physical_many", pytest.fail)

    rest = patcher.load_new(codes)

    assert [(addr, len(code)) for addr, code in rest] == [
        (CODE + PAGE, PAGE),
        (CODE + 2 * PAGE, 16),
    ]
    assert memory.read(start, 0x20 + PAGE) == bytes(range(0x20)) + used


def test_without_mapped_memory_all_code_is_written_while_the_guest_stands_still() -> None:
    made, _, written = _make()
    stub = cast("Stub", made.stub)
    guest = replace(made.guest, memory=GuestMemory(StubRam(stub, ()), made.guest.memory.tables))
    patcher, codes = TextPatcher(guest, make_arena(), ABI, written), [(Addr(CODE), b"\x90")]

    assert patcher.load_new(codes) == codes
    assert made.stub.writes == 0
