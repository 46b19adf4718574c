"""Second tries: what passed then is shown at the end, and counted."""

import subprocess
import sys
from pathlib import Path

_CONFTEST = Path(__file__).with_name("conftest.py")
_TESTS = """
from pathlib import Path

def test_always():
    pass

def test_at_the_second_try():
    tried = Path(__file__).with_name("tried")
    is_second = tried.exists()
    tried.touch()
    assert is_second

def test_never():
    assert False
"""


def _run(directory: Path, *options: str) -> str:
    command = (sys.executable, "-m", "pytest", "-p", "no:xdist", "--second-tries=again")
    found = subprocess.run(
        [*command, *options], cwd=directory, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, found.stderr
    return found.stdout


def test_what_passed_at_the_second_try_is_named_and_counted(tmp_path: Path) -> None:
    # As in this project: that the file exists must not hide the directory of tests from pytest.
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(_CONFTEST.read_text())
    (tmp_path / "tests" / "test_some.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")

    first, second, third = (_run(tmp_path, *each) for each in ((), ("--lf",), ()))

    name = "tests/test_some.py::test_at_the_second_try"
    assert "second try" not in first.replace("test_at_the_second_try", "")
    for shown in (second, third):
        assert f"\npassed at the second try: {name}\n" in shown
        assert "\ndefects, passed at the second try only: 1\n" in shown
