"""The guardian: a process of its own that puts a guest right when its tracer dies.

It is started before the tracer first touches the guest, in its own session, with a pipe as
standard input that the tracer holds. A byte in the pipe means that the tracer is done. The end
of the pipe without one means that it died. Then, and when the tracer is done but its journal is
not, the guardian connects to the stub, puts back what the journal says, and lets the guest run;
then it gives the guest back what it had lent.
"""

import gc
import importlib
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kprobes.drivers.journal import FLAGS, Entry, Journal, read
from kprobes.drivers.rollback import roll_back
from kprobes.errors import (
    FormatError,
    GuestGoneError,
    GuestReplacedError,
    KprobesError,
    TargetError,
    UnreachableError,
)
from kprobes.transport.connect import connect
from kprobes.transport.stub import Stub

_PATIENCE_S = 10.0
_PAUSE_S = 0.02
_LOAD_S = 1.0
"""Until then its tracer has better use of the CPU."""
_ATTEMPTS, _BETWEEN_S = 5, 1.0
"""At giving the guest its memory back; its text is put back with the first."""


class Guardian:
    """A tracer's end of the pipe."""

    def __init__(self, target: str, journal: Path) -> None:
        """Start the process that watches over us."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, target, str(journal)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The guardian's process."""
        return self._process.pid

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
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(b"q")
                self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Rescued:
    """What a guest has got back.

    Attributes:
        places: of its text and records that were put back.
        memory: bytes.
    """

    places: int
    memory: int


def rescue(target: str, journal: Path, *, patience_s: float = _PATIENCE_S) -> Rescued:
    """Put a guest's bytes back, let it run, and give it its memory back.

    Args:
        target: the stub's address.
        journal: that says what to put back; removed afterwards.
        patience_s: how long the stub may still serve the tracer that died.

    Raises:
        GuestReplacedError: it was rebooted, or restored to an earlier state; nothing there was
            touched, and the journal is removed.
        KprobesError: the guest cannot be reached, a place cannot be put back, or its memory
            cannot be given back; it runs then too, and the journal says what is left to do.
    """
    with _connect(target, patience_s) as stub:
        # Inside: whatever is wrong with the journal, the guest must run again.
        entry = read(journal) if journal.exists() else None
        try:
            rescued = Rescued(0, 0) if entry is None or entry.is_done else _put_right(stub, entry)
        except GuestReplacedError:
            journal.unlink()
            raise
    journal.unlink(missing_ok=True)
    return rescued


def _load() -> None:
    # What putting right needs and waiting does not, before it is in a hurry.
    importlib.import_module("kprobes.drivers.guest.reclaim")
    importlib.import_module("kprobes.transport.find_ram")


def _put_right(stub: Stub, entry: Entry) -> Rescued:
    # What finds kernels takes a while to load, and a tracer that dies early leaves nothing to do.
    from kprobes.drivers.guest.identity import check_stopped
    from kprobes.drivers.guest.stopped import StoppedMemory
    from kprobes.transport.find_ram import open_ram

    ram = open_ram(stub)
    check_stopped(entry, stub, ram)
    if entry.undos and entry.mark_place is None:
        raise TargetError("its journal does not say what proves that the guest is the same")
    memory = StoppedMemory(stub, ram)
    memory.note_data(undo.phys for undo in entry.undos if undo.what == FLAGS)
    places = roll_back(entry.undos, memory)
    return Rescued(places, 0 if entry.ledger.is_settled else _reclaim(stub, entry))


def _reclaim(stub: Stub, entry: Entry) -> int:
    from kprobes.drivers.guest.reclaim import reclaim

    return reclaim(stub, Journal.reopen(entry), image=entry.image)


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


def main() -> int:
    """Wait for the tracer's end and act on it."""
    target, journal = sys.argv[1:]
    loading = threading.Timer(_LOAD_S, _load)
    loading.daemon = True
    loading.start()
    if sys.stdin.buffer.read(1) and _is_done(Path(journal)):
        return 0
    for _ in range(_ATTEMPTS):
        try:
            rescue(target, Path(journal))
        except GuestReplacedError:
            return 0
        except TargetError:
            # Somebody was still in the code, or nobody could be borrowed: the guest goes on.
            time.sleep(_BETWEEN_S)
        except (KprobesError, FormatError):
            break
        else:
            return 0
    # The journal stays for `kprobe restore`, which can tell somebody.
    return 1


if __name__ == "__main__":
    # Tens of thousands of undos are read at once while the guest stands still.
    gc.disable()
    sys.exit(main())
