"""What a hit costs: the guest kernel's own probes, ours, code written by hand, and gdb's way.

All in one guest, in turn. A program's figure is the tenth percentile of many short loops, which
other work on this machine hardly touches; what a probe adds is that less the same program's
figure right before and after, and what is printed is the median over rounds, each of which arms
anew, with the quartiles.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import median, quantiles

from bench import in_user_space
from bench.elf_program import GETPPID, OPENAT, Loop
from bench.guest import HandWritten, Rig, boot
from bench.handwritten import registers_record
from bench.table import Row, times
from kprobes.codegen.compile import compile_probes
from kprobes.lang.parser import parse_source
from kprobes.model.abi import GuestAbi, Template

TITLE = "cost: nanoseconds that a probe adds to a hit"

# Loops of half a millisecond: most run between two turns of whatever else this machine does.
_STEPS, _REPEATS = 1000, 40
_GDB_HITS = 300
_LEAST_NS = 0.5
_LOOPS = {
    "getppid": Loop(step=GETPPID, steps=_STEPS, repeats=_REPEATS),
    "openat": Loop(step=OPENAT, steps=_STEPS, repeats=_REPEATS),
    "both": Loop(step=GETPPID, steps=_STEPS, repeats=_REPEATS, cpus=2),
    "few": Loop(step=GETPPID, steps=_GDB_HITS),
}
_SITE = "__x64_sys_getppid"
_ONE, _THREE = f"{_SITE} a=$arg1", f"{_SITE} a=$arg1 b=$arg2 c=$arg3"
_STRING = "do_sys_openat2 path=+0($arg2):ustring"


def _one_by_hand(abi: GuestAbi) -> Template:
    return registers_record(abi, 1)


def _three_by_hand(abi: GuestAbi) -> Template:
    return registers_record(abi, 3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One probe, measured with one program."""

    name: str
    program: str
    where: str
    filter: str = ""
    goal: float | None = None
    by_hand: HandWritten | None = None


# Filters that no hit of these programs passes.
_REJECTED = (
    Case(
        name="rejected by a register",
        program="getppid",
        where=_ONE,
        filter="a == 0x123456",
        goal=100,
    ),
    Case(name="rejected by pid", program="getppid", where=_ONE, filter="common_pid == 1", goal=100),
    Case(
        name="rejected by a user string",
        program="openat",
        where=_STRING,
        filter='path == "/etc/passwd"',
    ),
)
_CASES = (
    Case(name="one register", program="getppid", where=_ONE, goal=20, by_hand=_one_by_hand),
    Case(name="three registers", program="getppid", where=_THREE, goal=20, by_hand=_three_by_hand),
    Case(name="one 20-byte user string", program="openat", where=_STRING, goal=10),
    Case(name="one register, 2 vCPUs at once", program="both", where=_ONE, by_hand=_one_by_hand),
    *_REJECTED,
)


@dataclass(frozen=True)
class Cost:
    """Nanoseconds per hit, one figure per round."""

    rounds: Sequence[float]

    @property
    def ns(self) -> float:
        """The median."""
        return median(self.rounds)

    def __str__(self) -> str:
        low, _, high = quantiles(self.rounds, n=4, method="inclusive")
        return f"{self.ns:,.1f} ns [{low:,.0f} {high:,.0f}]"


def run(*, quick: bool = False) -> list[Row]:
    """Boot a guest and measure everything in it."""
    with boot(_LOOPS) as rig:
        _define(rig)
        costs = _in_rounds(rig, 3 if quick else 9)
        return [
            _control(costs["control"]),
            *(row for case in _CASES for row in _rows(case, costs)),
            *_alone(rig, 3 if quick else 9),
            _gdb(rig, costs[f"{_CASES[0].name}, ours"]),
        ]


def _define(rig: Rig) -> None:
    rig.define_native([f"p:native{n} {case.where}" for n, case in enumerate(_CASES)])
    for n, case in enumerate(_CASES):
        rig.filter_native(f"native{n}", case.filter or "0")


def _in_rounds(rig: Rig, rounds: int) -> dict[str, Cost]:
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, program, armed in _turns(rig):
            found.setdefault(name, []).append(added(rig, program, armed))
    return {name: Cost(values) for name, values in found.items()}


Arm = Callable[[], AbstractContextManager[object]]


def _turns(rig: Rig) -> list[tuple[str, str, Arm]]:
    turns: list[tuple[str, str, Arm]] = [("control", "getppid", nullcontext)]
    for n, case in enumerate(_CASES):
        text = f"p:ours{n} {case.where}"
        turns.append((f"{case.name}, native", case.program, lambda n=n: rig.native(f"native{n}")))
        chosen = case.filter
        turns.append(
            (
                f"{case.name}, ours",
                case.program,
                lambda text=text, chosen=chosen: rig.ours(text, filter=chosen),
            )
        )
        if case.by_hand is not None:
            by_hand = case.by_hand
            turns.append(
                (
                    f"{case.name}, by hand",
                    case.program,
                    lambda text=text, by_hand=by_hand: rig.ours(text, by_hand),
                )
            )
    return turns


def added(rig: Rig, program: str, armed: Arm) -> float:
    """Return the nanoseconds that something armed adds to a step of a program."""
    before = figure(rig, program)
    with armed():
        loaded = figure(rig, program)
    return loaded - (before + figure(rig, program)) / 2


def figure(rig: Rig, program: str) -> float:
    """Return a program's nanoseconds per step: the tenth percentile of its loops."""
    return sorted(rig.run(program))[rig.loops[program].repeats * rig.loops[program].cpus // 10]


def _control(cost: Cost) -> Row:
    return Row(name="nothing armed (A/A control)", figure=str(cost))


def _rows(case: Case, costs: dict[str, Cost]) -> list[Row]:
    ours, native = costs[f"{case.name}, ours"], costs[f"{case.name}, native"]
    # What a rejected hit costs can be less than can be told from nothing.
    ratio = native.ns / max(ours.ns, _LEAST_NS)
    row = Row(
        name=f"{case.name}: kernel's own",
        figure=str(ours),
        goal=f"{case.goal:g}x" if case.goal else "",
        peer=str(native),
        ratio=times(ratio),
        is_met=ratio >= case.goal if case.goal else None,
    )
    by_hand = costs.get(f"{case.name}, by hand")
    return [row] if by_hand is None else [row, _beside_hand(case.name, ours, by_hand)]


def _beside_hand(name: str, ours: Cost, by_hand: Cost) -> Row:
    return Row(
        name=f"{name}: by hand",
        figure=str(ours),
        goal="within 25 %",
        peer=str(by_hand),
        ratio=times(by_hand.ns / ours.ns),
        is_met=ours.ns <= 1.25 * by_hand.ns,
    )


def _alone(rig: Rig, rounds: int) -> list[Row]:
    # The code in a loop in user space: what a hit costs there is the code and nothing else.
    abi, rows = in_user_space.user_abi(rig.by_hand.abi()), list[Row]()
    _add_alone(rig, "nothing", None)
    for case in _CASES[:2]:
        if case.by_hand is None:
            continue
        _add_alone(rig, "compiled", _compiled(rig, case, abi))
        _add_alone(rig, "written", case.by_hand(abi))
        found = [
            [figure(rig, n) for n in ("nothing", "compiled", "written")] for _ in range(rounds)
        ]
        ours = Cost([compiled - nothing for nothing, compiled, _ in found])
        by_hand = Cost([written - nothing for nothing, _, written in found])
        rows.append(_beside_hand(f"{case.name}, its code alone in a loop", ours, by_hand))
    for case in _REJECTED[:2]:
        _add_alone(rig, "rejected", _compiled(rig, case, abi))
        found = [[figure(rig, n) for n in ("nothing", "rejected")] for _ in range(rounds)]
        cost = Cost([rejected - nothing for nothing, rejected in found])
        rows.append(Row(name=f"{case.name}, its code alone in a loop", figure=str(cost)))
    return rows


def _add_alone(rig: Rig, name: str, code: Template | None) -> None:
    rig.add(name, in_user_space.loop(code, steps=5 * _STEPS, repeats=_REPEATS))


def _compiled(rig: Rig, case: Case, abi: GuestAbi) -> Template:
    registers = rig.guest.arch.registers
    (definition,) = parse_source(f"p:alone {case.where}", registers=registers)
    (plan,) = rig.by_hand.prepare([replace(definition, filter=case.filter)])
    return compile_probes(rig.guest.arch, abi, plan.probes, is_framed=False)


def _gdb(rig: Rig, ours: Cost) -> Row:
    """Stop at every hit as gdb does: breakpoint, registers, step over, go on."""
    stub = rig.guest.stub
    site = rig.guest.kernel.symbols.named(_SITE).addr
    with stub.paused():
        stub.insert_breakpoint(site)
    running = rig.machine.start("/bench/few")
    hits: list[float] = []
    while len(hits) < _GDB_HITS:
        start = time.perf_counter()
        stopped = stub.wait(5.0)
        if stopped is None or stopped.cpu is None:
            raise RuntimeError(f"no hit of {_SITE} in 5 s")
        stub.registers(stopped.cpu)
        stub.remove_breakpoint(site)
        stub.step(stopped.cpu)
        stub.insert_breakpoint(site)
        stub.resume()
        hits.append(time.perf_counter() - start)
    with stub.paused():
        stub.remove_breakpoint(site)
    running.wait(10.0)
    cost = Cost([1e9 * hit for hit in hits[10:]])
    ratio = cost.ns / ours.ns
    return Row(
        name="one register: gdb's stop at every hit",
        figure=str(ours),
        goal="10,000x",
        peer=str(cost),
        ratio=times(ratio),
        is_met=ratio >= 10_000,
    )
