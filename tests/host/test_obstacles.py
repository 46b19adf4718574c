"""Obstacles of the machine that runs the tests, whatever it is."""

import os

import pytest

from kprobes.errors import UnreachableError
from kprobes.host.obstacles import check_host, check_possible, obstacles, words_for
from kprobes.model.finding import Severity


def test_every_obstacle_comes_with_what_to_do() -> None:
    for each in obstacles():
        assert each.found
        assert each.advice
        assert words_for(each) == f"{each.found} ({each.advice})"


def test_the_first_one_is_why_there_is_no_session() -> None:
    found = obstacles()
    if not found:
        check_possible()
        return

    with pytest.raises(UnreachableError, match="this machine's kernel cannot be probed"):
        check_possible()


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_checkup_blocks_only_where_nothing_else_will_do(*, is_wanted: bool) -> None:
    found = list(check_host(is_wanted=is_wanted))

    verdicts = {each.verdict for each in found}
    if obstacles():
        assert verdicts == {Severity.MISSING if is_wanted else Severity.NOTE}
    else:
        assert Severity.MISSING not in verdicts
        assert os.uname().release in found[0].found
