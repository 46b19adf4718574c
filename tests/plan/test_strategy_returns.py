"""Choice of a return method: the cheapest that is proven, unless another is forced."""

import pytest

from kprobes.errors import RefusedError
from kprobes.model.plan import Exit, ExitKind, Exits, ReturnMethod, Role, Strategy, Unproven
from kprobes.model.resolved import RegisterValue
from kprobes.model.upcall import Upcall
from kprobes.plan.strategy import choose_return_method, forced_return_method, make_returns, roles
from kprobes.units import Addr
from tests.build.kernel import SITE, make_probe

RETURN = Exit(addr=Addr(SITE + 0x20), kind=ExitKind.RETURN, target=None, size=5)
JUMP = Exit(addr=Addr(SITE + 0x10), kind=ExitKind.TAIL, target=Addr(SITE + 0x900), size=5)
BRANCH = Exit(addr=Addr(SITE + 0x18), kind=ExitKind.BRANCH, target=Addr(SITE + 0x900), size=6)
PLAIN = Exits(entry=Addr(SITE), exits=(RETURN,))
TAILS = Exits(entry=Addr(SITE), exits=(JUMP, BRANCH, RETURN))
UNPROVEN = Exits(
    entry=Addr(SITE),
    exits=(RETURN,),
    why_not=Unproven(addr=Addr(SITE + 8), why="it jumps by a table"),
)
ENDLESS = Exits(entry=Addr(SITE), refusal="it never returns")


@pytest.mark.parametrize(
    ("exits", "wish", "return_method"),
    [
        (PLAIN, None, ReturnMethod.RETINSN),
        (TAILS, None, ReturnMethod.TAIL),
        (UNPROVEN, None, ReturnMethod.RETHOOK),
        (PLAIN, ReturnMethod.RETINSN, ReturnMethod.RETINSN),
        (PLAIN, ReturnMethod.TAIL, ReturnMethod.RETINSN),
        (TAILS, ReturnMethod.TAIL, ReturnMethod.TAIL),
        (PLAIN, ReturnMethod.RETHOOK, ReturnMethod.RETHOOK),
        (TAILS, ReturnMethod.RETHOOK, ReturnMethod.RETHOOK),
    ],
)
def test_the_way_is_the_cheapest_unless_a_dearer_one_is_wished_for(
    exits: Exits, wish: ReturnMethod | None, return_method: ReturnMethod
) -> None:
    assert choose_return_method("f", exits, wish) is return_method


@pytest.mark.parametrize(
    ("exits", "wish", "words"),
    [
        (
            TAILS,
            ReturnMethod.RETINSN,
            "f: not by retinsn: it is left by jumps into other functions",
        ),
        (
            UNPROVEN,
            ReturnMethod.TAIL,
            "its exits are not proven: it jumps by a table; rethook works",
        ),
        (ENDLESS, None, "f: its returns cannot be probed: it never returns"),
        (ENDLESS, ReturnMethod.RETHOOK, "it never returns"),
    ],
)
def test_a_way_that_is_not_proven_is_refused_with_the_reason(
    exits: Exits, wish: ReturnMethod | None, words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        choose_return_method("f", exits, wish)


def test_a_forced_ftrace_strategy_leaves_only_the_entry() -> None:
    assert forced_return_method(None, Strategy.FTRACE) is ReturnMethod.RETHOOK
    assert forced_return_method(ReturnMethod.TAIL, Strategy.FTRACE) is ReturnMethod.TAIL
    assert forced_return_method(None, Strategy.JUMP) is None


def test_what_several_probes_tell_of_the_entry_is_kept_once() -> None:
    probes = [make_probe("r f a=$arg1 b=+8($arg2)"), make_probe("r f c=$arg1 d=$retval")]

    returns = make_returns(Addr(SITE), ReturnMethod.RETINSN, probes)

    assert returns.kept == (RegisterValue(name="di"), RegisterValue(name="si"))
    assert returns.keeps


def test_without_entry_data_only_the_exits_are_touched() -> None:
    returns = make_returns(Addr(SITE), ReturnMethod.TAIL, [make_probe("r f $retval")])

    found = [(addr - SITE, at.role, at.is_conditional) for addr, at in roles(returns, TAILS)]

    assert found == [
        (0x10, Role.TAIL, False),
        (0x18, Role.TAIL, True),
        (0x20, Role.RETURN, False),
    ]


def test_entry_data_is_taken_at_the_entry() -> None:
    returns = make_returns(Addr(SITE), ReturnMethod.RETINSN, [make_probe("r f $arg1")])

    found = [(addr - SITE, at.role) for addr, at in roles(returns, PLAIN)]

    assert found == [(0, Role.ENTER), (0x20, Role.RETURN)]


def test_the_classic_way_touches_the_entry_only() -> None:
    returns = make_returns(Addr(SITE), ReturnMethod.RETHOOK, [make_probe("r f $retval")])

    assert [(addr, at.role) for addr, at in roles(returns, TAILS)] == [(SITE, Role.HOOK)]


def _upcall() -> Upcall:
    return Upcall(number=3, addr=Addr(SITE), is_after=False, serve=lambda _: None)


def test_what_only_python_looks_at_is_not_compiled_at_returns() -> None:
    returns = make_returns(Addr(SITE), ReturnMethod.TAIL, (), [_upcall()])

    found = [(each.role, each.is_compiled) for _, each in roles(returns, TAILS)]

    assert found == [(Role.TAIL, True), (Role.TAIL, True), (Role.RETURN, False)]
    assert all(each.returns.upcalls == returns.upcalls for _, each in roles(returns, TAILS))


def test_what_is_recorded_is_compiled_whether_python_looks_or_not() -> None:
    probes = [make_probe("r f", event_id=1, addr=Addr(SITE))]
    returns = make_returns(Addr(SITE), ReturnMethod.RETINSN, probes, [_upcall()])

    assert [each.is_compiled for _, each in roles(returns, PLAIN)] == [True]
