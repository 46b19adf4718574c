"""Every program of docs/howto/recipes.md runs, and prints what stands below it.

Programs run in this process: ``kprobes.boot()`` attaches to a guest that all of them share. One
runs as its user would run it, and so does the one that is a test.
"""

import builtins
import lzma
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kprobes
from kprobes.open import GuestSession
from kprobes.transport.debian import kernel_image, modules_of
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.recipes import Recipe, recipes

pytestmark = pytest.mark.guest

RECIPES = recipes()
FIRST = RECIPES[0]
(OF_PYTEST,) = [recipe for recipe in RECIPES if "import pytest" in recipe.program]
OTHERS = [recipe for recipe in RECIPES if recipe not in (FIRST, OF_PYTEST)]
WORK = "while :; do cat /proc/uptime > /dev/null; sleep 0.1; done"


class WithOneGuest(ModuleType):
    """``kprobes``, but that it boots no guest where any will do."""

    def __init__(self, guest: Machine) -> None:
        super().__init__("kprobes")
        self._guest = guest

    def __getattr__(self, name: str) -> Any:
        return getattr(kprobes, name)

    def boot(self, options: MachineOptions | None = None) -> GuestSession:
        """Boot a guest, or attach to that which is there."""
        if options is not None:
            return kprobes.boot(options)
        session = kprobes.attach(str(self._guest.stub_address))
        session.machine = self._guest
        return session


def run(program: str, module: ModuleType) -> None:
    """Run a program whose ``import kprobes`` finds this."""

    def load(name: str, *others: Any) -> Any:
        return module if name == "kprobes" else __import__(name, *others)

    names = {"__builtins__": {**vars(builtins), "__import__": load}, "__name__": "__main__"}
    exec(compile(program, "recipes.md", "exec"), names)


@pytest.fixture
def directory(tmp_path: Path, guest: Machine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with what programs name: a module, and the socket of a guest's stub."""
    modules = modules_of(kernel_image())
    assert modules is not None
    (module,) = modules.rglob("dummy.ko*")
    unpacked = lzma.decompress if module.suffix == ".xz" else bytes
    (tmp_path / "dummy.ko").write_bytes(unpacked(module.read_bytes()))
    (tmp_path / "gdb.sock").symlink_to(guest.stub_address)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def working(guest: Machine) -> Generator[None]:
    """Have the guest do something, as one that somebody else has started."""
    job = guest.start(WORK)
    try:
        yield
    finally:
        job.kill()
        job.wait()


@pytest.mark.parametrize("recipe", OTHERS, ids=[recipe.name for recipe in OTHERS])
def test_a_program_prints_what_the_page_says(
    recipe: Recipe, directory: Path, guest: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    del directory
    is_others = "kprobes.attach" in recipe.program
    with working(guest) if is_others else nullcontext():
        run(recipe.program, WithOneGuest(guest))

    printed = capsys.readouterr().out
    assert recipe.matches(printed), printed


@pytest.mark.parametrize(
    ("recipe", "words"),
    [(FIRST, []), (OF_PYTEST, ["-m", "pytest", "-q", "-p", "no:cacheprovider"])],
)
def test_a_user_runs_a_program(recipe: Recipe, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / f"test_{recipe.name}.py"
    file.write_text(recipe.program)

    command = [sys.executable, *words, file]
    # Who runs these tests may have options of pytest's there.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env=env
    )

    assert recipe.matches(ran.stdout), ran.stdout + ran.stderr
