"""Journals that killed tracers left behind: their guests are put right, and they are removed.

Giving a guest its ftrace records and memory back when the tracer that had them is dead.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from kprobes.arch.registry import machine_of_stub
from kprobes.errors import (
    GuestReplacedError,
    KprobesError,
    TargetError,
    UnreachableError,
    UsageError,
)
from kprobes.guest.allocations import AllocationLog, Kind
from kprobes.guest.armed import FLAGS, ArmedPatch
from kprobes.guest.attach import Access, identify
from kprobes.guest.ftrace_records import (
    Records,
    loaded_records,
    loaded_text,
    paused_between_changes,
)
from kprobes.guest.guest import Guest
from kprobes.guest.identity import IdentityCheck, check_stopped
from kprobes.guest.inject import ReturnTrap
from kprobes.guest.journal import Entry, Journal, entries, read
from kprobes.guest.patches import StoppedMemory, restore_text
from kprobes.guest.release import free_when_idle
from kprobes.guest.rescue import rescue
from kprobes.guest.stops import breakpoint_at
from kprobes.transport.address import is_path
from kprobes.transport.connect import parse_target
from kprobes.transport.stub import Stub
from kprobes.units import Addr

_PATIENCE_S = 2.0
_OWN_PREFIX = "kprobes-"
_UNSEARCHED = (
    "the guest's RAM can be read through its stub only, which is too slow to look for probes of a "
    "tracer whose journal is not here; run kprobes as QEMU's user"
)
_UNNOTED = (
    "it has more probes than its memory has notes of: `kprobe status --target` lists them; only "
    "the journal of its tracer, or a reboot, puts it right"
)


class Outcome(StrEnum):
    """What became of one journal."""

    RESTORED = "restored"
    GUEST_ENDED = "guest ended"
    FORGOTTEN = "forgotten"
    REPLACED = "replaced"
    STILL_TRACING = "still tracing"
    FAILED = "failed"


class Restored(Struct, frozen=True, kw_only=True):
    """One journal that was dealt with.

    Attributes:
        entry: as it was; its file is gone unless the outcome is FAILED or STILL_TRACING.
        count: places that were put back.
        memory: bytes that the guest got back.
        error: why it FAILED, or how the guest was REPLACED; else None.
    """

    entry: Entry
    outcome: Outcome
    count: int = 0
    memory: int = 0
    error: KprobesError | None = None


def of_target(found: Iterable[Entry], target: str | None) -> list[Entry]:
    """Return the journals of one target, however it is spelt; all of them for None."""
    if target is None:
        return list(found)
    address = parse_target(target)
    return [entry for entry in found if _address(entry) == address]


def restore(found: Iterable[Entry], *, patience_s: float = _PATIENCE_S) -> Iterator[Restored]:
    """Roll back every journal whose tracer is gone, the newest first.

    Args:
        found: oldest first.
        patience_s: how long a stub may be busy with a tracer that has just died.
    """
    # A later tracer may have patched over what an earlier one left.
    for entry in reversed(list(found)):
        if not entry.is_abandoned:
            yield Restored(entry=entry, outcome=Outcome.STILL_TRACING)
        elif has_ended(entry):
            entry.path.unlink(missing_ok=True)
            yield Restored(entry=entry, outcome=Outcome.GUEST_ENDED)
        else:
            yield _restore(entry, patience_s)


def restore_noted(target: str, *, patience_s: float = _PATIENCE_S) -> Iterator[Restored]:
    """Put right what tracers without a journal here have left in a guest, by their own notes.

    So it is in a guest that was put back to a snapshot with probes in it.

    Raises:
        UnreachableError: nothing answers there, or somebody else uses the stub.
        TargetError: no Linux that we understand runs there.
    """
    # What finds kernels takes a while to load, and most journals need none of it.
    from kprobes.guest.identity import read_boot
    from kprobes.guest.notes import as_journal, can_search, find_notes
    from kprobes.guest.open import attached

    # A guest that was migrated has the marks of journals that are of where it ran before.
    known = {entry.mark for entry in of_target(entries(), target)}
    with attached(target) as guest:
        if not can_search(guest):
            raise TargetError(_UNSEARCHED)
        found = [notes for notes in find_notes(guest) if notes.mark not in known]
        boot = read_boot(guest)
    for notes in found:
        entry = read(as_journal(notes, target, boot).path)
        if notes.patches is None or notes.instances is None:
            entry.path.unlink()
            yield Restored(entry=entry, outcome=Outcome.FAILED, error=TargetError(_UNNOTED))
        else:
            yield _restore(entry, patience_s)


def has_ended(entry: Entry) -> bool:
    """Whether a journal's guest was one that kprobes booted, and is gone with its directory."""
    address = _address(entry)
    if not is_path(address):
        return False
    directory = Path(address).parent
    return directory.name.startswith(_OWN_PREFIX) and not directory.exists()


def _address(entry: Entry) -> str:
    try:
        return parse_target(entry.target)
    except UsageError:
        # Nothing can have been written to such a target.
        return entry.target


def _restore(entry: Entry, patience_s: float) -> Restored:
    try:
        rescued = rescue(entry.target, entry.path, patience_s=patience_s)
    except UnreachableError as error:
        return _unreachable(entry, error)
    except GuestReplacedError as error:
        return Restored(entry=entry, outcome=Outcome.REPLACED, error=error)
    except KprobesError as error:
        return Restored(entry=entry, outcome=Outcome.FAILED, error=error)
    return Restored(
        entry=entry, outcome=Outcome.RESTORED, count=rescued.places, memory=rescued.memory
    )


def _unreachable(entry: Entry, error: UnreachableError) -> Restored:
    if not entry.is_done:
        return Restored(entry=entry, outcome=Outcome.FAILED, error=error)
    # Nothing was written to it.
    entry.path.unlink(missing_ok=True)
    return Restored(entry=entry, outcome=Outcome.FORGOTTEN)


_DONE_TWICE = frozenset({Kind.NOTIFIER, Kind.ROX})
_LATE_S = 10.0
"""For a call whose tracer was killed: it may have come back before, and nobody has seen it. What is
not waited for is the guest's no more, and a busy machine takes seconds."""


def free_after_crash(stub: Stub, entry: Entry, left: Sequence[ArmedPatch]) -> tuple[int, int]:
    """Free what a journal has as allocated; the guest, which is stopped, runs again afterwards.

    Args:
        stub: of the guest, whose text is as it was before, but for what is left.
        entry: the journal of the dead tracer.
        left: what it wrote to records of the guest's ftrace, and to text that was changed since.

    Returns:
        How many of these were put back, and bytes given back. None are where nothing proves that
        they are still allocated.

    Raises:
        GuestReplacedError: it was rebooted meanwhile, or restored to an earlier state.
        KprobesError: the guest is not understood, changed text is still there, a task sleeps in
            the code, or none could be borrowed; the journal has what is still allocated.
    """
    journal = Journal.reopen(entry)
    allocations = journal.allocations
    # Before the guest runs: who comes back is seen only while somebody waits.
    is_seen = _finish_call(stub, allocations)
    is_known = is_seen or journal.mark_place is not None
    image, symbols = (Path(name) if name else None for name in (entry.image, entry.symbols))
    guest = identify(stub, Access(image=image, symbols=symbols))
    journal.watch(IdentityCheck(journal, guest).check)
    if not is_known:
        # Nor was anything patched then.
        return 0, 0
    count = _put_back(guest, journal, left) if left else 0
    # Not before: who tries it once more must find what is left to do.
    journal.forget_undos()
    memory = allocations.memory
    free_when_idle(guest, allocations)
    return count, memory


def _put_back(guest: Guest, journal: Journal, left: Sequence[ArmedPatch]) -> int:
    ram = guest.memory.ram
    memory = StoppedMemory(guest.stub, ram)
    records = [patch for patch in left if patch.what == FLAGS]
    memory.note_data(patch.phys for patch in records)
    with paused_between_changes(guest):
        check_stopped(journal, guest.stub, ram)
        # What is not loaded any more has gone with its module: it is another's.
        count = restore_text(loaded_text([p for p in left if p.what != FLAGS], guest), memory)
        records = loaded_records(records, guest, memory)
        those = Records(guest, memory)
        count += restore_text(those.settled(records), memory)
        those.make_calls(records)
        return count


def _finish_call(stub: Stub, allocations: AllocationLog) -> bool:
    """Wait for the call that a tracer died in, and note its result; whether there was one."""
    call = allocations.call
    if call is None:
        return False
    info = machine_of_stub(stub.description.architecture).inject_ops
    place = Addr(call.trap)
    trap = ReturnTrap(
        debugger=stub, place=place, frame=call.frame, info=info, check=allocations.check
    )
    try:
        with breakpoint_at(stub, trap.place):
            returned = trap.poll() or trap.wait(call.number, _LATE_S)
    except TargetError:
        # Nobody knows whether it was made: what may be done twice is done again.
        if call.returns is not None and call.returns.kind in _DONE_TWICE:
            allocations.cancel()
        else:
            allocations.end(0)
        return False
    if call.number in (None, returned.number):
        allocations.end(returned.result)
    else:
        # It stands there since the call before: its tracer died when it had noted this one.
        allocations.cancel()
    return True
