"""Changes of the engine, made one at a time, and whether the tests named for each fail.

tests/mutants/ has a file for each package, and there a table for each change: see ``Mutant``.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

from msgspec import Struct

TOP = Path(__file__).parent.parent
FOLDER = TOP / "tests" / "mutants"
SOURCE = Path("src") / "kprobes"
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "dist")
_OPTIONS = ("-q", "-p", "no:cacheprovider", "--timeout", "300")
# Of tests that are named without a parameter, the cases of `make test`.
_CASES = ("-m", "not matrix and not sweep and not storm and not fuzz")
_HOME = "KPROBES_MUTANTS_HOME"
"""Of a run's processes, in their environments; directories of their own they may have besides."""
_WORDS = {0: "SURVIVED", 1: "killed"}
"""By pytest's status; whatever is higher says nothing of tests."""


class Mutant(Struct, frozen=True, kw_only=True):
    """One change.

    Attributes:
        name: what it does.
        file: from src/kprobes.
        old, new: text that is there once, and what takes its place.
        tests: that fail then, as pytest names them.
        why: what a user would suffer.
    """

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    why: str

    def applied(self, text: str) -> str:
        """Return the file's text with the change.

        Raises:
            ValueError: the old text is not there, or more than once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text is in {self.file} {count} times")
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """Return all changes, by package."""
    tables = [tomllib.loads(path.read_text()) for path in sorted(FOLDER.glob("*.toml"))]
    return [Mutant(name=name, **values) for table in tables for name, values in table.items()]


class Copy:
    """A copy of the tree for tests, whose journals and caches are their own.

    Attributes:
        output: what the last ones printed.
    """

    def __init__(self, scratch: Path) -> None:
        """Copy the tree to an empty directory."""
        self._scratch = scratch
        self._tree = scratch / "tree"
        self.output = scratch / "output"
        shutil.copytree(TOP, self._tree, ignore=_LEFT_OUT)

    def status(self, mutant: Mutant) -> int:
        """Return what pytest ends with when a change is made."""
        path = self._tree / SOURCE / mutant.file
        before = path.read_text()
        try:
            _write(path, mutant.applied(before))
            return self.run(mutant.tests, "-x")
        finally:
            _write(path, before)

    def run(self, tests: Sequence[str], *options: str) -> int:
        """Return what pytest ends with; processes that its tests leave are ended."""
        # A new one: a kernel that was parsed before would hide how it is parsed now.
        home = Path(tempfile.mkdtemp(dir=self._scratch))
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        (home / "kprobes").mkdir(mode=0o700)
        (home / "kprobes" / "images").symlink_to(cache / "kprobes" / "images")
        own = dict.fromkeys(("XDG_CACHE_HOME", "XDG_STATE_HOME"), str(home))
        own |= {
            _HOME: str(home),
            "KPROBES_NO_SKIP": "1",
            "PYTHONPATH": f"{self._tree / 'src'}:{self._tree}",
        }
        with self.output.open("w") as file:
            command = [sys.executable, "-m", "pytest", *_OPTIONS, *_CASES, *options, *tests]
            done = subprocess.run(
                command, cwd=self._tree, env=os.environ | own, stdout=file, stderr=file, check=False
            )
        _end_left(home)
        return done.returncode


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # What was compiled before is told by seconds and size, which may be the same.
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _end_left(home: Path) -> None:
    # Tracers and guardians; without them their guests end by themselves.
    mark = f"{_HOME}={home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_python = (process / "exe").samefile(sys.executable)
            if is_python and mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def main() -> int:
    """Make every change and say what became of it; return 1 unless all were noticed."""
    parser = argparse.ArgumentParser(description="Make changes of the engine, one at a time.")
    known = {each.name: each for each in read_mutants()}
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=known, default=known, help="these changes only"
    )
    mutants = [known[name] for name in parser.parse_args().only]
    began, killed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="kprobes-mutants-") as scratch:
        copy = Copy(Path(scratch))
        if copy.run(sorted({test for each in mutants for test in each.tests})):
            print(f"{copy.output.read_text()}\nbefore: tests fail without any change")
            return 1
        print(f"before: all tests pass, after {time.monotonic() - began:.0f} s", flush=True)
        for each in mutants:
            status = copy.status(each)
            killed += status == 1
            print(f"{_WORDS.get(status, f'broken, {status}')}: {each.name}", flush=True)
            print(end="" if status == 1 else copy.output.read_text(), flush=True)
    print(f"{killed} of {len(mutants)} killed in {time.monotonic() - began:.0f} s")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
