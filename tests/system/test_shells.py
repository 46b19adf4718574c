"""Manual pages, and completion typed into real shells, from the files that the wheel brings."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kprobes.cli import main
from tests.build.command import WAIT_S

# Not for a guest: `make test` installs the shells, `make check` does not.
pytestmark = pytest.mark.guest

_TOP = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
_READY = b"READY> "
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|[\r\a]")
_SHELLS = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
}
_SETUP = {
    "bash": "PS1='READY''> '; . {share}/bash-completion/completions/kprobe\n",
    "zsh": "PS1='READY''> '; fpath=({share}/zsh/site-functions $fpath); "
    "autoload -Uz compinit; compinit -u -D\n",
}
_TYPED = (
    ("kprobe doc", "kprobe doctor"),
    ("kprobe trace --call", "kprobe trace --call-duration"),
    ("kprobe trace 'p f' --filter 'x == 1' --strategy bre", "--strategy breakpoint"),
    ("kprobe status -t ho", "kprobe status -t host"),
    ("kprobe list -t host vfs_fsync_r", "kprobe list -t host vfs_fsync_range"),
    ("kprobe trace -t host 'p:sync vfs_fsync_r", "'p:sync vfs_fsync_range"),
    ("kprobe trace 'p:open f' 'p:other g' -:op", "-:open"),
)

Share = Path


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    """The files, as a wheel has them."""
    directory = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, _TOP / "tools" / "share.py", directory], check=True)
    return directory


def _needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: `make test` does that")


def _environment() -> dict[str, str]:
    found = {**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}", "TERM": "dumb"}
    return {**found, "KPROBES_TARGET": "guest"}


@contextmanager
def _shell(name: str) -> Generator[Callable[[str, bytes], bytes]]:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(_SHELLS[name][0], _SHELLS[name], _environment())

    def type_(text: str, expected: bytes) -> bytes:
        os.write(terminal, text.encode())
        shown, end = b"", time.monotonic() + WAIT_S
        while expected not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                shown = _ESCAPES.sub(b"", shown + os.read(terminal, 4096))
        return shown

    try:
        yield type_
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("shell", _SHELLS)
def test_what_is_typed_is_completed(share: Share, shell: str) -> None:
    _needs(shell)
    with _shell(shell) as type_:
        assert _READY in type_(_SETUP[shell].format(share=share), _READY)
        for typed, completed in _TYPED:
            shown = type_(f"{typed}\t", completed.encode())
            assert completed.encode() in shown, (typed, shown)
            # Ctrl-U: nothing is run.
            type_("\x15\n", _READY)


def test_fish_completes_the_same(share: Share) -> None:
    _needs("fish")
    script = share / "fish" / "vendor_completions.d" / "kprobe.fish"
    for typed, completed in _TYPED:
        command = f"source {script}; complete -C {_quoted(typed)}"

        done = subprocess.run(
            ["fish", "--no-config", "-c", command],
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
        )

        offered = {line.partition("\t")[0].rstrip() for line in done.stdout.splitlines()}
        word = completed.rpartition(" ")[2]
        assert any(each.endswith(word) for each in offered), (typed, done)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def test_each_command_has_a_manual_page_without_an_error(share: Share) -> None:
    _needs("man")
    pages = share / "man" / "man1"
    names = ["kprobe.1", *(f"kprobe-{module.NAME}.1" for module in main.COMMANDS)]

    assert sorted(path.name for path in pages.iterdir()) == sorted(names)
    for module, name in zip((main, *main.COMMANDS), names, strict=True):
        done = subprocess.run(
            ["man", "--warnings", "--encoding=UTF-8", "--local-file", pages / name],
            env={**os.environ, "MANWIDTH": "200"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        examples = module.EPILOG.removeprefix("examples:\n").partition("\n\n")[0].splitlines()
        assert all(example.strip() in done.stdout for example in examples), done.stdout
