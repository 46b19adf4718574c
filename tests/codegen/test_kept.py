"""Values that a call's instance keeps for its return, and calls that can keep none."""

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.codegen.compile import calls_guest, needs_frame
from kprobes.model.abi import PERCPU_GUARD
from kprobes.model.plan import Returning, ReturnMethod, Returns, Role
from kprobes.model.resolved import (
    EntryCounter,
    EntryValue,
    Load,
    Operand,
    RegisterValue,
    Resolved,
    StackValue,
    Storage,
)
from kprobes.model.upcall import Upcall
from kprobes.plan.strategy import change_returns
from kprobes.units import Addr
from tests.build.kernel import SITE, TEXT
from tests.build.machine import ABI, CLOCK, CODE, KERNEL, NO_RESCHED, STACK, Machine, random_state
from tests.build.records import records
from tests.build.returning import CALLERS, MISSED_UPCALL, Function, return_probe, run

SCRIPT = KERNEL + 0x1000
KEPT: tuple[Operand, ...] = (
    RegisterValue(name="di"),
    RegisterValue(name="bx"),
    StackValue(slot=1),
    StackValue(slot=2000),
)
RETURN_METHODS = [ReturnMethod.RETINSN, ReturnMethod.TAIL, ReturnMethod.RETHOOK]


def probe_of(*operands: Operand, event_id: int = 1) -> Resolved:
    """A return probe of which each field is one of these."""
    text = " ".join(f"a{n}=$retval" for n in range(len(operands)))
    probe = return_probe(f"r f {text}", event_id=event_id)
    pairs = zip(probe.fetches, operands, strict=True)
    return replace(probe, fetches=tuple(replace(f, operand=o) for f, o in pairs))


def function_of(
    machine: Machine,
    return_method: ReturnMethod,
    *probes: Resolved,
    kept: tuple[Operand, ...] = (),
    is_timed: bool = False,
) -> Function:
    machine.cpu.add_exit(CALLERS)
    returns = Returns(
        entry=Addr(SITE), return_method=return_method, probes=probes, kept=kept, is_timed=is_timed
    )
    function = Function(machine, returns, count=2)
    function.arm()
    return function


def called(machine: Machine, f: Function, *script: int, **fixed: int) -> tuple[dict[str, int], ...]:
    """Call it; give its registers at the entry and behind the return, or where it sleeps."""
    state = random_state(machine.random, bp=SCRIPT, **fixed)
    machine.cpu.set_number(state["sp"], CALLERS)
    for index, place in enumerate(script):
        machine.cpu.set_number(SCRIPT + 8 * index, place)
    went, after = run(machine, f.addr, state)
    assert went in (CALLERS, f.sleep)
    return state, after


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_registers_and_stack_of_the_entry_are_told_at_the_return(
    return_method: ReturnMethod,
) -> None:
    machine = Machine()
    probe = probe_of(*(EntryValue(base=operand) for operand in KEPT))
    f = function_of(machine, return_method, probe, kept=KEPT)

    before, _ = called(machine, f, f.leave.addr, sp=STACK + 0x2FF0)

    above = machine.cpu.number(STACK + 0x2FF8)
    assert records(machine, 0)[0].values == (before["di"], before["bx"], above, 0)
    assert (machine.guard(), machine.preempt_count) == (0, NO_RESCHED)


def test_memory_at_what_the_entry_has_kept_is_read_at_the_return() -> None:
    machine = Machine()
    load = Load(base=EntryValue(base=KEPT[0]), offset=8, is_user=False)
    f = function_of(machine, ReturnMethod.RETINSN, probe_of(load), kept=KEPT[:1])
    called(machine, f, f.sleep, f.leave.addr, di=KERNEL)
    machine.cpu.set_number(KERNEL + 8, 55)

    run(machine, f.wake, machine.cpu.registers())

    assert records(machine, 0)[0].values == (55,)


def timed_probe() -> Resolved:
    """A return probe whose one field is the time of the entry."""
    probe = probe_of(EntryCounter())
    timed = replace(probe.fetches[0].field, storage=Storage.DURATION)
    return replace(
        probe,
        fetches=(replace(probe.fetches[0], field=timed),),
        layout=replace(probe.layout, fields=(timed,)),
    )


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_the_time_of_the_entry_is_told_at_the_return(return_method: ReturnMethod) -> None:
    machine = Machine(replace(ABI, clock=Addr(CLOCK)))
    f = function_of(machine, return_method, timed_probe(), is_timed=True)

    called(machine, f, f.leave.addr)

    (record,) = records(machine, 0)
    # The first and the second question to the clock.
    assert (record.values, record.counter) == ((1001,), 1002)


@pytest.mark.parametrize("role", [Role.ENTER, Role.HOOK])
@pytest.mark.parametrize(
    ("filters", "entries"), [(("",), [1001]), (("", ""), [1001, 1002]), (("a == 1",), [])]
)
def test_a_call_is_timed_from_its_entrys_last_record_on(
    role: Role, filters: tuple[str, ...], entries: list[int]
) -> None:
    machine = Machine(replace(ABI, clock=Addr(CLOCK)))
    return_method = ReturnMethod.RETHOOK if role is Role.HOOK else ReturnMethod.RETINSN
    f = function_of(machine, return_method, timed_probe(), is_timed=True)
    probes = [return_probe("p f a=%di", text, event_id=n) for n, text in enumerate(filters, 2)]
    f.enter(role, probes)

    called(machine, f, f.leave.addr, di=7)

    *found, last = records(machine, 0)
    assert [record.counter for record in found] == entries
    # Nobody asks the clock once more, unless nothing was recorded.
    entered = entries[-1] if entries else 1001
    assert (last.values, last.counter) == ((entered,), entered + 1)


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_a_return_inside_a_hit_is_missed_but_goes_where_it_should(
    return_method: ReturnMethod,
) -> None:
    machine = Machine()
    f = function_of(machine, return_method, probe_of(EntryValue(base=KEPT[0])), kept=KEPT[:1])
    machine.cpu.set_number(machine.percpu(machine.abi.percpu + PERCPU_GUARD), 1, 4)

    called(machine, f, f.leave.addr)

    assert (records(machine, 0), machine.missed(1), f.used()) == ([], 1, {})


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_a_full_table_is_counted_for_every_probe_of_the_function(
    return_method: ReturnMethod,
) -> None:
    machine = Machine()
    probes = [probe_of(EntryValue(base=KEPT[0]), event_id=n) for n in (1, 2)]
    f = function_of(machine, return_method, *probes, kept=KEPT[:1])
    for number in range(2):
        called(machine, f, f.sleep, sp=STACK + 0x1000 + 8 * number)
    assert len(f.used()) == 2

    for number in range(3):
        called(machine, f, f.leave.addr, sp=STACK + 0x2000 + 8 * number)

    assert [machine.nmissed(n) for n in (0, 1, 2, 3)] == [0, 3, 3, 0]
    assert records(machine, 0) == []
    assert len(f.used()) == 2


def test_a_return_that_nobody_saw_being_entered_is_recorded_where_nothing_of_it_is_needed() -> None:
    machine = Machine()
    probes = probe_of(EntryValue(base=KEPT[0])), probe_of(event_id=2)
    f = function_of(machine, ReturnMethod.RETINSN, *probes, kept=KEPT[:1])
    state = random_state(machine.random)
    machine.cpu.set_number(state["sp"], CALLERS)

    went, _ = run(machine, f.leave.addr, state)

    found = [(record.event_id, record.caller) for record in records(machine, 0)]
    assert (went, found) == (CALLERS, [(2, CALLERS)])
    assert [machine.nmissed(n) for n in (1, 2)] == [0, 0]


def test_where_the_table_is_full_only_what_needs_something_of_the_entry_is_missed() -> None:
    machine = Machine()
    probes = probe_of(EntryValue(base=KEPT[0])), probe_of(event_id=2)
    f = function_of(machine, ReturnMethod.RETINSN, *probes, kept=KEPT[:1])
    for number in range(2):
        called(machine, f, f.sleep, sp=STACK + 0x1000 + 8 * number)

    called(machine, f, f.leave.addr, sp=STACK + 0x2000)

    assert [record.event_id for record in records(machine, 0)] == [2]
    assert [machine.nmissed(n) for n in (1, 2)] == [1, 0]


@pytest.mark.parametrize("return_method", [ReturnMethod.RETINSN, ReturnMethod.RETHOOK])
def test_calls_in_progress_are_not_told_by_a_probe_that_came_later_and_needs_their_entry(
    return_method: ReturnMethod,
) -> None:
    machine = Machine()
    first = probe_of(EntryValue(base=KEPT[0]))
    f = function_of(machine, return_method, first, kept=KEPT[:1])
    room = replace(f.returns, room=len(KEPT))
    f = Function(machine, room, count=2)
    f.arm()
    before, _ = called(machine, f, f.sleep, f.leave.addr, sp=STACK + 0x1000)
    asleep = machine.cpu.registers()
    second, third = probe_of(EntryValue(base=KEPT[1]), event_id=2), probe_of(event_id=3)

    f.returns = change_returns(room, "f", return_method, (third, second, first))
    if return_method is ReturnMethod.RETINSN:
        f.arm()
        run(machine, f.wake, asleep)
    else:
        # Calls in progress come to their own trampoline; those from now on to another one.
        run(machine, f.wake, asleep)
        f.arm()
    early = [(record.event_id, record.values) for record in records(machine, 0)]
    after, _ = called(machine, f, f.leave.addr, sp=STACK + 0x2000)

    newer = [(3, ())] if return_method is ReturnMethod.RETINSN else []
    assert early == [*newer, (1, (before["di"],))]
    late = [(record.event_id, record.values) for record in records(machine, 0)][len(early) :]
    assert late == [(3, ()), (2, (after["bx"],)), (1, (after["di"],))]
    assert f.used() == {}


def test_a_probe_that_comes_again_tells_calls_that_were_entered_since() -> None:
    machine = Machine()
    first, second = (probe_of(EntryValue(base=KEPT[n]), event_id=n + 1) for n in range(2))
    f = function_of(machine, ReturnMethod.RETINSN, first, second, kept=KEPT[:2])
    alone = change_returns(f.returns, "f", ReturnMethod.RETINSN, (first,))
    again = change_returns(alone, "f", ReturnMethod.RETINSN, (second, first))
    f.returns = alone
    f.arm()
    called(machine, f, f.sleep, f.leave.addr)
    asleep = machine.cpu.registers()

    f.returns = again
    f.arm()
    run(machine, f.wake, asleep)

    assert [record.event_id for record in records(machine, 0)] == [1]
    called(machine, f, f.leave.addr)
    assert [record.event_id for record in records(machine, 0)] == [1, 2, 1]


def test_a_call_from_code_of_ours_is_no_trampoline() -> None:
    machine = Machine()
    f = function_of(machine, ReturnMethod.RETHOOK, probe_of())
    ours = CODE + 0x1_0008
    machine.cpu.add_exit(ours)
    state = random_state(machine.random, bp=SCRIPT)
    machine.cpu.set_number(state["sp"], ours)
    machine.cpu.set_number(SCRIPT, f.leave.addr)

    went, _ = run(machine, f.addr, state)

    assert (went, records(machine, 0)[0].caller) == (ours, ours)


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_a_filter_of_a_return_probe_may_test_what_the_entry_has_kept(
    return_method: ReturnMethod,
) -> None:
    machine = Machine()
    probe = return_probe("r f a=$arg1:u8", "a > 100")
    f = function_of(machine, return_method, probe, kept=KEPT[:1])
    for value in (5, 101, 200, 100):
        called(machine, f, f.leave.addr, di=value)

    assert [r.values for r in records(machine, 0)] == [(101,), (200,)]
    assert f.used() == {}


def test_what_is_kept_and_where_records_are_made_decide_about_the_frame() -> None:
    def needs(role: Role, *kept: Operand) -> bool:
        returns = Returns(
            entry=Addr(TEXT), return_method=RETURN_METHODS[0], probes=(probe_of(),), kept=kept
        )
        return needs_frame(X86_64, (), [Returning(role=role, returns=returns)])

    assert [needs(role) for role in Role] == [False, False, True, False, True]
    assert [needs(Role.ENTER, operand) for operand in KEPT] == [False, True, False, False]


def test_flags_are_safe_where_nothing_of_the_guest_s_is_called() -> None:
    def calls(*kept: Operand) -> bool:
        returns = Returns(
            entry=Addr(TEXT), return_method=RETURN_METHODS[0], probes=(probe_of(),), kept=kept
        )
        return calls_guest(ABI, (), [Returning(role=Role.ENTER, returns=returns)])

    load = Load(base=KEPT[0], offset=0, is_user=False)
    assert [calls(operand) for operand in KEPT] == [False, False, True, True]
    assert calls_guest(ABI, [probe_of(load)])
    assert not calls_guest(ABI, [probe_of(KEPT[0])])
    assert calls_guest(replace(ABI, clock=Addr(CLOCK)), [probe_of(KEPT[0])])


@pytest.mark.parametrize(
    ("return_method", "kept", "missed_upcalls"),
    [
        (ReturnMethod.RETHOOK, (), 3),
        (ReturnMethod.RETHOOK, KEPT[:1], 3),
        (ReturnMethod.TAIL, (), 3),
        (ReturnMethod.TAIL, KEPT[:1], 3),
        (ReturnMethod.RETINSN, KEPT[:1], 0),
    ],
)
def test_python_is_not_asked_about_returns_that_no_instance_is_free_for_and_that_is_counted(
    return_method: ReturnMethod, kept: tuple[Operand, ...], missed_upcalls: int
) -> None:
    machine = Machine()
    upcall = Upcall(number=1, addr=Addr(SITE), is_after=False, serve=lambda _: None)
    returns = Returns(
        entry=Addr(SITE),
        return_method=return_method,
        probes=(probe_of(),),
        kept=kept,
        upcalls=(upcall,),
    )
    f = Function(machine, returns, count=2)
    machine.cpu.set_number(MISSED_UPCALL, 0)
    for number in range(16):
        machine.cpu.add_exit(CALLERS + 16 * number)
    f.arm()
    jumps = [f.tail.addr] if return_method is ReturnMethod.TAIL else []
    for number in range(2):
        called(machine, f, *([] if kept else jumps), f.sleep, sp=STACK + 0x1000 + 8 * number)
    assert (machine.cpu.number(MISSED_UPCALL), len(f.used())) == (0, 2)

    for number in range(3):
        called(machine, f, *jumps, f.leave.addr, sp=STACK + 0x2000 + 8 * number)

    assert machine.cpu.number(MISSED_UPCALL) == missed_upcalls
