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
from functools import partial
from statistics import median, quantiles

from bench import in_user_space
from bench.elf_program import Loop
from bench.guest import HandWritten, Rig, boot
from bench.handwritten import registers_record
from bench.isa import Isa
from bench.table import Row, times
from kprobes.codegen.compile import compile_probes, needs_frame, saved_reads
from kprobes.lang.parser import parse_source
from kprobes.model.abi import GuestAbi

TITLE = "cost: nanoseconds that a probe adds to a hit"

_ALONE_STEPS, _ALONE_REPEATS = 5000, 40
_GDB_HITS = 300
_LEAST_NS = 0.5
_STRING = "do_sys_openat2 path=+0($arg2):ustring"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One probe, measured with one program.

    Attributes:
        by_hand: how many arguments are recorded by code written by hand beside it.
    """

    name: str
    program: str
    where: str
    filter: str = ""
    goal: float | None = None
    by_hand: int = 0
    is_alone: bool = False


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


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot a guest and measure everything in it."""
    cases, rounds = _cases(isa), 3 if quick else 9
    with boot(isa, _loops(isa)) as rig:
        _define(rig, cases)
        costs = _in_rounds(rig, isa, cases, rounds)
        return [
            _control(costs["control"]),
            *(row for case in cases for row in _rows(case, costs)),
            *_alone(rig, isa, [case for case in cases if case.is_alone], rounds),
            _gdb(rig, isa, costs[f"{cases[0].name}, ours"]),
        ]


def _loops(isa: Isa) -> dict[str, Loop]:
    programs = isa.programs
    getppid = Loop(isa=isa, step=programs.getppid, steps=programs.steps, repeats=programs.repeats)
    return {
        "getppid": getppid,
        "openat": replace(getppid, step=programs.openat),
        "both": replace(getppid, cpus=2),
        "few": replace(getppid, steps=_GDB_HITS, repeats=1),
    }


def _cases(isa: Isa) -> Sequence[Case]:
    goals, one = isa.goals, f"{isa.getppid} a=$arg1"
    three = f"{one} b=$arg2 c=$arg3"
    getppid = partial(Case, program="getppid")
    return (
        getppid(name="one register", where=one, goal=goals.entry, by_hand=1, is_alone=True),
        getppid(name="three registers", where=three, goal=goals.entry, by_hand=3, is_alone=True),
        Case(name="one 20-byte user string", program="openat", where=_STRING, goal=goals.string),
        Case(name="one register, 2 vCPUs at once", program="both", where=one, by_hand=1),
        *_rejected(isa, one),
    )


def _rejected(isa: Isa, one: str) -> Sequence[Case]:
    # Filters that no hit of these programs passes.
    rejected = partial(Case, program="getppid", where=one, goal=isa.goals.rejected, is_alone=True)
    return (
        rejected(name="rejected by a register", filter="a == 0x123456"),
        rejected(name="rejected by pid", filter="common_pid == 1"),
        Case(
            name="rejected by a user string",
            program="openat",
            where=_STRING,
            filter='path == "/etc/passwd"',
        ),
    )


def _define(rig: Rig, cases: Sequence[Case]) -> None:
    rig.define_native([f"p:native{n} {case.where}" for n, case in enumerate(cases)])
    for n, case in enumerate(cases):
        rig.filter_native(f"native{n}", case.filter or "0")


def _in_rounds(rig: Rig, isa: Isa, cases: Sequence[Case], rounds: int) -> dict[str, Cost]:
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, program, armed in _turns(rig, isa, cases):
            found.setdefault(name, []).append(added(rig, program, armed))
    return {name: Cost(values) for name, values in found.items()}


Arm = Callable[[], AbstractContextManager[object]]


def _turns(rig: Rig, isa: Isa, cases: Sequence[Case]) -> list[tuple[str, str, Arm]]:
    turns: list[tuple[str, str, Arm]] = [("control", "getppid", nullcontext)]
    for n, case in enumerate(cases):
        text = f"p:ours{n} {case.where}"
        arms: dict[str, Arm] = {
            "native": partial(rig.native, f"native{n}"),
            "ours": partial(rig.ours, text, filter=case.filter),
        }
        if case.by_hand:
            arms["by hand"] = partial(rig.ours, text, _by_hand(isa, case))
        turns += ((f"{case.name}, {whose}", case.program, arm) for whose, arm in arms.items())
    return turns


def _by_hand(isa: Isa, case: Case) -> HandWritten:
    return lambda abi: registers_record(isa, abi, case.by_hand)


def added(rig: Rig, program: str, armed: Arm) -> float:
    """Return the nanoseconds that something armed adds to a step of a program."""
    before = figure(rig, program)
    with armed():
        loaded = figure(rig, program)
    return loaded - (before + figure(rig, program)) / 2


def figure(rig: Rig, program: str) -> float:
    """Return a program's nanoseconds per step: the tenth percentile of its loops."""
    return sorted(rig.run(program))[rig.loops[program].repeats * rig.loops[program].cpus // 10]


def ratio_of(native: Cost, ours: Cost) -> float:
    """Return how many times as much the kernel's own costs."""
    # What a hit of ours costs can be less than can be told from nothing.
    return native.ns / max(ours.ns, _LEAST_NS)


def _control(cost: Cost) -> Row:
    return Row(name="nothing armed (A/A control)", figure=str(cost))


def _rows(case: Case, costs: dict[str, Cost]) -> list[Row]:
    ours, native = costs[f"{case.name}, ours"], costs[f"{case.name}, native"]
    ratio = ratio_of(native, ours)
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
        ratio=times(ratio_of(by_hand, ours)),
        is_met=ours.ns <= 1.25 * by_hand.ns,
    )


def _alone(rig: Rig, isa: Isa, cases: Sequence[Case], rounds: int) -> list[Row]:
    # The code in a loop in user space: what a hit costs there is the code and nothing else.
    abi = in_user_space.user_abi(isa, rig.by_hand.abi())
    _add_alone(rig, isa, "nothing", None)
    return [_alone_row(rig, isa, case, abi, rounds) for case in cases]


def _alone_row(rig: Rig, isa: Isa, case: Case, abi: GuestAbi, rounds: int) -> Row:
    name, names = f"{case.name}, its code alone in a loop", ["nothing", "compiled"]
    _add_alone(rig, isa, "compiled", _compiled(rig, isa, case, abi))
    if case.by_hand:
        code = registers_record(isa, abi, case.by_hand, isa.alone.registers)
        _add_alone(rig, isa, "written", in_user_space.linked(code))
        names.append("written")
    found = [[figure(rig, name) for name in names] for _ in range(rounds)]
    ours, *by_hand = (Cost([each[n] - each[0] for each in found]) for n in range(1, len(names)))
    return _beside_hand(name, ours, *by_hand) if by_hand else Row(name=name, figure=str(ours))


def _add_alone(rig: Rig, isa: Isa, name: str, code: in_user_space.Linked | None) -> None:
    rig.add(name, in_user_space.loop(isa, code, steps=_ALONE_STEPS, repeats=_ALONE_REPEATS))


def _compiled(rig: Rig, isa: Isa, case: Case, abi: GuestAbi) -> in_user_space.Linked:
    arch = isa.alone.arch(rig.guest.arch)
    (definition,) = parse_source(f"p:alone {case.where}", registers=arch.registers)
    (plan,) = rig.by_hand.prepare([replace(definition, filter=case.filter)])
    is_framed, reads = needs_frame(arch, plan.probes), saved_reads(arch, plan.probes)
    template = compile_probes(arch, abi, plan.probes, is_framed=is_framed)
    if not is_framed:
        return in_user_space.linked(template)
    return in_user_space.linked(
        template, lambda place, body: arch.site.entry(place, body, None, reads=reads)
    )


def _gdb(rig: Rig, isa: Isa, ours: Cost) -> Row:
    """Stop at every hit as gdb does: breakpoint, registers, step over, go on."""
    stub = rig.guest.stub
    site = rig.guest.kernel.symbols.named(isa.getppid).addr
    with stub.paused():
        stub.insert_breakpoint(site)
    running = rig.machine.start("/bench/few")
    hits: list[float] = []
    while len(hits) < _GDB_HITS:
        start = time.perf_counter()
        stopped = stub.wait(5.0)
        if stopped is None or stopped.cpu is None:
            raise RuntimeError(f"no hit of {isa.getppid} in 5 s")
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
    ratio = ratio_of(cost, ours)
    return Row(
        name="one register: gdb's stop at every hit",
        figure=str(ours),
        goal="10,000x",
        peer=str(cost),
        ratio=times(ratio),
        is_met=ratio >= 10_000,
    )
