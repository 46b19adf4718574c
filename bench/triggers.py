"""Cost of stacks and triggers: the guest kernel's own, and ours, on hits of one function.

All of them in turn in each of several guests; see bench/rounds.py. After each run both must have
recorded every hit, or every stack. What the unwinder takes is what a stack adds to our event: the
walk itself, and some ten addresses that are kept. The kernel's walk is from inside its handler, and
so a few functions longer.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from msgspec import Struct

from bench.guest import TRACING, Rig
from bench.isa import Isa
from bench.many import POLLED, polling
from bench.rounds import Turn, added, in_rounds
from bench.table import Goal, Row, compared, ns

TITLE = "triggers: nanoseconds that a stack, or a trigger, adds to a hit"

_PROGRAM = "poll"
_GOAL = Goal(20)
_TRIGGER = f"{TRACING}/events/kprobes/native/trigger"
_STACK, _EVENT, _REST = "event with its stack", "event alone", "stack, but for the unwinder"


class Case(Struct, frozen=True, kw_only=True):
    """A trigger of an event that is recorded.

    Attributes:
        name: what is measured.
        trigger: the same of both; "" for none.
    """

    name: str
    trigger: str = ""


_CASES = (
    Case(name=_EVENT),
    Case(name=_STACK, trigger="stacktrace"),
    Case(name="event whose trigger never acts", trigger="traceoff if a == 1"),
    Case(name="event whose trigger is used up", trigger="traceoff:0"),
    Case(name="event that is counted, too", trigger="hist:keys=common_pid"),
)


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot guests and measure everything in each."""
    costs = in_rounds(isa, {_PROGRAM: polling(isa)}, _measured, quick=quick)
    names = [(case.name, None) for case in _CASES]
    return [
        compared(
            f"{name}: kernel's own", costs[f"{name}, ours"], costs[f"{name}, native"], goal, show=ns
        )
        for name, goal in (*names, (_REST, _GOAL))
    ]


def _measured(rig: Rig, passes: int) -> Mapping[str, float]:
    rig.define_native([f"p:native {POLLED} a=$arg1"])
    found = added(rig, [turn for case in _CASES for turn in _turns(rig, case)], passes=passes)
    walk = found[f"{_STACK}, ours"] - found[f"{_EVENT}, ours"]
    rest = {whose: found[f"{_STACK}, {whose}"] - walk for whose in ("ours", "native")}
    return {**found, **{f"{_REST}, {whose}": cost for whose, cost in rest.items()}}


def _turns(rig: Rig, case: Case) -> Iterator[Turn]:
    for whose, arm in (("ours", _ours), ("native", _native)):
        name = f"{case.name}, {whose}"
        yield Turn(name=name, program=_PROGRAM, arm=partial(arm, rig, case))


@contextmanager
def _native(rig: Rig, case: Case) -> Generator[None]:
    if case.trigger:
        rig.shell(f"echo '{case.trigger}' > {_TRIGGER}")
    rig.shell(f"echo 1 > {TRACING}/tracing_on; : > {TRACING}/trace")
    try:
        with rig.native("native"):
            yield
        entries = "cat per_cpu/cpu*/stats | grep -E 'entries|overrun' | cut -d: -f2"
        text = rig.shell(f"cd {TRACING}; cat tracing_on; {entries}").split()
        _check(rig, case, sum(map(int, text[1:])), is_on=text[0] == "1")
    finally:
        if case.trigger:
            rig.shell(f"echo '!{case.trigger}' >> {_TRIGGER}")


@contextmanager
def _ours(rig: Rig, case: Case) -> Generator[None]:
    triggers: Sequence[str] = [case.trigger] if case.trigger else []
    probe = rig.session.probe(f"p:ours {POLLED} a=$arg1", triggers=triggers)
    try:
        with rig.session.record() as trace:
            yield
        stacks = sum(map(bool, trace["ours"]["common_stacktrace"])) if case.name == _STACK else 0
        _check(rig, case, sum(trace.counts.recorded.values()) + stacks, is_on=not trace.counts.lost)
    finally:
        probe.delete()


def _check(rig: Rig, case: Case, entries: int, *, is_on: bool) -> None:
    wanted = rig.loops[_PROGRAM].total * (2 if case.name == _STACK else 1)
    if not is_on or entries < wanted:
        raise RuntimeError(f"{case.name}: {entries} of {wanted} entries")
