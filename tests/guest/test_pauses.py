"""Changes of text in several pauses: what belongs together, how long each takes, and undoing."""

import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kprobes.errors import GuestGoneError, TargetError
from kprobes.guest.arm import StagedChange, TextPatcher
from kprobes.guest.guest import Code
from kprobes.guest.link import Program
from kprobes.guest.pauses import PacedChange
from kprobes.model.plan import Plan, Returning, ReturnMethod, Returns, Role, Site, Strategy
from kprobes.plan.cost import SITE_PAUSE_S
from kprobes.transport.stub import Stub
from kprobes.units import KIB, Addr

SITE_S = 2 * SITE_PAUSE_S


class Patcher:
    """Says what it was asked. Every site takes it SITE_S.

    Attributes:
        done: by change, the addresses that came and those that went.
        paused_s: for how long it had the guest stopped.
        fixed_s: what every change takes besides.
        loaded: how much code was written at a time.
        new: the addresses of code that was written while the guest ran.
        failing: the change that fails, and how.
    """

    def __init__(self) -> None:
        self.done: list[tuple[list[int], list[int]]] = []
        self.paused_s = self.fixed_s = 0.0
        self.loaded: list[int] = []
        self.new: set[int] = set()
        self.forgotten = 0
        self.joined: set[int] = set()
        self.failing: dict[int, BaseException] = {}
        self.unstaged = 0
        self.committed: list[Any] = []
        self._armed: dict[int, Program] = {}

    def stage(self, programs: Sequence[Program], gone: Sequence[Plan] = ()) -> Any:
        class Change:
            pass

        change: Any = Change()
        change.programs = list(programs)
        change.left = [self._armed[plan.site.addr] for plan in gone]
        return change

    def unstage(self) -> None:
        self.unstaged += 1

    def codes(self, programs: Sequence[Program]) -> list[Code]:
        return [(each.entry, each.code) for each in programs]

    @property
    def linker(self) -> "Patcher":
        return self

    def forget_routines(self) -> None:
        self.forgotten += 1

    def load_new(self, codes: Sequence[Code]) -> list[Code]:
        return [code for code in codes if code[0] not in self.new]

    def load(self, codes: Sequence[Code]) -> None:
        self.loaded.append(len(codes))

    def apply(self, change: Any) -> int:
        new = [each.plan.site.addr for each in change.programs]
        gone = [each.plan.site.addr for each in change.left]
        if len(self.done) in self.failing:
            raise self.failing.pop(len(self.done))
        self.done.append((new, gone))
        self.paused_s += self.fixed_s + SITE_S * max(len(new), len(gone))
        for addr in gone:
            del self._armed[addr]
        self._armed |= {each.plan.site.addr: each for each in change.programs}
        return 1

    def commit(self, change: Any) -> None:
        self.committed.append(change)

    def is_joined(self, plan: Plan) -> bool:
        return plan.site.addr in self.joined

    @contextmanager
    def paused(self) -> Generator[None]:
        yield

    @contextmanager
    def stopped(self, change: StagedChange) -> Generator[None]:
        del change
        yield

    def paced(self, max_pause_s: float) -> PacedChange:
        stub = cast(Stub, self)
        patcher = cast(TextPatcher, self)
        return PacedChange(patcher, stub, self.stopped, self.is_joined, max_pause_s=max_pause_s)

    @property
    def armed(self) -> list[int]:
        return sorted(self._armed)


def returns(entry: int) -> Returns:
    return Returns(entry=Addr(entry), return_method=ReturnMethod.RETINSN, probes=())


def plan(addr: int, *functions: int) -> Plan:
    """Return a plan of a site, where return probes of some functions do something."""
    returning = tuple(Returning(role=Role.RETURN, returns=returns(each)) for each in functions)
    site = Site(strategy=Strategy.BREAKPOINT, addr=Addr(addr), old=b"\x90")
    return Plan(site=site, probes=(), returning=returning)


def programs(*plans: Plan) -> list[Program]:
    return [Program(plan=each, entry=Addr(0), code=b"") for each in plans]


def apart(count: int, start: int = 0) -> list[Plan]:
    return [plan(0x100 * n) for n in range(start, start + count)]


def nothing() -> None:
    pass


def test_without_a_limit_all_is_changed_in_one_pause() -> None:
    patcher = Patcher()
    change = patcher.paced(math.inf)

    change.make(programs(*apart(1000)), (), nothing)

    assert [len(new) for new, _ in patcher.done] == [1000]
    assert (change.put_back, change.left) == (1, [])


def test_nothing_is_changed_in_one_pause_too() -> None:
    patcher, finished = Patcher(), list[int]()

    patcher.paced(0.01).make((), (), lambda: finished.append(1))

    assert (patcher.done, finished) == ([([], [])], [1])


def test_a_pause_is_as_long_as_allowed_by_what_the_one_before_took() -> None:
    patcher, finished = Patcher(), list[int]()

    patcher.paced(0.005).make(programs(*apart(400)), (), lambda: finished.append(len(patcher.done)))

    sizes = [len(new) for new, _ in patcher.done]
    assert sum(sizes) == 400
    assert sizes[0] > 20
    assert max(sizes) * SITE_S <= 0.005
    # When all is made, once.
    assert finished == [len(sizes)]
    assert len(patcher.committed) == len(sizes)


def test_what_a_pause_takes_whatever_is_changed_makes_no_more_of_them() -> None:
    patcher = Patcher()
    patcher.fixed_s = 1.0

    patcher.paced(0.005).make(programs(*apart(400)), (), nothing)

    assert len(patcher.done) < 80


def test_what_takes_too_long_in_a_single_pause_is_made_alone() -> None:
    patcher = Patcher()

    patcher.paced(SITE_S).make(programs(*apart(40)), (), nothing)

    # The first by what is predicted, the others by what it took.
    first, *others = [len(new) for new, _ in patcher.done]
    assert (first + len(others), set(others)) == (40, {1})


@pytest.mark.parametrize(("max_pause_s", "changes"), [(SITE_S, 40), (math.inf, 1)])
def test_code_is_written_before_in_pauses_of_its_own_and_all_of_it(
    max_pause_s: float, changes: int
) -> None:
    patcher = Patcher()
    large = [replace(each, code=bytes(100 * KIB)) for each in programs(*apart(40))]

    patcher.paced(max_pause_s).make(large, (), nothing)

    assert len(patcher.done) == changes
    written = [n for n in patcher.loaded if n]
    assert sum(written) == 40
    assert max(written) == 3
    assert patcher.loaded[: len(written)] == written


def test_the_code_of_a_small_change_is_written_in_its_pause() -> None:
    patcher = Patcher()

    patcher.paced(1.0).make(programs(*apart(40)), (), nothing)

    assert (patcher.loaded, len(patcher.done)) == ([40], 1)


def test_places_of_one_function_and_sites_side_by_side_are_changed_at_once() -> None:
    patcher = Patcher()
    together = [plan(0x10000, 0x9000), plan(0x9000, 0x9000), plan(0x20000, 0x9000, 0x30000)]
    together += [plan(0x30000, 0x30000), plan(0x3001F)]
    new = [*apart(32, 0x1000), together[0], *apart(32, 0x2000), *together[1:]]

    patcher.paced(SITE_S / 10).make(programs(*new), (), nothing)

    wanted = {each.site.addr for each in together}
    (found,) = [set(new) for new, _ in patcher.done if wanted & set(new)]
    assert found == wanted


def test_what_is_of_modules_is_changed_in_one_pause_wherever_it_is() -> None:
    patcher = Patcher()
    patcher.joined = {0x100 * n for n in (0, 20, 39)}

    patcher.paced(SITE_S / 10).make(programs(*apart(40)), (), nothing)

    (found,) = [set(new) for new, _ in patcher.done if patcher.joined & set(new)]
    assert found == patcher.joined


def test_a_site_that_leads_elsewhere_is_changed_in_one_pause() -> None:
    patcher, plans = Patcher(), apart(60)
    patcher.paced(math.inf).make(programs(*plans), (), nothing)
    del patcher.done[:]

    change = patcher.paced(SITE_S / 10)
    change.make(programs(*plans[:50]), plans, nothing)

    assert len(patcher.done) > 20
    assert all(set(new) <= set(gone) for new, gone in patcher.done)
    assert len(change.left) == 60
    assert patcher.armed == [each.site.addr for each in plans[:50]]


def test_what_fails_in_a_later_pause_is_undone_as_a_whole() -> None:
    patcher, plans = Patcher(), apart(60)
    patcher.paced(math.inf).make(programs(*plans), (), nothing)
    patcher.failing[4] = TargetError("the guest changed it")
    change = patcher.paced(SITE_S / 10)

    with pytest.raises(TargetError, match="the guest changed it"):
        change.make(programs(*apart(60, 0x1000)), plans, nothing)

    # The fourth try failed; what came before it is back, in the other order.
    assert patcher.armed == [each.site.addr for each in plans]
    before, after = patcher.done[1:4], patcher.done[4:]
    assert after == [(gone, new) for new, gone in reversed(before)]
    assert (change.left, patcher.unstaged, change.is_torn) == ([], 1, False)
    assert len(patcher.committed) == len(patcher.done)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_whatever_fails_is_undone(error: BaseException) -> None:
    patcher = Patcher()
    patcher.failing[3] = error
    change = patcher.paced(SITE_S / 10)

    with pytest.raises(type(error)):
        change.make(programs(*apart(60)), (), nothing)

    assert (patcher.armed, change.is_torn) == ([], False)


def test_code_that_was_written_while_the_guest_ran_is_written_in_no_pause() -> None:
    patcher = Patcher()
    made = [replace(each, entry=Addr(n)) for n, each in enumerate(programs(*apart(3)))]
    patcher.new = {0, 2}

    patcher.paced(math.inf).make(made, (), nothing)

    assert patcher.loaded == [1]
    assert len(patcher.armed) == 3


def test_code_that_was_not_written_is_written_the_next_time() -> None:
    patcher = Patcher()

    def refuse(_: StagedChange) -> AbstractContextManager[None]:
        raise TargetError("a task stays inside")

    change = PacedChange(
        cast(TextPatcher, patcher), cast(Stub, patcher), refuse, patcher.is_joined, max_pause_s=1.0
    )
    with pytest.raises(TargetError, match="stays inside"):
        change.make(programs(*apart(3)), (), nothing)

    assert patcher.forgotten == 0
    patcher.paced(1.0).make(programs(*apart(3)), (), nothing)
    assert patcher.forgotten == 1


def test_what_could_not_be_undone_is_known() -> None:
    patcher, plans = Patcher(), apart(60)
    patcher.paced(math.inf).make(programs(*plans), (), nothing)
    patcher.failing = {4: TargetError("the guest changed it"), 5: TargetError("once more")}
    change = patcher.paced(SITE_S / 10)

    with pytest.raises(TargetError, match="once more"):
        change.make((), plans, nothing)

    assert change.is_torn


def test_after_a_last_step_that_fails_nothing_is_undone() -> None:
    def fail() -> None:
        raise TargetError("no")

    patcher = Patcher()
    change = patcher.paced(math.inf)

    with pytest.raises(TargetError, match="no"):
        change.make(programs(*apart(3)), (), fail)

    assert (change.is_torn, len(patcher.armed)) == (True, 3)


def test_in_a_guest_that_is_gone_nothing_is_undone() -> None:
    patcher = Patcher()
    patcher.failing[1] = GuestGoneError("gone")

    with pytest.raises(GuestGoneError):
        patcher.paced(SITE_S / 10).make(programs(*apart(60)), (), nothing)

    assert len(patcher.done) == 1
