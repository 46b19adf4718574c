"""Return probes of functions, by the text of a guest: which method, and what is done where."""

import pytest

from kprobes.errors import RefusedError
from kprobes.guest.places import places_of
from kprobes.guest.returns import ReturnPlanner
from kprobes.model.plan import ReturnMethod, Role, Strategy
from kprobes.model.resolved import Resolved
from kprobes.units import Addr
from tests.build.guest import GuestWithSites
from tests.build.kernel import read
from tests.build.named_guest import make_named_guest

RETURNS = bytes.fromhex("90 c3")
"""After the site: a nop, and a return."""


def _guest(body: bytes = RETURNS) -> GuestWithSites:
    made = make_named_guest("f")
    made.guest.memory.write(Addr(made.sites[0] + 5), body.ljust(0x1B, b"\xcc"))
    return made


def _probe(made: GuestWithSites, text: str, event_id: int = 1) -> Resolved:
    return places_of(made.guest).resolve(read(text), event_id=event_id)


def _planner(
    made: GuestWithSites,
    return_method: ReturnMethod | None = None,
    strategy: Strategy | None = None,
) -> ReturnPlanner:
    return ReturnPlanner(places_of(made.guest), return_method=return_method, strategy=strategy)


def test_returns_are_probed_at_their_instructions_where_these_are_proven() -> None:
    made = _guest()
    entry = made.sites[0]

    plain, at_plain = _planner(made).plan(entry, [_probe(made, "r f")])
    kept, at_kept = _planner(made).plan(entry, [_probe(made, "r f $arg1")])

    assert plain.return_method is kept.return_method is ReturnMethod.RETINSN
    assert [(addr, each.role) for addr, each in at_plain] == [(entry + 6, Role.RETURN)]
    assert [(addr, each.role) for addr, each in at_kept] == [
        (entry, Role.ENTER),
        (entry + 6, Role.RETURN),
    ]


@pytest.mark.parametrize(
    ("return_method", "strategy"),
    [(ReturnMethod.RETHOOK, None), (None, Strategy.FTRACE)],
)
def test_they_are_taken_over_where_that_is_forced(
    return_method: ReturnMethod | None, strategy: Strategy | None
) -> None:
    made = _guest()

    returns, found = _planner(made, return_method, strategy).plan(
        made.sites[0], [_probe(made, "r f")]
    )

    assert returns.return_method is ReturnMethod.RETHOOK
    assert [(addr, each.role) for addr, each in found] == [(made.sites[0], Role.HOOK)]


def test_where_something_is_in_the_way_of_a_return_they_are_taken_over_or_refused() -> None:
    # Another function is where a jump would end.
    made = _guest(b"\x90" * 0x1A + b"\xc3")
    forced = _planner(made, ReturnMethod.RETINSN, Strategy.JUMP)
    probe = _probe(made, "r f")

    returns, _ = _planner(made, strategy=Strategy.JUMP).plan(made.sites[0], [probe])

    assert returns.return_method is ReturnMethod.RETHOOK
    with pytest.raises(RefusedError, match="f: not by retinsn: "):
        forced.plan(made.sites[0], [probe])


def test_what_was_probed_goes_on_so_unless_it_is_chosen_anew() -> None:
    made = _guest()
    first, second = _probe(made, "r:a f"), _probe(made, "r:b f", 2)
    before, _ = _planner(made, ReturnMethod.RETHOOK).plan(made.sites[0], [first])

    same, _ = _planner(made).plan(made.sites[0], [second, first], before=before, is_fresh=False)
    anew, _ = _planner(made).plan(made.sites[0], [second, first], before=before, is_fresh=True)

    assert (same.return_method, same.generation) == (ReturnMethod.RETHOOK, 1)
    assert (anew.return_method, anew.generation) == (ReturnMethod.RETINSN, 1)
    assert same.probes == anew.probes == (second, first)


def test_where_no_function_is_known_it_is_refused() -> None:
    made = _guest()
    nowhere = Addr(made.sites[0] + 0x9000)

    with pytest.raises(RefusedError, match="no function is known there"):
        _planner(made).plan(nowhere, [])


def test_the_text_of_one_time_decides() -> None:
    made = _guest()
    planner = _planner(made)
    planner.plan(made.sites[0], [_probe(made, "r f")])
    made.guest.memory.write(Addr(made.sites[0] + 6), b"\xcc")

    returns, _ = planner.plan(made.sites[0], [_probe(made, "r f $arg1")])

    assert returns.return_method is ReturnMethod.RETINSN
