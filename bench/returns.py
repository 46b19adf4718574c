"""What return probes cost: ours by each way, beside the guest kernel's own, on one function.

All in one guest, in turn, measured as bench/cost.py does. The pair is a probe at the entry and one
at the return that tells how long the call took, beside the kernel's own kprobe and kretprobe.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from bench.cost import Arm, Cost, added, figure, ratio_of
from bench.elf_program import Loop
from bench.guest import Rig, boot
from bench.isa import Isa
from bench.table import Row, times
from kprobes.model.exits import ReturnWay
from kprobes.model.extras import Extras

TITLE = "returns: nanoseconds that a return probe adds to a call"

_WITHIN = 1.05
"""What two measurements of the same may differ by."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Probes of ours, and the kernel's own events that do the same.

    Attributes:
        way: by which returns are probed; the cheapest that is proven if None.
        is_timed: whether the return tells how long the call took.
    """

    name: str
    ours: tuple[str, ...]
    native: tuple[str, ...]
    goal: float
    way: ReturnWay | None = None
    is_timed: bool = False


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot a guest and measure everything in it."""
    rounds, cases = 3 if quick else 9, _cases(isa)
    with boot(isa, _loops(isa)) as rig:
        entry = f"p:native_in {isa.getppid} a=%{isa.first}"
        rig.define_native([entry, f"r:native_out {_returning(isa)}"])
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, armed in _turns(rig, cases):
                found.setdefault(name, []).append(added(rig, "one", armed))
        costs = {name: Cost(values) for name, values in found.items()}
        return [*(_row(case, costs) for case in cases), *_scaling(rig, cases, rounds)]


def _loops(isa: Isa) -> dict[str, Loop]:
    programs = isa.programs
    one = Loop(isa=isa, step=programs.getppid, steps=programs.steps, repeats=programs.repeats)
    return {"one": one, "both": replace(one, cpus=2)}


def _cases(isa: Isa) -> Sequence[Case]:
    ours = (f"r:out {_returning(isa)}",)
    return (
        Case(name="retinsn", ours=ours, native=("native_out",), goal=isa.goals.retinsn),
        Case(
            name="rethook",
            ours=ours,
            native=("native_out",),
            goal=isa.goals.rethook,
            way=ReturnWay.RETHOOK,
        ),
        Case(
            name="entry, and return with duration",
            ours=(f"p:in {isa.getppid} a=$arg1", *ours),
            native=("native_in", "native_out"),
            goal=isa.goals.pair,
            is_timed=True,
        ),
    )


def _returning(isa: Isa) -> str:
    return f"{isa.getppid} ret=$retval:x64"


def _turns(rig: Rig, cases: Sequence[Case]) -> Iterator[tuple[str, Arm]]:
    for case in cases:
        yield f"{case.name}, native", partial(_native, rig, case)
        yield f"{case.name}, ours", partial(_ours, rig, case)


@contextmanager
def _native(rig: Rig, case: Case) -> Generator[None]:
    with ExitStack() as undo:
        for event in case.native:
            undo.enter_context(rig.native(event))
        yield


@contextmanager
def _ours(rig: Rig, case: Case) -> Generator[None]:
    driver = rig.session.driver
    driver.way = case.way
    try:
        with rig.ours("\n".join(case.ours), extras=Extras(duration=case.is_timed)):
            yield
    finally:
        driver.way = None


def _row(case: Case, costs: dict[str, Cost]) -> Row:
    ours, native = costs[f"{case.name}, ours"], costs[f"{case.name}, native"]
    ratio = ratio_of(native, ours)
    return Row(
        name=f"{case.name}: kernel's own",
        figure=str(ours),
        goal=f"{case.goal:g}x",
        peer=str(native),
        ratio=times(ratio),
        is_met=ratio >= case.goal,
    )


def _scaling(rig: Rig, cases: Sequence[Case], rounds: int) -> Iterator[Row]:
    # How much longer a call takes when both vCPUs make it, with and without probes, in turn.
    arms: dict[str, Arm] = {case.name: partial(_ours, rig, case) for case in cases}
    slower: dict[str, list[float]] = {name: [] for name in ("", *arms)}
    for _ in range(rounds):
        slower[""].append(_slowdown(rig))
        for name, armed in arms.items():
            with armed():
                slower[name].append(_slowdown(rig))
    plain = median(slower[""])
    for name in arms:
        probed = median(slower[name])
        yield Row(
            name=f"{name}: throughput of 2 vCPUs over 1; unprobed",
            figure=f"{2 / probed:.2f}",
            goal="no worse",
            peer=f"{2 / plain:.2f}",
            ratio=times(plain / probed),
            is_met=probed <= plain * _WITHIN,
        )


def _slowdown(rig: Rig) -> float:
    return figure(rig, "both") / figure(rig, "one")
