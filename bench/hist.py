"""Cost of counting: the guest kernel's own hist triggers, and ours, on hits of one function.

All of them in turn in each of several guests; see bench/rounds.py. The kernel's own event has the
trigger and is not enabled, ours has it in its session's options: neither writes a record. After
each run both must have counted every hit.
"""

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from bench.guest import TRACING, Rig
from bench.isa import Isa
from bench.many import POLLED, WRITTEN, polling
from bench.rounds import Turn, added, in_rounds
from bench.spread import Spread
from bench.table import Goal, Row, compared, ns

TITLE = "hist: nanoseconds that counting a hit by a hist trigger adds to it"

_GOAL = Goal(40)
_PROGRAM = "poll"
_CALL, _RETURN = f"p:ours {POLLED} a=$arg1", f"r:ours {POLLED}"
_TEXT = f"{POLLED} s=@linux_proc_banner:string"
_TEXTUAL = f"p:ours {_TEXT}"
_TOTALS = re.compile(r"Hits: (\d+)\s+Entries: (\d+)\s+Dropped: (\d+)")


class Case(Struct, frozen=True, kw_only=True):
    """A hist trigger of ours, and the kernel's own that does the same.

    Attributes:
        name: what is counted.
        trigger: ours, without ``hist:``.
        native: the kernel's own; "" where it has none.
        where: the probe of ours.
        is_hit: whether the program hits it.
    """

    name: str
    trigger: str
    native: str = ""
    where: str = _CALL
    is_hit: bool = True

    @property
    def is_timed(self) -> bool:
        """Whether it is a return, with its call's duration."""
        return self.where == _RETURN

    @property
    def has_stack(self) -> bool:
        """Whether it counts by the stack."""
        return "stacktrace" in self.trigger

    @property
    def recorded(self) -> str:
        """The same event of ours, recorded."""
        if self.is_timed:
            return "our return with duration, recorded"
        form = " with its stack" if self.has_stack else " with a string"
        return f"our event{form if self.has_stack or self.where == _TEXTUAL else ''}, recorded"

    @property
    def directory(self) -> str:
        """Of the kernel's own event."""
        return f"{TRACING}/events/kprobes/{'textual' if self.where == _TEXTUAL else 'native'}"


_CONTROL = Case(
    name="control: counted where poll does not hit",
    trigger="keys=common_pid",
    where=f"p:ours {WRITTEN} a=$arg1",
    is_hit=False,
)


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot guests and measure everything in each."""
    cases, loops = _cases(), {_PROGRAM: polling(isa)}
    costs = in_rounds(isa, loops, partial(_measured, cases=cases), quick=quick)
    control = Row(name=_CONTROL.name, figure=ns(costs[f"{_CONTROL.name}, ours"]))
    return [control, *(row for case in cases for row in _rows(case, costs))]


def _cases() -> Sequence[Case]:
    pid, execname = "keys=common_pid", "keys=common_pid.execname"
    same = [
        ("common_cpu", "keys=common_cpu"),
        ("common_pid", pid),
        ("an argument's log2", "keys=a.log2"),
        ("two keys, common_pid and an argument", f"{pid},a"),
        ("common_pid, with a sum of an argument", f"{pid}:vals=a"),
    ]
    return (
        *(Case(name=name, trigger=trigger, native=trigger) for name, trigger in same),
        Case(name="comm, beside common_pid.execname", trigger="keys=comm", native=execname),
        Case(name="a return's duration.log2", trigger="keys=duration.log2", where=_RETURN),
        Case(
            name="a return's duration.p99, by common_pid",
            trigger=f"{pid}:vals=duration.p99",
            where=_RETURN,
        ),
        Case(name="a string of 39", trigger="keys=s", native="keys=s", where=_TEXTUAL),
        Case(name="common_stacktrace", trigger="keys=common_stacktrace", native="keys=stacktrace"),
    )


def _measured(rig: Rig, passes: int, cases: Sequence[Case]) -> Mapping[str, float]:
    rig.define_native([f"p:native {POLLED} a=$arg1", f"p:textual {_TEXT}"])
    turns = [turn for case in (_CONTROL, *cases) for turn in _turns(rig, case)]
    turns += [
        Turn(name=case.recorded, program=_PROGRAM, arm=partial(_recorded, rig, case))
        for case in {each.recorded: each for each in cases}.values()
    ]
    return added(rig, turns, passes=passes)


def _turns(rig: Rig, case: Case) -> Iterator[Turn]:
    turn = partial(Turn, program=_PROGRAM)
    yield turn(name=f"{case.name}, ours", arm=partial(_ours, rig, case))
    if case.native:
        yield turn(name=f"{case.name}, native", arm=partial(_native, rig, case))


@contextmanager
def _native(rig: Rig, case: Case) -> Generator[None]:
    trigger = f"hist:{case.native}"
    rig.shell(f"echo '{trigger}' > {case.directory}/trigger")
    try:
        yield
        text = rig.shell(f"cat {case.directory}/enable {case.directory}/hist")
        totals = _TOTALS.search(text)
        # An asterisk: it is armed for its triggers only.
        if totals is None or not text.startswith("0*"):
            raise RuntimeError(f"{trigger} has counted nothing, or its event is enabled: {text}")
        hits, _, dropped = map(int, totals.groups())
        _check(rig, case, hits, left_out=dropped)
    finally:
        # Appended, as opening the file to write it anew would take all triggers away.
        rig.shell(f"echo '!{trigger}' >> {case.directory}/trigger")


@contextmanager
def _ours(rig: Rig, case: Case) -> Generator[None]:
    session, before = rig.session, rig.session.options
    session.options = replace(before, trigger=f"hist:{case.trigger}")
    probe = session.probe(case.where, duration=case.is_timed, stacktrace=case.has_stack)
    try:
        with session.recording():
            yield
            found = session.driver.histogram()
        if found is None:
            raise RuntimeError(f"nothing counts {case.name}")
        counts = session.counts()
        left_out = found.dropped + sum(counts.missed.values()) + sum(counts.recorded.values())
        _check(rig, case, found.hits + found.unmeasured, left_out=left_out)
    finally:
        probe.delete()
        session.options = before


@contextmanager
def _recorded(rig: Rig, case: Case) -> Generator[None]:
    probe = rig.session.probe(case.where, duration=case.is_timed, stacktrace=case.has_stack)
    try:
        with rig.session.record() as trace:
            yield
        _check(rig, case, sum(trace.counts.recorded.values()), left_out=trace.counts.lost)
    finally:
        probe.delete()


def _check(rig: Rig, case: Case, hits: int, *, left_out: int) -> None:
    wanted = rig.loops[_PROGRAM].total if case.is_hit else 0
    if hits != wanted or left_out:
        raise RuntimeError(f"{case.name}: {hits} of {wanted} hits, {left_out} left out")


def _rows(case: Case, costs: Mapping[str, Spread]) -> Iterator[Row]:
    ours = costs[f"{case.name}, ours"]
    if case.native:
        native = costs[f"{case.name}, native"]
        yield compared(f"{case.name}: kernel's own", ours, native, _GOAL, show=ns)
    yield compared(f"{case.name}: {case.recorded}", ours, costs[case.recorded], None, show=ns)
