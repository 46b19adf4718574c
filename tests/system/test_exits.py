"""Ways out of real kernels' functions: single-stepped on an emulated CPU, and listed in a guest.

For the first no guest is booted, but the kernels come from where guests' kernels come from. The
same of an arm64 kernel is in test_arm64_text.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from kprobes.transport.qemu import Machine
from tests.build.json_lines import objects
from tests.build.stepping import Stepped, step_functions
from tests.system.conftest import SUITES

KPROBE = Path(sys.executable).with_name("kprobe")
KERNELS = pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)


def check(found: Stepped) -> None:
    assert not found.surprises
    # Most exits are taken at least once, or the steps prove little.
    assert found.seen > 0.8 * found.listed
    assert found.left.total() > 2 * found.functions


@pytest.mark.guest
@pytest.mark.kernels("7.x")
@KERNELS
def test_control_leaves_functions_by_listed_exits_only(suite: str) -> None:
    check(step_functions(suite, functions=30, traces=20, steps=300))


@pytest.mark.storm
@KERNELS
def test_control_leaves_many_functions_by_listed_exits_only(suite: str) -> None:
    check(step_functions(suite, functions=1500, traces=30, steps=300, seed=99))


@pytest.mark.guest
@pytest.mark.arches("amd64", "arm64")
def test_functions_of_a_running_guest_are_classified(guest: Machine) -> None:
    command = [KPROBE, "list", "--exits", "vfs_*", "--format", "json"]
    done = subprocess.run(
        [*command, "--target", f"qemu:{guest.stub_address}"],
        capture_output=True,
        timeout=120,
        check=True,
    )
    found = {line["function"]: line for line in objects("exits", done.stdout)}

    assert len(found) > 50
    assert {"retinsn"} <= {line["class"] for line in found.values()} <= {"retinsn", "tail"}
    assert {e["kind"] for e in found["vfs_read"]["exits"]} == {"return"}
    assert b"(0.0%)" in done.stderr
