"""The guardian: a process of its own that puts a guest right when its tracer dies.

It is started before the tracer first touches the guest, in its own session, with a pipe as
standard input that the tracer holds. A byte in the pipe means that the tracer is done. The end
of the pipe without one means that it died. Then, and when the tracer is done but its journal is
not, the guardian connects to the stub, puts back what the journal says, and lets the guest run;
then it frees what was allocated in the guest.

It runs code from where the tracer found its own, and from no directory that somebody happens to
stand in. Its standard output is a pipe to the tracer: a line when it is ready, which is waited for
before anything is patched; the end of the pipe is its death, after which the tracer goes on no
longer.
"""

import gc
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct

from kprobes.errors import (
    FormatError,
    GuestGoneError,
    GuestReplacedError,
    KprobesError,
    TargetError,
    UnreachableError,
)
from kprobes.guest.armed import FLAGS, ArmedPatch, lasting
from kprobes.guest.journal import Entry, read
from kprobes.guest.patches import check_unchanged, put_back
from kprobes.transport.connect import connect
from kprobes.transport.stub import Stub

_PATIENCE_S = 10.0
_PAUSE_S = 0.02
_LOAD_S = 1.0
"""Until then its tracer has better use of the CPU."""
_ATTEMPTS, _BETWEEN_S = 5, 1.0
"""At giving the guest its memory back; its text is put back with the first."""
_START_S = 30.0
_READY = b"ready\n"
_MAX_SAID = 1 << 16
_START = """
import sys
name, target, journal, *sys.path = sys.argv[1:]
from importlib import import_module
sys.exit(import_module(name).main(target, journal))
"""
_NOT_STARTED = "the guardian, which puts the guest right if kprobe is killed, does not start"
_DEAD = (
    "the guardian, which puts the guest right if kprobe is killed, was killed itself: "
    "tracing has ended and the guest is as before; start it again"
)


class Guardian:
    """A tracer's end of the pipes."""

    def __init__(self, target: str, journal: Path) -> None:
        """Start the process that watches over us; a path in ``target`` is absolute."""
        self._is_dismissed = False
        self._watcher: threading.Thread | None = None
        # It is ready, or has failed to start: see _failure.
        self._has_answered = threading.Event()
        self._failure: TargetError | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, __name__, target, str(journal), *_path()],
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
        """Wait until it is ready, which takes longer than to look at a guest.

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
        """Say that we are done: the guest needs nothing any more."""
        self._is_dismissed = True
        if not self._has_answered.is_set():
            # Nothing was written: it would find nothing to do when it has loaded.
            self._process.kill()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(b"q")
            self._process.stdin.close()
        self._process.wait()
        if self._watcher is not None:
            self._watcher.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _follow(self, on_death: Callable[[KprobesError], None]) -> None:
        assert self._process.stdout is not None
        said, death = b"", TargetError(_DEAD)
        while more := self._process.stdout.read(_MAX_SAID):
            said = (said + more)[-_MAX_SAID:]
            if _READY in said:
                self._has_answered.set()
        if not self._has_answered.is_set():
            why = said.decode(errors="replace").strip().rpartition("\n")[2]
            self._failure = death = TargetError(f"{_NOT_STARTED}: {why or 'it says nothing'}")
            self._has_answered.set()
        if not self._is_dismissed:
            on_death(death)


def _path() -> list[str]:
    # As we found our own modules, whatever PYTHONPATH or --user say; but not where somebody stands.
    own = str(Path(__file__).parents[3])
    return [own, *(each for each in sys.path if Path(each).is_absolute() and each != own)]


class Rescued(Struct, frozen=True):
    """What a guest has got back.

    Attributes:
        places: of its text and records that were put back.
        memory: bytes.
    """

    places: int
    memory: int


def rescue(
    target: str, journal: Path, *, patience_s: float = _PATIENCE_S, was_killed: bool = True
) -> Rescued:
    """Put a guest's bytes back, let it run, and give it its memory back.

    Args:
        target: the stub's address.
        journal: that says what to put back; removed afterwards.
        patience_s: how long the stub may still serve the tracer that died.
        was_killed: whether it may have been its tracer that has left the guest stopped.

    Raises:
        GuestReplacedError: it was rebooted, or restored to an earlier state; nothing there was
            touched, and the journal is removed.
        KprobesError: the guest cannot be reached, a place cannot be put back, or its memory
            cannot be given back; it runs then too, and the journal says what is left to do.
    """
    with _connect(target, patience_s) as stub:
        # Inside: whatever is wrong with the journal, the guest must run again.
        is_stopped, stub.is_held = stub.is_held, stub.is_held and not was_killed
        entry = read(journal) if journal.exists() else None
        if entry is not None and entry.is_held:
            # By somebody else before: it is not for us to let it run.
            stub.is_held = is_stopped
        try:
            rescued = Rescued(0, 0) if entry is None or entry.is_done else _put_right(stub, entry)
        except GuestReplacedError:
            journal.unlink()
            raise
    journal.unlink(missing_ok=True)
    return rescued


def _load() -> None:
    # What putting right needs and waiting does not, before it is in a hurry.
    importlib.import_module("kprobes.guest.recovery")
    importlib.import_module("kprobes.transport.find_ram")


def _put_right(stub: Stub, entry: Entry) -> Rescued:
    # What finds kernels takes a while to load, and a tracer that dies early leaves nothing to do.
    from kprobes.guest.identity import check_stopped
    from kprobes.guest.patches import StoppedMemory
    from kprobes.transport.find_ram import open_ram

    if entry.boot is None or (entry.patches and entry.mark_place is None):
        raise TargetError("its journal does not say what proves that the guest is the same")
    ram = open_ram(stub)
    check_stopped(entry, stub, ram)
    # Text first: what its records must hold now, and whether a module is gone, is for who knows
    # the kernel.
    patches = lasting(entry.patches, entry.init_text, ram.read)
    records = [undo for undo in patches if undo.what == FLAGS]
    text = [undo for undo in patches if undo.what != FLAGS]
    places, changed = put_back(text, StoppedMemory(stub, ram))
    left = [*records, *changed]
    if entry.allocations.is_empty and not left:
        return Rescued(places, 0)
    if stub.is_held:
        if stub.has_migrated():
            # Nothing runs here any more that could give memory back, or need it.
            return Rescued(places, 0)
        check_unchanged(changed)
        raise KprobesError("the guest is paused by somebody else")
    more, memory = _free_after_crash(stub, entry, left)
    return Rescued(places + more, memory)


def _free_after_crash(stub: Stub, entry: Entry, left: Sequence[ArmedPatch]) -> tuple[int, int]:
    from kprobes.guest.recovery import free_after_crash

    return free_after_crash(stub, entry, left)


def _connect(target: str, patience_s: float) -> Stub:
    # The stub serves the dead tracer's connection until QEMU has seen its end.
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return connect(target, timeout_s=1.0)
        except (UnreachableError, GuestGoneError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def _is_done(journal: Path) -> bool:
    # A tracer whose stub fell silent is done without having put anything back.
    try:
        return not journal.exists() or read(journal).is_done
    except FormatError:
        return False


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
    was_killed = not sys.stdin.buffer.read(1)
    if not was_killed and _is_done(Path(journal)):
        return 0
    for _ in range(_ATTEMPTS):
        try:
            rescue(target, Path(journal), was_killed=was_killed)
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
