"""Cost of return probes: each of our methods, beside the guest kernel's own, on one function.

All of them in turn in each of several guests; see bench/rounds.py. The pair is a probe at
the entry and one at the return that tells how long the call took, beside the kernel's own kprobe
and kretprobe.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from bench.guest import Rig
from bench.isa import Isa
from bench.many import POLLED, polling
from bench.rounds import Turn, added, figure, in_rounds
from bench.spread import Spread
from bench.table import Goal, Row, compared, ns
from kprobes.model.definition import SyntheticFields
from kprobes.model.options import Options
from kprobes.model.plan import ReturnMethod

TITLE = "returns: nanoseconds that a return probe adds to a call"

_NO_WORSE = Goal(1 / 1.05, "no worse")
"""What two measurements of the same may differ by."""
_RETURNING = f"{POLLED} ret=$retval:x64"
_UNPROBED = "unprobed"


class Case(Struct, frozen=True, kw_only=True):
    """Probes of ours, and the kernel's own events that do the same.

    Attributes:
        return_method: by which returns are probed; the cheapest that is proven if None.
        is_timed: whether the return tells how long the call took.
    """

    name: str
    ours: tuple[str, ...]
    native: tuple[str, ...]
    goal: float
    return_method: ReturnMethod | None = None
    is_timed: bool = False


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot guests and measure everything in each."""
    cases, loops = _cases(isa), {"one": polling(isa), "both": polling(isa, cpus=2)}
    found = in_rounds(isa, loops, partial(_measured, isa=isa, cases=cases), quick=quick)
    rows = (_row(case, found) for case in cases)
    return [*rows, *(_scaling_row(case, found) for case in cases)]


def _cases(isa: Isa) -> Sequence[Case]:
    ours = (f"r:out {_RETURNING}",)
    return (
        Case(name="retinsn", ours=ours, native=("native_out",), goal=isa.goals.retinsn),
        Case(
            name="rethook",
            ours=ours,
            native=("native_out",),
            goal=isa.goals.rethook,
            return_method=ReturnMethod.RETHOOK,
        ),
        Case(
            name="entry, and return with duration",
            ours=(f"p:in {POLLED} a=$arg1", *ours),
            native=("native_in", "native_out"),
            goal=isa.goals.pair,
            is_timed=True,
        ),
    )


def _measured(rig: Rig, passes: int, isa: Isa, cases: Sequence[Case]) -> Mapping[str, float]:
    rig.define_native([f"p:native_in {POLLED} a=%{isa.first}", f"r:native_out {_RETURNING}"])
    turns = [turn for case in cases for turn in _turns(rig, case)]
    return added(rig, turns, passes=passes) | _slower(rig, cases)


def _turns(rig: Rig, case: Case) -> Iterator[Turn]:
    for whose, arm in (("native", _native), ("ours", _ours)):
        yield Turn(name=f"{case.name}, {whose}", program="one", arm=partial(arm, rig, case))


@contextmanager
def _native(rig: Rig, case: Case) -> Generator[None]:
    with ExitStack() as undo:
        for event in case.native:
            undo.enter_context(rig.native(event))
        yield


@contextmanager
def _ours(rig: Rig, case: Case) -> Generator[None]:
    rig.session.options = replace(rig.session.options, return_method=case.return_method)
    try:
        with rig.ours(
            "\n".join(case.ours), synthetic_fields=SyntheticFields(duration=case.is_timed)
        ):
            yield
    finally:
        rig.session.options = Options()


def _slower(rig: Rig, cases: Sequence[Case]) -> dict[str, float]:
    # How much longer a call takes when both vCPUs make it, with and without probes.
    found = {_UNPROBED: _slowdown(rig)}
    for case in cases:
        with _ours(rig, case):
            found[case.name] = _slowdown(rig)
    return found


def _slowdown(rig: Rig) -> float:
    return figure(rig, "both") / figure(rig, "one")


def _row(case: Case, costs: Mapping[str, Spread]) -> Row:
    ours, native = costs[f"{case.name}, ours"], costs[f"{case.name}, native"]
    return compared(f"{case.name}: kernel's own", ours, native, Goal(case.goal), show=ns)


def _scaling_row(case: Case, slower: Mapping[str, Spread]) -> Row:
    return compared(
        f"{case.name}: throughput of 2 vCPUs over 1; unprobed",
        slower[case.name],
        slower[_UNPROBED],
        _NO_WORSE,
        show=lambda slower: f"{2 / slower.value:.2f} [{2 / slower.high:.2f} {2 / slower.low:.2f}]",
    )
