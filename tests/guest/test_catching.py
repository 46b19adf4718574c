"""Breakpoints and jumps armed: the table that leads them, the journal, and all back again."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.codegen.breakpoint import BLOCK_MASK, BLOCK_TABLE, compile_notifier, hash_table
from kprobes.errors import TargetError
from kprobes.guest import journal, notifier
from kprobes.guest.allocations import Allocation, AllocationLog, Call, Kind
from kprobes.guest.arm import TextPatcher
from kprobes.guest.journal import Journal
from kprobes.guest.link import Program
from kprobes.guest.notifier import BreakpointNotifier
from kprobes.model.plan import Plan, Strategy
from tests.build.breakpoints import patched_plans
from tests.build.guest import GuestWithSites, make_arena, make_guest
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.machine import ABI

TEXTS = ["p f a=%ax", "p f", "p f s=+0(%sp):string"]
ARENA = make_arena()
INT3 = b"\xcc"


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


class Scene:
    """A stopped guest with breakpoints to be armed, one ftrace site beside them."""

    def __init__(self, strategy: Strategy = Strategy.BREAKPOINT) -> None:
        self.made: GuestWithSites = make_guest(["p f"])
        self.plans: list[Plan] = [*self.made.plans, *patched_plans(self.made, strategy, TEXTS)]
        self.journal = Journal.create("fake")
        self.patcher = TextPatcher(self.made.guest, ARENA, ABI, self.journal)
        self.before = self.made.text()

    def load(self) -> list[Program]:
        programs, _ = self.patcher.linker.link(self.plans)
        self.patcher.load(self.patcher.codes(programs))
        return programs

    def arm(self) -> list[Program]:
        programs = self.load()
        change = self.patcher.stage(programs)
        self.patcher.apply(change)
        self.patcher.commit(change)
        return programs


def test_a_breakpoint_is_one_byte_and_its_detour_in_the_table() -> None:
    scene = Scene()

    programs = scene.arm()

    memory = scene.made.guest.memory
    detours = {p.plan.site.addr: p.entry for p in programs[1:]}
    assert [memory.read(addr, 1) for addr in detours] == [INT3] * len(TEXTS)
    table, mask = (memory.u64(ARENA.block + at) for at in (BLOCK_TABLE, BLOCK_MASK))
    expected = hash_table(detours)
    assert memory.read(table, len(expected)) == expected
    assert 16 * (mask + 1) == len(expected)
    assert programs[-1].entry + len(programs[-1].code) <= table
    assert table + len(expected) <= ARENA.code.stop


def test_nothing_but_the_first_byte_of_an_instruction_changes() -> None:
    scene = Scene()

    scene.arm()

    after = scene.made.text()
    changed = [n for n, byte in enumerate(scene.before) if byte != after[n]]
    places = [plan.site.addr - TEXT for plan in scene.plans[1:]]
    assert [n for n in changed if places[0] <= n < places[-1] + 0x20] == places


def test_a_jump_needs_no_table() -> None:
    scene = Scene(Strategy.JUMP)

    programs = scene.arm()

    memory = scene.made.guest.memory
    assert memory.u64(ARENA.block + BLOCK_TABLE) == 0
    for program in programs[1:]:
        addr = program.plan.site.addr
        jump = memory.read(addr, 5)
        assert jump == scene.made.guest.arch.patch.jump(addr, program.entry)


@pytest.mark.parametrize("strategy", [Strategy.JUMP, Strategy.BREAKPOINT])
def test_each_patch_is_on_disk_before_it_is_made_and_taken_back_afterwards(
    strategy: Strategy,
) -> None:
    scene = Scene(strategy)
    programs = scene.load()
    seen: list[bool] = []

    def look(addr: int, data: bytes) -> None:
        patches = journal.read(scene.journal.path).patches
        seen.append(any((u.phys, u.new) == (addr, data) for u in patches))

    change = scene.patcher.stage(programs)
    scene.made.stub.before_write = look
    scene.patcher.apply(change)

    # The record of the ftrace site is one more; breakpoints' table, and its place, are none.
    table = [False] * 3 if strategy is Strategy.BREAKPOINT else []
    assert seen == table + [True] * (len(scene.plans) + 1)
    scene.made.stub.before_write = lambda _addr, _data: None
    scene.patcher.disarm()
    assert scene.made.text() == scene.before
    assert scene.journal.is_clear


@pytest.mark.parametrize("strategy", [Strategy.JUMP, Strategy.BREAKPOINT])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_instruction_that_changed_since_planning_stops_everything(
    strategy: Strategy, number: int
) -> None:
    scene = Scene(strategy)
    programs = scene.load()
    scene.made.guest.memory.write(scene.plans[number].site.addr, b"\x0f")
    before = scene.made.text()

    with pytest.raises(TargetError, match="nothing was patched"):
        scene.patcher.apply(scene.patcher.stage(programs))

    assert scene.made.text() == before
    assert not scene.patcher.is_armed


def test_a_breakpoint_that_somebody_put_over_our_jump_is_named_and_the_rest_put_back() -> None:
    scene = Scene(Strategy.JUMP)
    scene.arm()
    theirs = scene.plans[2].site.addr
    # As the guest's own kprobe does: it takes our jump for the kernel's instruction.
    memory = scene.made.guest.memory
    ours = memory.read(theirs, 1)
    memory.write(theirs, INT3)

    with pytest.raises(TargetError, match="neither ours nor the kernel's"):
        scene.patcher.disarm()

    assert not scene.journal.is_clear
    memory.write(theirs, ours)
    scene.patcher.disarm()
    assert scene.made.text() == scene.before


def test_every_arming_has_a_table_of_its_own() -> None:
    scene = Scene()
    scene.arm()
    scene.patcher.disarm()
    scene.plans = scene.plans[:2]
    scene.patcher = TextPatcher(scene.made.guest, ARENA, ABI, scene.journal)

    programs = scene.arm()

    memory = scene.made.guest.memory
    expected = hash_table({programs[1].plan.site.addr: programs[1].entry})
    assert memory.read(memory.u64(ARENA.block + BLOCK_TABLE), len(expected)) == expected


def test_a_guest_that_calls_us_already_is_not_asked_again() -> None:
    made = make_guest(["p f"])
    allocations = AllocationLog()
    assert not BreakpointNotifier(made.guest, ARENA, allocations).is_registered
    allocations.begin(
        Call(frame=1, trap=2, allocates=Allocation(kind=Kind.NOTIFIER, addr=1, size=0))
    )
    # Also when nobody knows yet how the call ends: it is taken back in either case.
    assert BreakpointNotifier(made.guest, ARENA, allocations).is_registered
    allocations.end(0)

    assert BreakpointNotifier(made.guest, ARENA, allocations).is_registered


class _Injector:
    """One whose tasks make calls of functions that return 0."""

    def __init__(self, *_: object) -> None:
        """Need no guest."""

    def task(self) -> AbstractContextManager["_Injector"]:
        return nullcontext(self)

    def call(self, function: int, *args: int, allocates: Allocation) -> int:
        del function, args, allocates
        return 0


@pytest.mark.parametrize("name", ["notifier_call_chain", "atomic_notifier_call_chain"])
def test_what_the_guest_looks_for_before_it_calls_is_right_before_our_callback(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_guest(["p f"])
    # mov $-hash, %r10d; add -4(%r11), %r10d; call *%r11; ret
    made.guest.memory.write(TEXT, bytes.fromhex("41badfbc9a78 450353fc 41ffd3 c3"))
    kernel = make_kernel(
        [symbol(name, TEXT, size=14), symbol("register_die_notifier", TEXT + 0x40)]
    )
    monkeypatch.setattr(notifier, "CallInjector", _Injector)

    BreakpointNotifier(replace(made.guest, kernel=kernel), ARENA, AllocationLog()).register()

    memory = made.guest.memory
    assert memory.u64(ARENA.block) == ARENA.notifier
    assert memory.read(ARENA.notifier - 4, 4) == (-0x789A_BCDF & 0xFFFF_FFFF).to_bytes(4, "little")
    code = compile_notifier(X86_64)
    assert memory.read(ARENA.notifier, len(code)) == code


def test_without_a_breakpoint_the_guest_is_not_asked_to_call_us() -> None:
    scene = Scene(Strategy.JUMP)

    writes = scene.made.stub.writes
    scene.patcher.register_notifier(scene.plans)

    assert scene.journal.allocations.is_empty
    assert scene.made.stub.writes == writes
