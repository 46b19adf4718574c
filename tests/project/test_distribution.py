"""The packages of `make dist`, installed outside the repository, and the changelog."""

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

_TOP = Path(__file__).parents[2]
_VERSION: str = tomllib.loads((_TOP / "pyproject.toml").read_text())["project"]["version"]

Run = Callable[..., str]
"""Runs the installed ``kprobe`` with these words, and returns its standard output."""


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source package, the wheel from that, and install it into an empty environment."""
    made = tmp_path_factory.mktemp("made")
    _run(made, sys.executable, "-m", "build", "--no-isolation", "--outdir", made, _TOP)
    venv.create(made / "venv", with_pip=True)
    (wheel,) = made.glob("*.whl")
    _run(made, made / "venv" / "bin" / "pip", "install", "--quiet", wheel)
    return made / "venv"


@pytest.fixture
def kprobe(prefix: Path, tmp_path: Path) -> Run:
    """The command of the wheel."""
    return lambda *words: _run(tmp_path, prefix / "bin" / "kprobe", *words)


def _run(directory: Path, *command: str | Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _has_share(prefix: Path) -> bool:
    names = (
        "bash-completion/completions/kprobe",
        "man/man1/kprobe.1",
        "man/man1/kprobe-trace.1",
        "zsh/site-functions/_kprobe",
        "fish/vendor_completions.d/kprobe.fish",
    )
    return all((prefix / "share" / name).is_file() for name in names)


@pytest.mark.guest  # Not for its guest: packages come from a registry.
def test_the_wheel_has_the_version_and_the_commands(kprobe: Run) -> None:
    assert kprobe("--version") == f"kprobe {_VERSION}\n"
    assert kprobe("check", "--help").startswith("usage: kprobe check ")


@pytest.mark.guest
def test_the_wheel_brings_manual_pages_and_completion(prefix: Path) -> None:
    assert _has_share(prefix)


@pytest.mark.guest
def test_make_installs_all_of_it_where_a_packager_says(tmp_path: Path) -> None:
    staged, made = tmp_path / "staged", tmp_path / "made"

    _run(_TOP, "make", "install", f"DESTDIR={staged}", "PREFIX=/opt/k", f"DIST={made}")

    assert _has_share(staged / "opt" / "k")
    assert (staged / "opt" / "k" / "bin" / "kprobe").is_file()


@pytest.mark.guest
def test_the_wheel_traces_a_guest_without_the_repository(kprobe: Run) -> None:
    definition = "p:open do_sys_openat2 path=+0($arg2):ustring"

    shown = kprobe("trace", "--target", "guest", definition, "--", "ls /")

    assert re.search(r'ls-\d+ .* open: \(do_sys_openat2\+0x0/0x\w+\) path="/"\n', shown)


def test_the_changelog_begins_with_the_version() -> None:
    headings = re.findall(r"^## (\S+) ", (_TOP / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert headings[0] == _VERSION


def test_fragments_have_names_that_the_changelog_takes() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "next"]

    done = subprocess.run(command, cwd=_TOP, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("## next ")
