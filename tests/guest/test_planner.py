"""Definitions to plans: globs, sites that several probes share, numbers of events."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError, NotLoadedError, RefusedError
from kprobes.guest.planner import Planner
from kprobes.model.options import Options, Wanted
from kprobes.model.plan import Plan, ReturnMethod, Role, Strategy
from kprobes.model.upcall import Upcall, WaitingVcpu
from kprobes.units import Addr
from tests.build.guest import GuestWithSites, make_guest
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

    planned = planner.plan(wanted("p vfs_*", "r:back vfs_*"))

    assert {plan.site.addr for plan in planned.new} & {made.sites[0]} == set()
    assert len(planned.left_out) >= 1
    assert "neither a nop nor a call" in str(planned.left_out[0])
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

    planned = planner.plan(both)

    assert planned.waiting == list(both.definitions[:1])
    assert [probe.layout.event_id for probe in planned.come] == [2]
    assert [plan.upcalls for plan in planned.new] == [watch, ()]
    assert planner.resolver.numbers_of(both.definitions[0]) == [1]


def test_who_waits_in_vain_goes_on_waiting() -> None:
    made = _guest()
    planner, _ = _watched(made)
    one = wanted("p absent:f")
    planner.keep(planner.plan(one), one.options)

    planner.use(made.guest)
    planned = planner.plan(one)

    assert (planned.new, planned.gone, planned.errors) == ((), (), ())
    assert planned.waiting == planner.waiting == list(one.definitions)


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
