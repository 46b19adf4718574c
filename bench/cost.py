"""Cost of a hit: the guest kernel's own probes, ours, code written by hand, and gdb's way.

All of them in turn in each of several guests; see bench/rounds.py.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from bench import in_user_space
from bench.guest import HandWritten, Rig
from bench.handwritten import registers_record
from bench.isa import Isa
from bench.many import POLLED, WRITTEN, polling, writing
from bench.rounds import Arm, Turn, added, figure, in_rounds
from bench.spread import Spread
from bench.table import Goal, Row, compared, ns
from kprobes.codegen.compile import compile_probes, needs_frame, saved_reads
from kprobes.lang.parser import parse_source
from kprobes.model.abi import GuestAbi
from kprobes.model.options import Wanted

TITLE = "cost: nanoseconds that a probe adds to a hit"

_ALONE_STEPS, _ALONE_REPEATS = 5000, 40
_GDB_HITS, _GDB_FIRST = 60, 10
_BY_HAND, _GDB = Goal(1 / 1.25, "within 25 %"), Goal(10_000)
_POLL, _WRITE = f"{POLLED} a=$arg1", f"{WRITTEN} path=+0($arg2):ustring"
_CONTROLS = {"poll": _WRITE, "write": _POLL}
"""Programs, and what is armed that they do not hit: it may cost them nothing."""


class Case(Struct, frozen=True, kw_only=True):
    """One probe, measured with one program.

    Attributes:
        by_hand: how many arguments are recorded by code written by hand beside it.
    """

    name: str
    program: str
    where: str
    filter: str = ""
    goal: Goal | None = None
    by_hand: int = 0
    is_alone: bool = False


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot guests and measure everything in each."""
    cases = _cases(isa)
    loops = {
        "poll": polling(isa),
        "both": polling(isa, cpus=2),
        "few": polling(isa, hits=_GDB_HITS, repeats=1),
        "write": writing(isa),
    }
    costs = in_rounds(isa, loops, partial(_measured, isa=isa, cases=cases), quick=quick)
    return [
        *(_control_row(program, costs) for program in _CONTROLS),
        *(row for case in cases for row in _rows(case, costs)),
        *(_alone_row(case, costs) for case in cases if case.is_alone),
        _gdb_row(cases[0], costs),
    ]


def _cases(isa: Isa) -> Sequence[Case]:
    goals = isa.goals
    poll, three = partial(Case, program="poll"), f"{_POLL} b=$arg2 c=$arg3"
    return (
        poll(name="one register", where=_POLL, goal=Goal(goals.entry), by_hand=1, is_alone=True),
        poll(name="three registers", where=three, goal=Goal(goals.entry), by_hand=3, is_alone=True),
        Case(
            name="one 20-byte user string", program="write", where=_WRITE, goal=Goal(goals.string)
        ),
        Case(name="one register, 2 vCPUs at once", program="both", where=_POLL, by_hand=1),
        *_rejected(isa),
    )


def _rejected(isa: Isa) -> Sequence[Case]:
    # Filters that no hit of these programs passes.
    goal = Goal(isa.goals.rejected)
    rejected = partial(Case, program="poll", where=_POLL, goal=goal, is_alone=True)
    return (
        rejected(name="rejected by a register", filter="a == 0x123456"),
        rejected(name="rejected by pid", filter="common_pid == 1"),
        Case(
            name="rejected by a user string",
            program="write",
            where=_WRITE,
            filter='path == "/etc/passwd"',
        ),
    )


def _measured(rig: Rig, passes: int, isa: Isa, cases: Sequence[Case]) -> Mapping[str, float]:
    rig.define_native([f"p:native{n} {case.where}" for n, case in enumerate(cases)])
    for n, case in enumerate(cases):
        rig.filter_native(f"native{n}", case.filter or "0")
    turns = [
        Turn(name=_control(program), program=program, arm=partial(rig.ours, f"p:control {where}"))
        for program, where in _CONTROLS.items()
    ]
    for n, case in enumerate(cases):
        turns += _turns(rig, isa, case, n)
    found = added(rig, turns, passes=passes)
    return found | _alone(rig, isa, cases) | {"gdb": _gdb(rig)}


def _control(program: str) -> str:
    return f"control: a probe that {program} does not hit"


def _turns(rig: Rig, isa: Isa, case: Case, n: int) -> list[Turn]:
    text = f"p:ours{n} {case.where}"
    arms: dict[str, Arm] = {
        "native": partial(rig.native, f"native{n}"),
        "ours": partial(rig.ours, text, filter=case.filter),
    }
    if case.by_hand:
        arms["by hand"] = partial(rig.ours, text, _by_hand(isa, case))
    return [
        Turn(name=f"{case.name}, {whose}", program=case.program, arm=arm)
        for whose, arm in arms.items()
    ]


def _by_hand(isa: Isa, case: Case) -> HandWritten:
    return lambda abi: registers_record(isa, abi, case.by_hand)


def _alone(rig: Rig, isa: Isa, cases: Sequence[Case]) -> dict[str, float]:
    # The code in a loop in user space: what a hit costs there is the code and nothing else.
    abi = in_user_space.user_abi(isa, rig.by_hand.abi())
    codes: dict[str, in_user_space.Linked | None] = {"nothing": None}
    for case in cases:
        if case.is_alone:
            codes[f"{case.name}, alone"] = _compiled(rig, isa, case, abi)
        if case.is_alone and case.by_hand:
            code = registers_record(isa, abi, case.by_hand, isa.alone.registers)
            codes[f"{case.name}, alone by hand"] = in_user_space.linked(code)
    return _in_loops(rig, isa, codes)


def _in_loops(
    rig: Rig, isa: Isa, codes: Mapping[str, in_user_space.Linked | None]
) -> dict[str, float]:
    programs = {name: f"alone{n}" for n, name in enumerate(codes)}
    for name, code in codes.items():
        loop = in_user_space.loop(isa, code, steps=_ALONE_STEPS, repeats=_ALONE_REPEATS)
        rig.add(programs[name], loop)
    nothing, *others = (figure(rig, program) for program in programs.values())
    _, *names = codes
    return {name: other - nothing for name, other in zip(names, others, strict=True)}


def _compiled(rig: Rig, isa: Isa, case: Case, abi: GuestAbi) -> in_user_space.Linked:
    arch = isa.alone.arch(rig.guest.arch)
    (definition,) = parse_source(f"p:alone {case.where}", registers=arch.registers)
    filtered = replace(definition, filter=case.filter)
    (plan,) = rig.by_hand.prepare(Wanted(definitions=[filtered])).new
    # The next one has other arguments.
    rig.by_hand.forget(filtered, is_new=True)
    is_framed, reads = needs_frame(arch, plan.probes), saved_reads(arch, plan.probes)
    template = compile_probes(arch, abi, plan.probes, is_framed=is_framed)
    if not is_framed:
        return in_user_space.linked(template)
    return in_user_space.linked(
        template, lambda place, body: arch.site.entry(place, body, reads=reads)
    )


def _gdb(rig: Rig) -> float:
    """Stop at every hit as gdb does: breakpoint, registers, step over, go on."""
    stub = rig.guest.stub
    site = rig.guest.kernel.symbols.named(POLLED).addr
    with stub.paused():
        stub.insert_breakpoint(site)
    running = rig.machine.start("/bench/few")
    hits: list[float] = []
    while len(hits) < _GDB_HITS:
        start = time.perf_counter()
        stopped = stub.wait(5.0)
        if stopped is None or stopped.cpu is None:
            raise RuntimeError(f"no hit of {POLLED} in 5 s")
        stub.registers(stopped.cpu)
        stub.remove_breakpoint(site)
        stub.step(stopped.cpu)
        stub.insert_breakpoint(site)
        stub.resume()
        hits.append(time.perf_counter() - start)
    with stub.paused():
        stub.remove_breakpoint(site)
    running.wait(10.0)
    return 1e9 * median(hits[_GDB_FIRST:])


def _control_row(program: str, costs: Mapping[str, Spread]) -> Row:
    name = _control(program)
    return Row(name=name, figure=ns(costs[name]))


def _rows(case: Case, costs: Mapping[str, Spread]) -> list[Row]:
    ours, native = costs[f"{case.name}, ours"], costs[f"{case.name}, native"]
    row = compared(f"{case.name}: kernel's own", ours, native, case.goal, show=ns)
    if not case.by_hand:
        return [row]
    return [row, _beside_hand(case.name, ours, costs[f"{case.name}, by hand"])]


def _beside_hand(name: str, ours: Spread, by_hand: Spread) -> Row:
    return compared(f"{name}: by hand", ours, by_hand, _BY_HAND, show=ns)


def _alone_row(case: Case, costs: Mapping[str, Spread]) -> Row:
    name, ours = f"{case.name}, its code alone in a loop", costs[f"{case.name}, alone"]
    if not case.by_hand:
        return Row(name=name, figure=ns(ours))
    return _beside_hand(name, ours, costs[f"{case.name}, alone by hand"])


def _gdb_row(case: Case, costs: Mapping[str, Spread]) -> Row:
    name, ours = f"{case.name}: gdb's stop at every hit", costs[f"{case.name}, ours"]
    return compared(name, ours, costs["gdb"], _GDB, show=ns)
