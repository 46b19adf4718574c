"""The real ``kprobe`` command, and what it prints."""

import os
import re
import select
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

OPEN = "p:open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring"
WAIT_S = 180.0
_KPROBE = Path(sys.executable).with_name("kprobe")
_LINE = re.compile(rb" *\S.{0,15}-\d+ +\[\d{3}\] [^ ]{5} +\d+\.\d{6}: (\w+): \(.*\).*\n")


class Command:
    """Runs ``kprobe`` with journals of its own; whatever it started ends with it."""

    def __init__(self, state: Path) -> None:
        self._environment = {**os.environ, "XDG_STATE_HOME": str(state)}
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def __call__(self, *words: str, path: str | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end."""
        return subprocess.run(
            [_KPROBE, *words],
            capture_output=True,
            env={**self._environment, **({"PATH": path} if path else {})},
            timeout=WAIT_S,
            check=False,
        )

    def start(self, *words: str, path: str | None = None) -> subprocess.Popen[bytes]:
        """Start it and leave it running."""
        process = self._undo.enter_context(
            subprocess.Popen(
                [_KPROBE, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self._environment, **({"PATH": path} if path else {})},
                # select would not see what a buffer holds.
                bufsize=0,
            )
        )
        self._undo.callback(process.kill)
        return process

    def is_idle(self, target: str) -> bool:
        """Whether nothing is patched in a guest."""
        return b"all of them idle" in self("status", "--target", target).stdout


def read_line(process: subprocess.Popen[bytes], timeout_s: float = WAIT_S) -> bytes:
    """Return the next line that a command prints; it must come."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert ready, "nothing was printed in time"
    return process.stdout.readline()


def wait_for_event(process: subprocess.Popen[bytes]) -> None:
    """Return when a command has printed an event."""
    while (line := read_line(process)).startswith(b"#"):
        pass
    assert _LINE.fullmatch(line), line or process.communicate()[1]


def wait_for_words(process: subprocess.Popen[bytes], words: bytes) -> None:
    """Return when a command has said something on its standard error; it must come."""
    assert process.stderr is not None
    said: list[bytes] = []
    while not any(words in line for line in said[-1:]):
        ready, _, _ = select.select([process.stderr], [], [], WAIT_S)
        said.append(process.stderr.readline() if ready else b"")
        assert said[-1], f"{words!r} was not said, but {said}"


def events_of(text: bytes) -> list[bytes]:
    """Return the lines of events; there must be no others but comments."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(b"#")]
    assert [line for line in lines if not _LINE.fullmatch(line)] == []
    return lines
