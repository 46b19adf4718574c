"""Definitions to plans: globs, sites that several probes share, numbers of events."""

from collections.abc import Sequence
from itertools import count

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError, NotLoadedError, RefusedError
from kprobes.guest.guest import Guest
from kprobes.guest.planner import Planner, Prepared
from kprobes.model.options import Options, Tasks, Wanted
from kprobes.model.plan import Plan, ReturnMethod, Role, Strategy
from kprobes.model.upcall import Upcall, WaitingVcpu
from kprobes.units import Addr
from tests.build.guest import CODE, GuestWithSites, make_guest
from tests.build.kernel import make_kernel, read, symbol

NAMES = ("vfs_read", "vfs_write", "do_exit", "twice")
WITHOUT_SITE = "vfs_lonely"


def _guest() -> GuestWithSites:
    made = make_guest(["p f"] * len(NAMES))
    named = [symbol(name, addr, size=0x20) for name, addr in zip(NAMES, made.sites, strict=True)]
    more = [
        symbol(WITHOUT_SITE, made.sites[-1] + 0x200),
        symbol("twice", made.sites[-1] + 0x300),
        symbol("vfs_data", made.sites[-1] + 0x400, type="D"),
    ]
    listed = made.guest.kernel.symbols.all_named("ftrace_pages_start")
    made.guest = replace(made.guest, kernel=make_kernel([*named, *more, *listed]))
    return made


def wanted(*texts: str, options: Options | None = None) -> Wanted:
    return Wanted(definitions=[read(text) for text in texts], options=options or Options())


def _prepare(*texts: str) -> Sequence[Plan]:
    return Planner(_guest().guest).plan(wanted(*texts)).new


def test_each_definition_gets_a_number_of_its_own_from_one_on() -> None:
    plans = _prepare("p vfs_read", "p do_exit", "p vfs_write")

    probes = [probe for plan in plans for probe in plan.probes]
    ids = {probe.layout.function: probe.layout.event_id for probe in probes}
    assert ids == {"vfs_read": 1, "do_exit": 2, "vfs_write": 3}
    assert [plan.site.addr for plan in plans] == [probe.function for probe in probes]


def test_probes_of_one_function_share_its_site_and_the_newest_runs_first() -> None:
    plans = _prepare("p:a vfs_read", "p do_exit", "p:b vfs_read $arg1")

    assert [[probe.layout.event for probe in plan.probes] for plan in plans] == [
        ["b", "a"],
        ["p_do_exit_0"],
    ]


def test_a_glob_takes_every_function_that_can_be_probed() -> None:
    plans = _prepare("p vfs_* a=$arg1")

    found = [(p.layout.function, p.layout.event) for plan in plans for p in plan.probes]
    assert found == [("vfs_read", "p_vfs_read_0"), ("vfs_write", "p_vfs_write_0")]


def test_a_glob_with_a_name_gives_it_to_all() -> None:
    plans = _prepare("p:grp/all vfs_*")

    assert {p.layout.event for plan in plans for p in plan.probes} == {"all"}


@pytest.mark.parametrize(
    ("pattern", "why"),
    [("nothing_*", "matches 'nothing_"), ("vfs_lone*", "1 of them without an ftrace site")],
)
def test_a_glob_that_leaves_nothing_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        _prepare(f"p {pattern}")


def test_names_of_two_functions_are_left_out_of_globs_and_refused_by_themselves() -> None:
    with pytest.raises(RefusedError):
        _prepare("p twic*")
    with pytest.raises(DefinitionError, match="not unique"):
        _prepare("p twice")


def test_a_function_without_a_site_is_refused_when_its_bytes_are_no_instruction() -> None:
    with pytest.raises(DefinitionError, match="boundary"):
        _prepare(f"p {WITHOUT_SITE}")


def test_preparing_changes_nothing_in_the_guest() -> None:
    made = _guest()
    before, events = made.text(), list(made.stub.events)

    Planner(made.guest).plan(wanted("p vfs_*"))

    assert made.text() == before
    assert made.stub.events == events


def test_preparing_the_same_again_looks_at_the_sites_again() -> None:
    made = _guest()
    planner, both = Planner(made.guest), wanted("p vfs_read", "p do_exit")
    before = planner.plan(both).new
    call = X86_64.site.branch(made.sites[0], Addr(made.sites[0] + 0x1000))
    made.guest.memory.write(made.sites[0], call)

    after = planner.plan(both).new

    assert [plan.site.strategy for plan in before] == [Strategy.FTRACE] * 2
    # Nothing of ours where the guest's own ftrace writes.
    moved, other = (plan.site for plan in after)
    assert (moved.addr, moved.ip) == (made.sites[0] + X86_64.site.size, made.sites[0])
    assert (moved.strategy, other.strategy) == (Strategy.JUMP, Strategy.FTRACE)
    assert [plan.probes for plan in after] == [plan.probes for plan in before]


def test_a_pattern_leaves_out_where_nothing_can_be_and_a_name_does_not() -> None:
    made = _guest()
    made.guest.memory.write(made.sites[0], b"\xcc")
    planner = Planner(made.guest)

    prepared = planner.plan(wanted("p vfs_*", "r:back vfs_*"))

    assert {plan.site.addr for plan in prepared.new} & {made.sites[0]} == set()
    assert len(prepared.left_out) >= 1
    assert "neither a nop nor a call" in str(prepared.left_out[0])
    with pytest.raises(RefusedError, match="neither a nop nor a call"):
        Planner(made.guest).plan(wanted("p vfs_*", "p vfs_read"))


def test_where_the_guests_ftrace_leads_elsewhere_nothing_is_probed_after_it() -> None:
    made = _guest()
    call = X86_64.site.branch(made.sites[0], Addr(made.sites[0] + 0x1000))
    made.guest.memory.write(made.sites[0], call)
    record = Planner(made.guest).places.sites.find(made.sites[0])
    assert record is not None
    made.guest.memory.write(Addr(record + 8), (1 << 31 | 1 << 26 | 1).to_bytes(8, "little"))

    with pytest.raises(RefusedError, match="may go on elsewhere"):
        Planner(made.guest).plan(wanted("p vfs_read"))


def test_the_ftrace_strategy_is_refused_where_the_guests_own_ftrace_is() -> None:
    made = _guest()
    call = X86_64.site.branch(made.sites[0], Addr(made.sites[0] + 0x1000))
    made.guest.memory.write(made.sites[0], call)

    options = Options(strategy=Strategy.FTRACE)
    with pytest.raises(RefusedError, match="that the guest's own ftrace uses"):
        Planner(made.guest).plan(wanted("p vfs_read", options=options))


def test_probes_of_one_event_must_have_the_same_records() -> None:
    plans = _prepare("p:e vfs_read a=%di:u32", "p:e vfs_write a=%si:u32")

    assert len(plans) == 2
    with pytest.raises(DefinitionError, match="different from existing probe"):
        _prepare("p:e vfs_read a=%di:u32", "p:e vfs_write a=%si:u16")


def test_probes_at_returns_share_every_place_of_their_function_and_the_newest_runs_first() -> None:
    options = Options(return_method=ReturnMethod.RETHOOK)
    texts = "r:a do_exit", "p:b do_exit", "r:c do_exit"

    (plan,) = Planner(_guest().guest).plan(wanted(*texts, options=options)).new

    (here,) = plan.returning
    assert here.role is Role.HOOK
    assert [probe.layout.event for probe in plan.recorded] == ["b", "c", "a"]
    assert [probe.layout.event for probe in here.returns.probes] == ["c", "a"]


def _nothing(waiting: WaitingVcpu) -> None:
    del waiting


WATCH = (Upcall(number=0, addr=Addr(0), is_after=False, serve=_nothing),)


# test al,al; je +0x100; jmp +0x100; ret
TAILED = bytes.fromhex("84c0 0f8400010000 e900010000 c3")


def _with_body(body: bytes) -> GuestWithSites:
    made = _guest()
    made.guest.memory.write(Addr(made.sites[0] + 5), body.ljust(0x1B, b"\xcc"))
    return made


def _upcall(addr: int) -> Upcall:
    return Upcall(number=1, addr=Addr(addr), is_after=False, serve=_nothing)


def _plans(
    made: GuestWithSites,
    *texts: str,
    upcalls: Sequence[Upcall] = (),
    return_upcalls: Sequence[Upcall] = (),
) -> Sequence[Plan]:
    some = replace(wanted(*texts), upcalls=upcalls, return_upcalls=return_upcalls)
    return Planner(made.guest).plan(some).new


def test_python_at_returns_is_asked_at_return_instructions_and_no_code_is_there() -> None:
    made = _with_body(bytes.fromhex("90 c3"))
    upcall = _upcall(made.sites[0])

    (plan,) = _plans(made, return_upcalls=[upcall])

    assert plan.site.addr == made.sites[0] + 6
    assert (plan.before, plan.returning, plan.probes) == ((upcall,), (), ())


def test_python_at_returns_that_are_taken_over_leaves_the_rest_to_the_code() -> None:
    made = _with_body(bytes.fromhex("90 c3"))
    upcall = _upcall(made.sites[0])

    some = replace(
        wanted(options=Options(return_method=ReturnMethod.RETHOOK)), return_upcalls=[upcall]
    )
    (plan,) = Planner(made.guest).plan(some).new

    assert (plan.site.addr, plan.upcalls) == (made.sites[0], ())
    assert [(each.role, each.returns.upcalls) for each in plan.returning] == [
        (Role.HOOK, (upcall,))
    ]


def test_handlers_of_the_instruction_come_before_those_of_the_return() -> None:
    made = _with_body(bytes.fromhex("90 c3"))
    at_site, at_return = _upcall(made.sites[0] + 6), _upcall(made.sites[0])

    (plan,) = _plans(made, "r vfs_read", upcalls=[at_site], return_upcalls=[at_return])

    assert plan.before == (at_site, at_return)
    assert [each.role for each in plan.returning] == [Role.RETURN]


def test_a_handler_on_a_conditional_jump_by_which_a_probed_function_is_left_is_refused() -> None:
    made = _with_body(TAILED)
    branch = _upcall(made.sites[0] + 7)

    (alone,) = _plans(made, upcalls=[branch])

    assert alone.site.addr == branch.addr
    for texts, return_upcalls in ((["r vfs_read"], []), ([], [_upcall(made.sites[0])])):
        with pytest.raises(RefusedError, match=r"vfs_read\+0x7/0x20 is a conditional jump into"):
            _plans(made, *texts, upcalls=[branch], return_upcalls=return_upcalls)


def test_a_module_that_is_not_loaded_is_refused_where_nobody_can_wait() -> None:
    with pytest.raises(NotLoadedError, match="module absent is not loaded"):
        _prepare("p absent:f")


def _watched(made: GuestWithSites) -> tuple[Planner, Sequence[Upcall]]:
    planner = Planner(made.guest)
    planner.watch = watch = (replace(WATCH[0], addr=made.sites[0]),)
    return planner, watch


def test_what_is_in_a_module_that_is_not_loaded_waits_and_keeps_its_number() -> None:
    planner, watch = _watched(_guest())
    both = wanted("p absent:f", "p vfs_write")

    prepared = planner.plan(both)

    assert prepared.waiting == list(both.definitions[:1])
    assert [probe.layout.event_id for probe in prepared.come] == [2]
    assert [plan.upcalls for plan in prepared.new] == [watch, ()]
    assert planner.resolver.numbers_of(both.definitions[0]) == [1]


def test_who_waits_in_vain_goes_on_waiting() -> None:
    made = _guest()
    planner, _ = _watched(made)
    one = wanted("p absent:f")
    planner.keep(planner.plan(one), one.options)

    planner.use(made.guest)
    prepared = planner.plan(one)

    assert (prepared.new, prepared.gone, prepared.errors) == ((), (), ())
    assert prepared.waiting == planner.waiting == list(one.definitions)


def test_nobody_is_told_of_modules_that_no_probe_is_in() -> None:
    planner, _ = _watched(_guest())

    assert [plan.upcalls for plan in planner.plan(wanted("p vfs_read")).new] == [()]


@pytest.mark.parametrize("calls", [1, 3])
def test_planning_ends_where_its_checkpoint_raises(calls: int) -> None:
    planner = Planner(_guest().guest)
    text, asked = "p vfs_*", count(1)

    def checkpoint() -> None:
        if next(asked) == calls:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planner.plan(wanted(text, options=Options(checkpoint=checkpoint)))

    assert planner.plan(wanted(text)).new


def _change(planner: Planner, wanted: Wanted, lost: Sequence[tuple[Addr, Addr]] = ()) -> Prepared:
    """Plan and take it as made."""
    prepared = planner.plan(wanted, lost)
    planner.keep(prepared, wanted.options)
    return prepared


def _events(plans: Sequence[Plan]) -> list[list[str]]:
    return sorted([probe.layout.event for probe in plan.recorded] for plan in plans)


def test_what_stays_has_the_same_plan_and_is_no_change() -> None:
    planner = Planner(_guest().guest)
    first = wanted("p:a vfs_read", "p:b do_exit")
    before = {plan.site.addr: plan for plan in _change(planner, first).new}

    second = replace(first, definitions=[*first.definitions, read("p:c vfs_write")])
    prepared = _change(planner, second)

    assert (_events(prepared.new), prepared.gone) == ([["c"]], ())
    assert [before.get(plan.site.addr, plan) for plan in planner.plans] == list(planner.plans)
    assert [probe.layout.event for probe in prepared.come] == ["c"]
    assert planner.plan(second).new == planner.plan(second).gone == ()


def test_a_probe_that_joins_or_leaves_a_site_changes_its_plan_and_no_other() -> None:
    planner = Planner(_guest().guest)
    a, b, c = map(read, ("p:a vfs_read", "p:b do_exit", "p:c vfs_read $arg1"))
    _change(planner, Wanted(definitions=[a, b]))

    joined = _change(planner, Wanted(definitions=[a, b, c]))
    left = _change(planner, Wanted(definitions=[b, c]))
    gone = _change(planner, Wanted(definitions=[b]))

    assert (_events(joined.gone), _events(joined.new)) == ([["a"]], [["c", "a"]])
    assert (_events(left.gone), _events(left.new)) == ([["c", "a"]], [["c"]])
    assert (_events(gone.gone), _events(gone.new)) == ([["c"]], [])
    assert joined.gone[0].site == joined.new[0].site == left.new[0].site
    assert (left.come, left.ended) == ((), {1})
    assert gone.ended == {3}


def test_an_older_probe_that_comes_again_runs_after_the_newer_one() -> None:
    planner = Planner(_guest().guest)
    a, b = map(read, ("p:a vfs_read", "p:b vfs_read $arg1"))
    _change(planner, Wanted(definitions=[a, b]))
    _change(planner, Wanted(definitions=[b]))

    prepared = _change(planner, Wanted(definitions=[a, b]))

    assert _events(prepared.new) == [["b", "a"]]
    assert [probe.layout.event_id for probe in prepared.come] == [1]


# Twice mov %rax,%rbx, then ret: a jump takes both.
MOVES = bytes.fromhex("4889c3 4889c3 4889c3 c3")


def test_a_jump_gives_way_to_a_breakpoint_where_it_would_cover_a_new_place() -> None:
    made = _with_body(MOVES)
    planner, inside = Planner(made.guest), made.sites[0] + 5
    first, second = (read(f"p:p{n} {inside + n:#x}") for n in (0, 3))
    (jump,) = _change(planner, Wanted(definitions=[first])).new
    assert jump.site.strategy is Strategy.JUMP

    prepared = _change(planner, Wanted(definitions=[first, second]))

    assert prepared.gone == (jump,)
    strategies = {plan.site.addr - inside: plan.site.strategy for plan in prepared.new}
    assert strategies[0] is Strategy.BREAKPOINT
    assert set(strategies) == {0, 3}
    # It is not made a jump again: that would be a change for nothing.
    assert _change(planner, Wanted(definitions=[first])).new == ()


def test_other_options_plan_all_anew() -> None:
    planner = Planner(_guest().guest)
    both = wanted("p:a vfs_read", "p:b do_exit")
    before = _change(planner, both).new

    chosen = replace(both, options=Options(tasks=Tasks(pids=(7,))))
    prepared = _change(planner, chosen)

    assert (set(map(id, prepared.gone)), len(prepared.new)) == (set(map(id, before)), 2)
    assert all(probe.filter is not None for plan in prepared.new for probe in plan.probes)
    assert prepared.ended == frozenset()
    assert planner.plan(chosen).new == ()


def test_all_is_planned_anew_where_other_code_is_needed() -> None:
    planner = Planner(_guest().guest)
    both = wanted("p:a vfs_read", "r:b do_exit")
    _change(planner, both)

    prepared = planner.plan(both, is_anew=True)

    assert (len(prepared.gone), len(prepared.new)) == (2, 2)
    assert [plan.site for plan in prepared.gone] == [plan.site for plan in prepared.new]
    ((old,), (new,)) = prepared.old_returns, prepared.new_returns
    assert (old.entry, new.generation) == (new.entry, old.generation + 1)


def test_return_probes_that_change_have_another_generation_and_others_stay() -> None:
    options = Options(return_method=ReturnMethod.RETHOOK)
    planner = Planner(_guest().guest)
    a, b, c = map(read, ("r:a do_exit $arg2", "r:b do_exit $arg1", "r:c vfs_read"))
    _change(planner, Wanted(definitions=[a, c], options=options))

    prepared = _change(planner, Wanted(definitions=[a, b, c], options=options))
    (returns,) = prepared.new_returns

    assert [plan.returning[0].returns for plan in prepared.new] == [returns]
    assert (returns.generation, returns.since) == (1, ((3, 1),))
    assert returns.first_generations == (1, 0)
    assert prepared.left_functions == []
    gone = _change(planner, Wanted(definitions=[c], options=options))
    assert gone.old_returns == (returns,)
    assert gone.left_functions == [returns.entry]


def test_a_change_that_is_refused_leaves_what_is_planned() -> None:
    planner = Planner(_guest().guest)
    first = wanted("p:a vfs_read")
    _change(planner, first)
    before = list(planner.plans)

    with pytest.raises(DefinitionError):
        planner.plan(wanted("p:b do_exit", f"p:c {WITHOUT_SITE}"))

    assert list(planner.plans) == before
    assert planner.plan(first).new == ()


MODULE = Addr(CODE + 0x2000)
"""Text of a module: nops, and a return."""


def _loaded(made: GuestWithSites) -> Guest:
    made.guest.memory.write(MODULE, b"\x90" * 0x1F + b"\xc3")
    there = made.guest.kernel.symbols.glob("*")
    own = [symbol("f", MODULE, size=0x20), symbol("__this_module", MODULE + 0x100, type="d")]
    symbols = [*there, *(replace(each, module="absent") for each in own)]
    return replace(made.guest, kernel=make_kernel(symbols))


def test_what_waits_is_there_when_its_module_comes_and_waits_again_when_it_goes() -> None:
    made = _guest()
    planner, _ = _watched(made)
    both = wanted("p:f absent:f+1", "p:w vfs_write")
    _change(planner, both)

    planner.use(_loaded(made))
    come = _change(planner, both)
    assert _events(come.new) == [["f"]]
    assert [probe.layout.event_id for probe in come.come] == [1]
    assert (come.waiting, planner.waiting) == ([], [])
    planner.use(made.guest)
    gone = _change(planner, both, [(MODULE, Addr(MODULE + 0x20))])

    assert (_events(gone.gone), gone.new, gone.ended) == ([["f"]], (), {1})
    assert gone.waiting == list(both.definitions[:1])
    planner.use(_loaded(made))
    assert _events(_change(planner, both).new) == [["f"]]


def test_what_only_boot_uses_is_wanted_no_more_when_it_is_freed_and_then_refused() -> None:
    made = _guest()
    planner, watch = _watched(made)
    start, others = made.sites[1], (Addr(made.sites[0]), made.sites[1])
    booting = replace(made.guest.kernel, text=others, init_text=(start, Addr(start + 0x1000)))
    planner.use(replace(made.guest, kernel=booting))
    both = wanted("p:r vfs_read", "p:w vfs_write")
    come = _change(planner, both)
    assert _events(come.new) == [["r"], ["w"]]
    assert not any(plan.upcalls == watch for plan in come.new)

    planner.use(replace(made.guest, kernel=replace(booting, init_text=None)))
    gone = _change(planner, both)

    assert (_events(gone.gone), gone.new, gone.ended) == ([["w"]], (), {2})
    assert _change(planner, both).gone == ()
    more = replace(both, definitions=[*both.definitions, read("p:x do_exit")])
    with pytest.raises(RefusedError, match="it can be probed while a guest boots"):
        planner.plan(more)


def test_what_cannot_be_probed_when_its_module_comes_is_told_and_nothing_else_suffers() -> None:
    made = _guest()
    planner, _ = _watched(made)
    both = wanted("p:f absent:nosuch", "p:w vfs_write")
    _change(planner, both)

    planner.use(_loaded(made))
    prepared = _change(planner, both)

    # Nobody waits any more, so that nobody is told of modules.
    assert (prepared.new, [plan.recorded for plan in prepared.gone]) == ((), [()])
    (error,) = prepared.errors
    assert isinstance(error, DefinitionError)
    assert _change(planner, both).errors == ()


def test_a_filter_that_is_wrong_when_its_module_comes_is_told_and_the_event_waits_no_more() -> None:
    made = _guest()
    planner, _ = _watched(made)
    late = replace(read("p:late absent:f+1 a=%di"), filter="nothing == 1")
    both = Wanted(definitions=[read("p:w vfs_write"), late])
    _change(planner, both)
    planner.use(_loaded(made))

    prepared = _change(planner, both)

    assert len(prepared.errors) == 1
    assert (_events(prepared.new), prepared.waiting) == ([], [])
    assert _change(planner, both).errors == ()


def test_what_is_over_a_limit_is_not_armed_when_its_module_comes_and_once_when_it_may_be() -> None:
    made = _guest()
    planner, _ = _watched(made)
    both = wanted("p:f absent:f+1", "p:w vfs_write")
    _change(planner, both)
    over = replace(both, over_limit=frozenset({1}))
    # It waits, and is over a limit: as when its module goes in a storm.
    assert _change(planner, over).waiting == []
    planner.use(_loaded(made))

    assert ["f"] not in _events(_change(planner, over).new)
    # With what tells of modules.
    assert _events(_change(planner, both).new) == [[], ["f"]]
    assert _change(planner, both).new == ()


def test_what_is_deleted_while_it_is_over_a_limit_does_not_come_again() -> None:
    made = _guest()
    planner, _ = _watched(made)
    both = wanted("p:a vfs_write", "p:b vfs_write")
    _change(planner, both)
    over = replace(both, over_limit=frozenset({1}))
    _change(planner, over)
    left = replace(over, definitions=both.definitions[1:])
    _change(planner, left)

    again = _change(planner, replace(left, over_limit=frozenset()))

    assert (again.new, again.waiting) == ((), [])


def test_an_event_over_a_limit_leaves_its_site_to_others() -> None:
    made = _guest()
    planner, _ = _watched(made)
    both = wanted("p:a vfs_write", "p:b vfs_write")
    _change(planner, both)

    gone = _change(planner, replace(both, over_limit=frozenset({1})))
    assert (_events(gone.new), gone.ended) == ([["b"]], {1})
    again = _change(planner, both)
    assert (_events(again.new), [p.layout.event_id for p in again.come]) == ([["b", "a"]], [1])


def test_numbers_are_given_again_only_when_it_is_said_that_no_record_has_them() -> None:
    planner = Planner(_guest().guest)
    planner.resolver._new_numbers = iter(range(1, 3))  # pyright: ignore[reportPrivateUsage] - 65,535 take long
    first, second, third = (read(f"p:e{n} vfs_read") for n in range(3))
    _change(planner, Wanted(definitions=[first, second]))
    _change(planner, Wanted(definitions=[second]))
    planner.resolver.forget(first)

    with pytest.raises(RefusedError, match="at most 65,535 until a recording begins; before,"):
        planner.plan(Wanted(definitions=[second, third]))
    planner.resolver.reuse_numbers()
    prepared = planner.plan(Wanted(definitions=[second, third]))

    assert [probe.layout.event_id for probe in prepared.come] == [1]


def test_the_number_of_what_never_was_armed_is_given_again_at_once() -> None:
    planner = Planner(_guest().guest)
    planner.resolver._new_numbers = iter(range(1, 3))  # pyright: ignore[reportPrivateUsage] - 65,535 take long
    first, second, third = (read(f"p:e{n} vfs_read") for n in range(3))
    _change(planner, Wanted(definitions=[first]))
    planner.plan(Wanted(definitions=[first, second]))
    planner.resolver.forget(second, is_new=True)

    prepared = planner.plan(Wanted(definitions=[first, third]))

    assert [probe.layout.event_id for probe in prepared.come] == [2]
