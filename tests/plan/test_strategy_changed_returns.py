"""Return probes that come and go while calls of their function are in progress."""

import pytest

from kprobes.errors import RefusedError
from kprobes.model.plan import ReturnMethod, Returns
from kprobes.model.resolved import Resolved
from kprobes.plan.strategy import change_returns, make_returns
from kprobes.units import Addr
from tests.build.kernel import make_probe

FIRST, SECOND = make_probe("r f a=$arg1", event_id=1), make_probe("r f b=$arg2", event_id=2)
PLAIN = make_probe("r f", event_id=3)


def _change(returns: Returns, *probes: Resolved) -> Returns:
    return change_returns(returns, "f", returns.return_method, probes)


def test_a_probe_that_comes_later_is_not_told_by_calls_that_were_entered_before() -> None:
    before = make_returns(Addr(0x1000), ReturnMethod.RETINSN, (FIRST,))

    changed = _change(before, PLAIN, SECOND, FIRST)

    assert (before.first_generations, changed.first_generations) == ((0,), (0, 1, 0))
    assert (before.generation, changed.generation, changed.stride) == (0, 1, before.stride)
    assert changed.kept[: len(before.kept)] == before.kept
    assert len(changed.kept) == 2


def test_what_a_probe_kept_that_is_gone_stays_in_its_place() -> None:
    both = make_returns(Addr(0x1000), ReturnMethod.RETINSN, (SECOND, FIRST))

    alone = _change(both, FIRST)
    again = _change(alone, SECOND, FIRST)

    assert alone.kept == again.kept == both.kept
    assert (alone.since, again.first_generations) == ((), (2, 0))


def test_where_calls_in_progress_keep_nothing_their_instances_are_made_anew() -> None:
    before = make_returns(Addr(0x1000), ReturnMethod.RETINSN, (PLAIN,))

    changed = _change(before, FIRST, PLAIN)

    assert (changed.generation, changed.first_generations) == (1, (0, 0))
    assert changed.keeps


def test_more_than_an_instance_has_room_for_is_refused() -> None:
    before = make_returns(Addr(0x1000), ReturnMethod.RETINSN, (FIRST,))
    words = " ".join(f"a{n}=$arg{n}" for n in range(1, 7))

    with pytest.raises(RefusedError, match=r"f: probes of its returns are armed, .* delete them"):
        _change(before, make_probe(f"r f {words}", event_id=4), FIRST)
