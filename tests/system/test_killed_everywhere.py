"""Attempts to harm a guest: its tracer is killed or interrupted wherever it could hurt.

Tracers die at the first, the second and so on of some points, until one gets through.
"""

import pytest

from tests.build.harmed import ONE, TRACEPOINTS, Scene, fail_everywhere
from tests.system.conftest import LONG, ONCE

pytestmark = [
    pytest.mark.guest,
    pytest.mark.harm,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.usefixtures("well_afterwards"),
]
BOTH = f"{ONE}{TRACEPOINTS.splitlines()[0]}\n"
"""A function, and a tracepoint."""


@pytest.mark.arches("amd64")
@pytest.mark.parametrize("point", ["write", "record", "begun", "call"])
def test_killed_wherever_it_arms_and_disarms_breakpoints_it_is_rolled_back(
    scene: Scene, point: str
) -> None:
    chain = scene.callbacks()
    few = "\n".join(scene.instructions("breakpoint")[::200])

    tried = fail_everywhere(scene, point, "--strategy", "breakpoint", definitions=few)

    assert tried >= 2
    assert scene.callbacks() == chain


# On x86 breakpoints are the longer way: the same writes, and others.
@pytest.mark.arches("arm64", sweep="arm64")
def test_killed_before_each_write_of_jumps_it_is_rolled_back(scene: Scene) -> None:
    few = "\n".join(scene.instructions("jump")[::200])

    assert fail_everywhere(scene, "write", "--strategy", "jump", definitions=few) >= 9


@ONCE
def test_killed_before_each_write_to_text_it_is_rolled_back(scene: Scene) -> None:
    tried = fail_everywhere(scene, "write")

    # Code; flags and sites of three functions; and the same back.
    assert tried >= 13


@ONCE
def test_killed_before_and_after_the_journal_is_written_it_is_rolled_back(scene: Scene) -> None:
    assert fail_everywhere(scene, "record", "--cycles", "2") == 4


# On x86 breakpoints are the longer way: the same calls, and others.
@pytest.mark.arches("amd64", "arm64", matrix="amd64")
def test_killed_in_each_call_of_the_guests_functions_it_is_left_well(scene: Scene) -> None:
    # Three or more allocations, a tracepoint switched on; the same freed, and off.
    assert fail_everywhere(scene, "call", definitions=BOTH) >= 8


# The same with more of them, which takes nine minutes.
@pytest.mark.matrix
@pytest.mark.parametrize("point", ["call", "begun", "result"])
def test_killed_wherever_it_switches_tracepoints_they_are_off_again(
    scene: Scene, point: str
) -> None:
    # The kernel's text has what they are: its jumps and calls, which are checked each time.
    assert fail_everywhere(scene, point, definitions=TRACEPOINTS) >= 8


@pytest.mark.matrix
def test_interrupted_wherever_it_switches_tracepoints_they_are_off_again(scene: Scene) -> None:
    assert fail_everywhere(scene, "call", "--interrupt", definitions=TRACEPOINTS) >= 8


@ONCE
def test_killed_before_and_after_each_result_is_noted_it_is_left_well(scene: Scene) -> None:
    # Of four allocations, a tracepoint, and as many times that something is given back.
    assert fail_everywhere(scene, "result", definitions=BOTH) >= 14


# The task stands where the call before came back to: that one's result is not this one's. Killed
# there it is above, with breakpoints.
@LONG
def test_interrupted_before_each_call_of_the_guests_functions_it_is_left_well(scene: Scene) -> None:
    assert fail_everywhere(scene, "begun", "--interrupt", definitions=ONE) >= 6


@LONG
def test_interrupted_before_each_write_to_text_it_is_rolled_back_by_itself(scene: Scene) -> None:
    # Code; flags and site of one function; and the same back.
    assert fail_everywhere(scene, "write", "--interrupt", definitions=ONE) >= 5


@ONCE
def test_interrupted_in_each_call_of_the_guests_functions_it_is_left_well(scene: Scene) -> None:
    assert fail_everywhere(scene, "call", "--interrupt", definitions=BOTH) >= 8
