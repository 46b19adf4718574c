"""Cost that something armed adds, from programs that take as long as a test says."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import cast

import pytest

from bench.guest import Rig
from bench.rounds import Turn, added, figure


class _Fake:
    # A rig that becomes slower with every run, and by what is armed.
    def __init__(self, drift: float = 0) -> None:
        self.runs = list[str]()
        self._armed, self._drift = 0.0, drift

    def run(self, name: str) -> list[float]:
        self.runs.append(name)
        ns = 300 + self._drift * len(self.runs) + self._armed
        return [ns + 9000 * (n % 2) for n in range(10)]

    @contextmanager
    def armed(self, ns: float) -> Generator[None]:
        self._armed = ns
        yield
        self._armed = 0


def _turn(rig: _Fake, ns: float, program: str = "poll") -> Turn:
    return Turn(name=f"{program} {ns}", program=program, arm=partial(rig.armed, ns))


def test_a_figure_is_a_fast_loop_s() -> None:
    assert figure(cast("Rig", _Fake()), "poll") == 300


@pytest.mark.parametrize("drift", [0, 5, -7])
def test_what_is_armed_adds_what_it_does_whatever_drifts(drift: float) -> None:
    rig = _Fake(drift)

    found = added(cast("Rig", rig), [_turn(rig, 0), _turn(rig, 40), _turn(rig, 7000)], passes=2)

    assert found == {"poll 0": 0, "poll 40": 40, "poll 7000": 7000}


def test_the_same_program_runs_right_before_and_after_each_turn() -> None:
    rig = _Fake()
    turns = [_turn(rig, 0), _turn(rig, 7, "write"), _turn(rig, 40)]

    found = added(cast("Rig", rig), turns, passes=1)

    assert rig.runs == ["poll"] * 5 + ["write"] * 3
    assert set(found) == {turn.name for turn in turns}
