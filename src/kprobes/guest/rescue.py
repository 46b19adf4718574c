"""A guest whose tracer died: its bytes are put back, it runs, and it gets its memory back."""

import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from kprobes.errors import (
    GuestGoneError,
    GuestReplacedError,
    KprobesError,
    TargetError,
    UnreachableError,
)
from kprobes.guest.armed import FLAGS, ArmedPatch, lasting
from kprobes.guest.journal import Entry, read
from kprobes.guest.patches import StoppedMemory, check_unchanged, put_back
from kprobes.transport.connect import connect
from kprobes.transport.stub import Stub

_PATIENCE_S = 10.0
_PAUSE_S = 0.02


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


def _put_right(stub: Stub, entry: Entry) -> Rescued:
    # What finds kernels takes a while to load, and a tracer that dies early leaves nothing to do.
    from kprobes.guest.identity import check_stopped
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
