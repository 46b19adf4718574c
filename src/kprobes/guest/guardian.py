"""The guardian: a process of its own that puts a guest right when its tracer dies.

It is started before the tracer first touches the guest, in its own session, with a pipe as
standard input that the tracer holds. A byte in the pipe means that the tracer has ended by itself,
and says whether anything is left to put back. The end of the pipe without one means that it died.
Where something is left the guardian connects to the stub, puts back what the journal says, and lets
the guest run; then it frees what was allocated in the guest.

It runs code from where the tracer found its own, and from no directory that somebody happens to
stand in. Its standard output is a pipe to the tracer: a line when it waits for the tracer's end,
which is waited for before anything is patched; the end of the pipe is its death, after which the
tracer goes on no longer. What puts a guest right is loaded half a second later, or when needed:
the tracer and the guest need the CPU more.
"""

import gc
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kprobes.errors import FormatError, GuestReplacedError, KprobesError, TargetError

if TYPE_CHECKING:
    # The process itself starts without it.
    from kprobes.guest.journal import Journal

_LOAD_S = 0.5
"""When its tracer has armed something, mostly."""
_ATTEMPTS, _BETWEEN_S = 5, 1.0
"""At giving the guest its memory back; its text is put back with the first."""
_START_S = 30.0
_READY = b"ready\n"
_DONE, _LEFT = b"q", b"l"
_MAX_SAID = 1 << 16
_START = """
import sys
name, target, journal, *sys.path = sys.argv[1:]
from importlib import import_module
sys.exit(import_module(name).main(target, journal))
"""
_GUARDIAN = "the guardian, which puts the guest right if kprobe is killed,"
_NOT_STARTED = f"{_GUARDIAN} does not start"
_ENDED = "tracing has ended and the guest is as before"


class Guardian:
    """A tracer's end of the pipes."""

    def __init__(self, target: str, journal: "Journal") -> None:
        """Start the process that watches over us; a path in ``target`` is absolute."""
        self._journal = journal
        self._is_dismissed = False
        self._watcher: threading.Thread | None = None
        # It is ready, or has failed to start: see _failure.
        self._has_answered = threading.Event()
        self._failure: TargetError | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, __name__, target, str(journal.path), *_path()],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The guardian's process."""
        return self._process.pid

    def watch(self, on_death: Callable[[KprobesError], None]) -> None:
        """Have its death told at once, in another thread."""
        self._watcher = threading.Thread(
            target=self._follow, args=(on_death,), name="kprobes-guardian", daemon=True
        )
        self._watcher.start()

    def await_ready(self) -> None:
        """Wait until it is ready.

        Raises:
            TargetError: it does not start.
        """
        if not self._has_answered.wait(_START_S):
            raise TargetError(f"{_NOT_STARTED}: it says nothing")
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.dismiss()

    def dismiss(self) -> None:
        """Say that we have ended: the guest needs nothing any more, or what the journal says."""
        self._is_dismissed = True
        if not self._has_answered.is_set():
            # Nothing was written: it would find nothing to do when it has started.
            self._process.kill()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(_DONE if self._journal.is_done else _LEFT)
            self._process.stdin.close()
        self._process.wait()
        if self._watcher is not None:
            self._watcher.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _follow(self, on_death: Callable[[KprobesError], None]) -> None:
        assert self._process.stdout is not None
        said = b""
        while more := self._process.stdout.read(_MAX_SAID):
            said = (said + more)[-_MAX_SAID:]
            if _READY in said:
                said = said.partition(_READY)[2]
                self._has_answered.set()
        why = said.decode(errors="replace").strip().rpartition("\n")[2]
        if self._has_answered.is_set():
            end = f"has ended: {why}; {_ENDED}" if why else f"was killed itself: {_ENDED}"
            death = TargetError(f"{_GUARDIAN} {end}; start it again")
        else:
            self._failure = death = TargetError(f"{_NOT_STARTED}: {why or 'it says nothing'}")
            self._has_answered.set()
        if not self._is_dismissed:
            on_death(death)


def _path() -> list[str]:
    # As we found our own modules, whatever PYTHONPATH or --user say; but not where somebody stands.
    own = str(Path(__file__).parents[3])
    return [own, *(each for each in sys.path if Path(each).is_absolute() and each != own)]


def _load() -> None:
    # What putting right needs and waiting does not, before it is in a hurry.
    try:
        for name in ("guest.rescue", "guest.recovery", "transport.find_ram"):
            importlib.import_module(f"kprobes.{name}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever modules do when loaded
        # The tracer must hear of it while it lives.
        os.write(1, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


def main(target: str, journal: str) -> int:
    """Wait for the tracer's end and act on it."""
    # Tens of thousands of undos are read at once while the guest stands still.
    gc.disable()
    with suppress(BrokenPipeError):
        # A tracer that is dead already is what we are for.
        os.write(1, _READY)
    loading = threading.Timer(_LOAD_S, _load)
    loading.daemon = True
    loading.start()
    last = sys.stdin.buffer.read(1)
    if last == _DONE:
        return 0
    from kprobes.guest.rescue import rescue

    for _ in range(_ATTEMPTS):
        try:
            rescue(target, Path(journal), was_killed=not last)
        except GuestReplacedError:
            return 0
        except TargetError:
            # A task was still in the code, or none could make the call: the guest goes on.
            time.sleep(_BETWEEN_S)
        except (KprobesError, FormatError):
            break
        else:
            return 0
    # The journal stays for `kprobe restore`, which can tell somebody.
    return 1
