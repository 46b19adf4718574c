"""Ways out of functions made by hand: each kind is found, and what is not proven says why."""

import pytest

from kprobes.arch.x86_64.cfg import exits_of
from kprobes.model.kernel import Forbidden, TextPart, TextTables
from kprobes.model.plan import ExitKind, Exits, ReturnMethod
from kprobes.units import Addr
from tests.build.text import COLD, START, function, to

OUTSIDE = START + 0x10000
THUNK, RETPOLINE, PANIC, ANNEX = (START + 0x20000 + 0x40 * i for i in range(4))
TABLES = TextTables(
    has_jump_tables=False,
    returns=frozenset({THUNK}),
    indirect=frozenset({RETPOLINE}),
    no_return=frozenset({PANIC}),
)


def exits(code: str, *, cold: str = "", tables: TextTables = TABLES, name: str = "f") -> Exits:
    return exits_of(function(code, cold=cold, tables=tables, name=name), tables)


def jump(target: int, at: int, *, place: int = START) -> str:
    return "e9" + to(target, 5, place=place + at)


def call(target: int, at: int) -> str:
    return "e8" + to(target, 5, place=START + at)


def kinds(found: Exits) -> list[tuple[int, ExitKind]]:
    return [(each.addr - START, each.kind) for each in found.exits]


def why_not(found: Exits) -> str:
    assert found.return_method is ReturnMethod.RETHOOK
    assert found.why_not is not None
    return found.why_not.why


@pytest.mark.parametrize(
    ("code", "has_jump"),
    [
        ("c3" + "cc" * 4, True),
        ("c3", False),
        ("c3" + "90" * 4, False),
        ("c21000" + "cccc", True),
        ("f3c3" + "cc" * 3, True),
        (jump(THUNK, 0), True),
        ("eb" + "1e", False),
    ],
)
def test_returns_have_many_forms(code: str, *, has_jump: bool) -> None:
    near = TextTables(returns=frozenset({THUNK, START + 0x20}))

    found = exits(code, tables=near)

    assert found.return_method is ReturnMethod.RETINSN
    assert kinds(found) == [(0, ExitKind.RETURN)]
    assert found.exits[0].has_jump == has_jump
    assert bool(found.exits[0].why) != has_jump


def test_every_return_is_found_and_what_is_never_reached_is_not() -> None:
    found = exits("85c0" + "7401" + "c3" + "c3" + "c3")

    assert kinds(found) == [(4, ExitKind.RETURN), (5, ExitKind.RETURN)]


def test_a_jump_to_another_function_is_a_tail_call() -> None:
    found = exits("85c0" + "7405" + jump(OUTSIDE, 4) + "c3")

    assert found.return_method is ReturnMethod.TAIL
    assert kinds(found) == [(4, ExitKind.TAIL), (9, ExitKind.RETURN)]
    assert found.tails[0].target == OUTSIDE
    assert len(found.returns) == 1


def test_a_conditional_jump_may_be_a_tail_call() -> None:
    found = exits("0f84" + to(OUTSIDE, 6) + "c3" + "cc" * 4)

    assert kinds(found) == [(0, ExitKind.BRANCH), (6, ExitKind.RETURN)]


@pytest.mark.parametrize("code", ["ffe0" + "cc" * 3, jump(RETPOLINE, 0), "ff6008" + "cccc"])
def test_an_indirect_jump_is_a_tail_call_where_there_are_no_jump_tables(code: str) -> None:
    found = exits(code)

    assert kinds(found) == [(0, ExitKind.INDIRECT)]
    assert found.exits[0].target is None
    assert "a table" in why_not(exits(code, tables=TextTables(indirect=TABLES.indirect)))


def test_an_address_of_its_own_may_be_jumped_to() -> None:
    taken = "488d05" + to(START + 9, 7)

    assert "a table" in why_not(exits(taken + "ffe0" + "c3"))


def test_its_own_address_may_be_compared_with() -> None:
    compare = "483d" + (START & 0xFFFF_FFFF).to_bytes(4, "little").hex()

    assert exits(compare + "ffe0" + "cc" * 3).return_method is ReturnMethod.TAIL


def test_a_jump_to_its_own_entry_is_one_more_call() -> None:
    found = exits("85c0" + jump(START, 2))

    assert kinds(found) == [(2, ExitKind.TAIL)]


def test_a_loop_to_the_entry_with_something_pushed_is_none() -> None:
    assert exits("50" + "75fd" + "58" + "c3").return_method is ReturnMethod.RETINSN


def test_the_cold_part_belongs_to_the_function() -> None:
    cold = "90" + jump(START + 6, 1, place=COLD)

    found = exits("0f84" + to(COLD, 6) + "c3", cold=cold)

    assert found.return_method is ReturnMethod.RETINSN
    assert kinds(found) == [(6, ExitKind.RETURN)]


def test_a_namesakes_cold_part_does_not() -> None:
    assert kinds(exits("c3", cold="c3")) == [(0, ExitKind.RETURN)]


@pytest.mark.parametrize("end", [call(PANIC, 5), jump(PANIC, 5), "0f0b"])
def test_calls_that_never_return_end_a_path(end: str) -> None:
    found = exits("85c0" + "7401" + "c3" + end)

    assert found.return_method is ReturnMethod.RETINSN
    assert found.noreturn_sites == (START + 5,)


def test_a_last_call_of_what_may_return_is_a_gap_that_names_it() -> None:
    found = exits("85c0" + "7401" + "c3" + call(OUTSIDE, 5) + "9090")

    assert why_not(found).startswith("it is last")
    assert found.why_not is not None
    assert found.why_not.callee == OUTSIDE


def test_what_is_after_a_call_has_the_stack_that_others_bring() -> None:
    # A BUG's ud2 with nothing pushed stands before a WARN's, from where it goes on.
    code = "85c0" + "7409" + "53" + "7408" + "5b" + jump(OUTSIDE, 8) + "0f0b" + "0f0b" + "ebf4"

    found = exits(code)

    assert found.return_method is ReturnMethod.TAIL
    assert kinds(found) == [(8, ExitKind.TAIL)]


def test_a_function_that_never_returns_is_refused() -> None:
    for code in (call(PANIC, 0), "f4" + "ebfd"):
        found = exits(code)

        assert (found.return_method, found.refusal) == (ReturnMethod.REFUSED, "it never returns")
        assert found.is_endless


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("50", "it runs on into"),
        ("53" + jump(OUTSIDE, 1), "on the stack"),
        ("4883e4f0" + jump(OUTSIDE, 4), "a stack that is not known"),
        ("50" + "c3", "it returns to what the function itself has pushed"),
        ("48cf", "by another way than it came"),
        ("480f07", "by another way than it came"),
        ("cb", "by another way than it came"),
        ("cc" + "c3", "an int3"),
        ("06" + "c3", "not an instruction"),
        ("eb01" + "488d00" + "c3", "the middle of an instruction"),
        ("e800000000" + "58" + "c3", "into its own middle"),
        ("c7f8" + "00000000" + "c3", "transaction"),
    ],
)
def test_what_is_not_proven_says_why(code: str, why: str) -> None:
    assert why in why_not(exits(code))


@pytest.mark.parametrize(
    "code",
    [
        "55" + "4889e5" + "4883e4f0" + "4883ec20" + "c9",
        "55" + "4889e5" + "53" + "4883e4f0" + "488d65f8" + "5b" + "5d",
        "4c8d542408" + "4883e4f0" + "41ff72f8" + "55" + "4889e5" + "415a" + "5d" + "498d62f8",
        "4883ec18" + "4883c418",
        "4881ec00010000" + "488da42400010000",
        "55" + "4889e5" + "4883ec10" + "4889ec" + "5d",
        "9c" + "58",
        "4154" + "89fd" + "415c",
    ],
)
def test_the_stack_is_followed_through_frames(code: str) -> None:
    found = exits(code + jump(OUTSIDE, len(code) // 2))

    assert found.return_method is ReturnMethod.TAIL


def test_tables_lead_on_inside() -> None:
    tables = TextTables(exceptions={START: START + 7}, jump_labels={START + 1: START + 8})

    found = exits("90" + "0f1f440000" + "c3" + "c3" + "c3", tables=tables)

    assert [addr for addr, _ in kinds(found)] == [6, 7, 8]


def test_a_jump_label_goes_both_ways_whatever_it_is_now() -> None:
    tables = TextTables(jump_labels={START: START + 5})

    found = exits("eb03" + "90" + "90" + "c3" + "c3", tables=tables)

    assert [addr for addr, _ in kinds(found)] == [4, 5]


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        (TextTables(exceptions={START: OUTSIDE}), "the exception table leads out"),
        (TextTables(jump_labels={START: OUTSIDE}), "a jump label leads out"),
        (TextTables(static_calls=frozenset({START + 1})), "it is a static call"),
    ],
)
def test_tables_that_lead_elsewhere_are_gaps(tables: TextTables, why: str) -> None:
    assert why in why_not(exits("90" + jump(OUTSIDE, 1), tables=tables))


def test_an_annex_comes_back_or_is_left_in_common_code() -> None:
    def annexed(code: str) -> TextTables:
        part = TextPart(addr=Addr(ANNEX), code=bytes.fromhex(code))
        return TextTables(exceptions={START: ANNEX}, annexes={ANNEX: part})

    back = exits("90c3" + "c3", tables=annexed("31c0" + jump(START + 2, 2, place=ANNEX) + "06"))
    away = exits("90c3", tables=annexed("31c0" + "c3"))

    assert kinds(back) == [(1, ExitKind.RETURN), (2, ExitKind.RETURN)]
    assert back.return_method is ReturnMethod.RETINSN
    assert "other functions use" in why_not(away)


def test_what_boot_may_write_is_followed_too() -> None:
    def replaced(code: str) -> TextTables:
        part = TextPart(addr=Addr(ANNEX), code=bytes.fromhex(code))
        return TextTables(
            alternatives=((START, START + 5),), replacements={START: ((part, Addr(START + 5)),)}
        )

    jumps = jump(START + 7, 0)
    skipped = exits(jumps + "c3" + "90" + "c3", tables=replaced(""))
    led = exits("90" * 5 + "c3" + "90" + "c3", tables=replaced(jump(START + 7, 0, place=ANNEX)))
    left = exits("90" * 5 + "c3", tables=replaced(jump(OUTSIDE, 0, place=ANNEX)))

    assert [kind[0] for kind in kinds(skipped)] == [5, 7]
    assert [kind[0] for kind in kinds(led)] == [5, 7]
    assert "boot may make a way out" in why_not(left)


def test_an_iret_may_go_on_after_itself() -> None:
    after = (START + 18 & 0xFFFF_FFFF).to_bytes(4, "little").hex()
    code = "8cd0" + "50" + "54" + "4883042408" + "9c" + "50" + "68" + after + "48cf"

    found = exits(code + jump(OUTSIDE, 18))

    assert kinds(found) == [(18, ExitKind.TAIL)]
    assert found.return_method is ReturnMethod.TAIL


def test_text_that_may_carry_no_probe_is_refused() -> None:
    area = Forbidden(start=Addr(START), stop=Addr(START + 1), why="noinstr")

    assert exits("c3", tables=TextTables(forbidden=(area,))).refusal == "noinstr"
    assert exits("c3", tables=TextTables(returns=frozenset({START}))).refusal is not None
    assert exits("90" * 8).refusal == "it is not a function, only padding"


def test_our_trap_path_needs_room_for_jumps() -> None:
    assert "our own breakpoints" in why_not(exits("c3", name="notify_die"))
    assert exits("c3" + "cc" * 4, name="notify_die").return_method is ReturnMethod.RETINSN
