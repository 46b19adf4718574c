"""Choice of a strategy for an instruction: the cheapest that is safe, or the one that is forced."""

from collections.abc import Set as AbstractSet

import pytest
from msgspec.structs import replace

from kprobes.errors import RefusedError
from kprobes.model.plan import Displaced, PatchOptions, Site, Strategy
from kprobes.plan.strategy import Wish, check_alone, choose
from kprobes.units import Addr
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.pages import FakeRam

AT = Addr(TEXT + 0x100)
CODE = bytes.fromhex("55 4157 4156")
ONE = Displaced(addr=AT, code=CODE[:1], count=1, stop=Addr(AT + 1))
RUN = Displaced(addr=AT, code=CODE, count=3, stop=Addr(AT + 5))
LONG = Displaced(addr=AT, code=CODE, count=1, stop=Addr(AT + 5))
NO_JUMP, NO_BREAKPOINT = "something leads into it", "it is on our trap path"
BOTH = PatchOptions(breakpoint=ONE, jump=RUN, is_boundary=True)
ONLY_BREAKPOINT = PatchOptions(breakpoint=ONE, jump=NO_JUMP, is_boundary=True)
ONLY_JUMP = PatchOptions(breakpoint=NO_BREAKPOINT, jump=RUN, is_boundary=True)
NONE = PatchOptions(breakpoint=NO_BREAKPOINT, jump=NO_JUMP, is_boundary=True)


def chosen(
    options: PatchOptions, strategy: Strategy | None = None, others: AbstractSet[int] = frozenset()
) -> Site:
    memory = FakeRam(0x1000, start=TEXT)
    memory.write(AT, CODE)
    return choose("f+0x1", options, memory, Wish(strategy=strategy, others=others))


def refused(
    options: PatchOptions, strategy: Strategy | None = None, others: AbstractSet[int] = frozenset()
) -> str:
    with pytest.raises(RefusedError) as caught:
        chosen(options, strategy, others)
    return str(caught.value)


def test_a_jump_is_cheaper_than_a_breakpoint() -> None:
    site = chosen(BOTH)

    assert (site.strategy, site.addr, site.old, site.displaced) == (Strategy.JUMP, AT, CODE, RUN)
    assert site.why


def test_where_no_jump_is_safe_there_is_a_breakpoint_and_the_reason() -> None:
    site = chosen(ONLY_BREAKPOINT)

    assert (site.strategy, site.old, site.displaced) == (Strategy.BREAKPOINT, CODE[:1], ONE)
    assert site.why == NO_JUMP


def test_where_no_breakpoint_may_be_there_is_a_jump() -> None:
    assert chosen(ONLY_JUMP).strategy is Strategy.JUMP


def test_where_nothing_is_safe_the_breakpoint_s_reason_is_told() -> None:
    assert refused(NONE) == f"f+0x1 cannot be probed: {NO_BREAKPOINT}"


@pytest.mark.parametrize(("options", "strategy"), [(BOTH, "jump"), (BOTH, "breakpoint")])
def test_what_is_forced_is_done(options: PatchOptions, strategy: str) -> None:
    assert chosen(options, Strategy(strategy)).strategy == strategy


@pytest.mark.parametrize(
    ("options", "strategy", "message"),
    [
        (BOTH, "ftrace", "f+0x1 is not an ftrace site; a jump works"),
        (ONLY_BREAKPOINT, "ftrace", "f+0x1 is not an ftrace site; a breakpoint works"),
        (NONE, "ftrace", f"f+0x1 is not an ftrace site; {NO_BREAKPOINT}"),
        (ONLY_BREAKPOINT, "jump", f"f+0x1: no jump: {NO_JUMP}; a breakpoint works"),
        (NONE, "jump", f"f+0x1: no jump: {NO_JUMP}; {NO_BREAKPOINT}"),
        (ONLY_JUMP, "breakpoint", f"f+0x1: no breakpoint: {NO_BREAKPOINT}; a jump works"),
    ],
)
def test_what_cannot_be_forced_is_refused_with_what_works(
    options: PatchOptions, strategy: str, message: str
) -> None:
    assert refused(options, Strategy(strategy)) == message


@pytest.mark.parametrize("other", [1, 4])
@pytest.mark.parametrize("jump", [RUN, LONG])
def test_no_jump_covers_where_another_probe_is(jump: Displaced, other: int) -> None:
    options = PatchOptions(breakpoint=ONE, jump=jump, is_boundary=True)

    assert chosen(options, others={AT + other}).strategy is Strategy.BREAKPOINT
    assert "cover another probe" in refused(options, Strategy.JUMP, {AT + other})


@pytest.mark.parametrize("other", [-1, 0, 5])
def test_probes_before_and_after_a_jump_do_not_matter(other: int) -> None:
    assert chosen(BOTH, others={AT + other}).strategy is Strategy.JUMP


@pytest.mark.parametrize(
    ("site", "covered"),
    [
        (chosen(BOTH), ((AT + 1, AT + 5),)),
        (chosen(PatchOptions(breakpoint=ONE, jump=LONG, is_boundary=True)), ()),
        (chosen(ONLY_BREAKPOINT), ()),
    ],
)
def test_only_after_the_first_of_several_instructions_somebody_may_be(
    site: Site, covered: tuple[tuple[int, int], ...]
) -> None:
    assert site.covered == covered


def test_two_places_are_not_patched_at_one_instruction() -> None:
    kernel = make_kernel([symbol("f", AT - 5, size=0x40)])
    after = chosen(BOTH)
    entry = replace(after, shown=Addr(AT - 5))

    check_alone(kernel.symbols, after, after)
    with pytest.raises(RefusedError, match=r"^f\+0x5/0x40 and f\+0x0/0x40 would be patched at"):
        check_alone(kernel.symbols, after, entry)
