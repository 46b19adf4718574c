"""The page of results under KVM, and what is said where there is none."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.transport.qemu_command import MACHINE_TYPES
from tools.kvm import obstacle, read_results, render

NATIVE = replace(MACHINE_TYPES["amd64"], native=platform.machine())
TESTS = """
import pytest

def test_well(): pass

@pytest.mark.parametrize("n", [1, 2])
def test_not(n): assert n == 2, "one is not two\\nand never was"

@pytest.fixture
def guest(): raise RuntimeError("no guest")

def test_error(guest): pass

@pytest.mark.skip(reason="no mirror")
def test_skipped(): pass
"""


def test_the_page_has_every_file_and_what_did_not_pass(tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(TESTS)
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    subprocess.run(
        [*command, f"--rootdir={tmp_path}", f"--junitxml={report}", str(tmp_path)],
        capture_output=True,
        check=False,
    )

    page = render(["QEMU  10.0"], read_results(report)).splitlines()

    assert page[:4] == ["kprobes under KVM", "", "QEMU  10.0", ""]
    assert page[4].split() == ["passed", "failed", "skipped"]
    assert page[5].split() == ["test_made", "2", "2", "1"]
    assert page[6].split() == ["all", "2", "2", "1"]
    assert "failed test_made::test_not[1]: AssertionError: one is not two" in page
    assert 'failed test_made::test_error: failed on setup with "RuntimeError: no guest"' in page
    assert "skipped test_made::test_skipped: no mirror" in page


@pytest.mark.parametrize(
    ("has_device", "has_sign", "native", "why"),
    [
        (False, True, True, "there is no {device}"),
        (True, False, True, "opens, but there is no {sign}"),
        (True, True, False, "opens, but there is no {sign}"),
        (True, True, True, ""),
    ],
)
def test_it_is_said_why_there_is_no_kvm(
    tmp_path: Path, *, has_device: bool, has_sign: bool, native: bool, why: str
) -> None:
    device, sign = tmp_path / "kvm", tmp_path / "kvm_intel"
    for path in [device] * has_device + [sign] * has_sign:
        path.touch()
    machine = NATIVE if native else replace(NATIVE, native="sparc64")

    found = obstacle(machine, signs=[sign], device=device)

    assert why.format(device=device, sign=sign) in found
    assert bool(found) == bool(why)
