"""A change of a guest's text in several pauses, none longer than is allowed, undone as a whole.

What cannot be apart is changed in one pause: all places of a function whose returns are probed,
sites so near to each other that a jump at one covers the other, and what must notice that a module
goes with all that is armed in modules.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kprobes.errors import GuestGoneError
from kprobes.guest.arm import StagedChange, TextPatcher
from kprobes.guest.guest import Code
from kprobes.guest.link import Program
from kprobes.model.plan import LONGEST_PATCH, Plan
from kprobes.plan.cost import SITE_PAUSE_S
from kprobes.transport.stub import Stub
from kprobes.units import KIB, Addr

_MOST_FASTER = 4
"""Times as many sites may be changed in a pause as in the one before, which told what one takes."""
_MANY = 1 << 20
_LOADED = 256 * KIB
"""Bytes of code that are written in one pause: some 20 ms."""
_LEAST = 8
"""Part of the first sites that are changed in a pause whatever it takes."""
_AIM = 0.7
"""Of the longest pause: what a pause shall last."""

StoppedFor = Callable[[StagedChange], AbstractContextManager[None]]


class _Group:
    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.gone: list[Plan] = []


class PacedChange:
    """Leads sites to new programs, or back to what they were, pause by pause.

    Attributes:
        left: programs that nothing leads to any more.
        put_back: how many places that are taken back somebody else has put back before.
    """

    def __init__(
        self,
        patcher: TextPatcher,
        stub: Stub,
        stopped_for: StoppedFor,
        is_joined: Callable[[Plan], bool],
        *,
        max_pause_s: float,
    ) -> None:
        """Change nothing yet.

        Args:
            patcher: of the text.
            stub: of the guest.
            stopped_for: has the guest stopped so that a change can be made.
            is_joined: whether a plan must be changed with all others of which this is so.
            max_pause_s: how long a pause may last; without end all is changed in one.
        """
        self.left: list[Program] = []
        self.put_back = 0
        self._patcher = patcher
        self._stopped_for = stopped_for
        self._is_joined = is_joined
        self._stub = stub
        self._max_pause_s = max_pause_s
        self._made: list[StagedChange] = []
        self._is_finishing = False

    @property
    def is_torn(self) -> bool:
        """Whether a part of a change that failed could not be undone."""
        return bool(self._made)

    def is_split(self, programs: Sequence[Program], gone: Sequence[Plan]) -> bool:
        """Whether a change is too large for one pause; see ``make``."""
        return len(programs) + len(gone) > self._fitting(2 * SITE_PAUSE_S)

    def make(
        self, programs: Sequence[Program], gone: Sequence[Plan], finish: Callable[[], None]
    ) -> None:
        """Make a change: all of it, or nothing.

        Args:
            programs: that are linked; their code is written first.
            gone: whose sites are to be as they were, or to lead to one of the programs.
            finish: is called in the last pause, when all is made.

        Raises:
            TargetError: a place no longer holds what it must, or a task stays there; or what
                ``finish`` raises, after which nothing is undone.
        """
        # This guest may take longer than those that were measured.
        at, first = 0, self._fitting(2 * SITE_PAUSE_S)
        size = first
        groups = self._groups(programs, gone) if self.is_split(programs, gone) else []
        codes = self._patcher.load_new(self._patcher.codes(programs))
        if groups or sum(len(code) for _, code in codes) > _LOADED:
            self._load(codes)
            codes = []
        try:
            while at < len(groups) or not self._made:
                part, at = _next(groups, at, size) if groups else ((programs, gone), 1)
                before = self._stub.paused_s
                self._step(*part, codes, finish if at >= len(groups) else None)
                size, done = _MOST_FASTER * size, len(part[0]) + len(part[1])
                size = min(size, self._fitting((self._stub.paused_s - before) / max(done, 1)))
                # What a pause takes whatever is changed in it must not make more and more of them.
                size = max(size, first // _LEAST)
        except BaseException as error:
            if not (self._is_finishing or isinstance(error, GuestGoneError)):
                self._undo()
            raise
        self._made = []

    def _step(
        self,
        programs: Sequence[Program],
        gone: Sequence[Plan],
        codes: Sequence[Code],
        finish: Callable[[], None] | None,
    ) -> None:
        change = self._patcher.stage(programs, gone)
        with self._stopped_for(change):
            self._patcher.load(codes)
            self._patcher.linker.forget_routines()
            self.put_back += self._patcher.apply(change)
            self._made.append(change)
            if finish is not None:
                self._is_finishing = True
                finish()
        self._patcher.commit(change)
        self.left += change.left

    def _load(self, codes: Sequence[Code]) -> None:
        # Nothing leads there yet: it need not be done in one pause.
        at = 0
        while at < len(codes):
            start, left = at, _LOADED
            while at < len(codes) and (at == start or left >= 0):
                left -= len(codes[at][1])
                at += 1
            with self._stub.paused():
                self._patcher.load(codes[start:at])
        self._patcher.linker.forget_routines()

    def _fitting(self, site_s: float) -> int:
        # How many sites a pause may change if one takes so long.
        return max(1, int(min(_AIM * self._max_pause_s / max(site_s, 1e-9), _MANY)))

    def _groups(self, programs: Sequence[Program], gone: Sequence[Plan]) -> list[_Group]:
        plans = [*(program.plan for program in programs), *gone]
        sets = _DisjointSets()
        last = joined = None
        for plan in sorted(plans, key=lambda plan: plan.site.addr):
            for each in plan.returning:
                sets.union(plan.site.addr, each.returns.entry)
            if last is not None and plan.site.addr - last.site.addr < LONGEST_PATCH:
                sets.union(plan.site.addr, last.site.addr)
            last = plan
            if self._is_joined(plan):
                joined = joined or plan
                sets.union(plan.site.addr, joined.site.addr)
        groups: dict[Addr, _Group] = {}
        for program in programs:
            groups.setdefault(sets.find(program.plan.site.addr), _Group()).programs.append(program)
        for plan in gone:
            groups.setdefault(sets.find(plan.site.addr), _Group()).gone.append(plan)
        return list(groups.values())

    def _undo(self) -> None:
        self._patcher.unstage()
        while self._made:
            change = self._made[-1]
            back = self._patcher.stage(change.left, [each.plan for each in change.programs])
            with self._stopped_for(back):
                self._patcher.apply(back)
            self._patcher.commit(back)
            self._made.pop()
        self.left = []


def _next(
    groups: Sequence[_Group], at: int, size: int
) -> tuple[tuple[list[Program], list[Plan]], int]:
    # Whole groups, of so many changes at most; one at least.
    programs: list[Program] = []
    gone: list[Plan] = []
    while at < len(groups) and (not (programs or gone) or len(programs) + len(gone) < size):
        programs += groups[at].programs
        gone += groups[at].gone
        at += 1
    return (programs, gone), at


class _DisjointSets:
    # Addresses that belong together have the same representative.
    def __init__(self) -> None:
        self._parents: dict[Addr, Addr] = {}

    def find(self, addr: Addr) -> Addr:
        while (parent := self._parents.get(addr, addr)) != addr:
            # Halve the way for whoever comes next.
            self._parents[addr] = self._parents.get(parent, parent)
            addr = parent
        return addr

    def union(self, addr: Addr, other: Addr) -> None:
        self._parents[self.find(addr)] = self.find(other)
