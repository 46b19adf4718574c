"""Giving a guest its ftrace records and memory back when the tracer that had them is dead."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kprobes.arch.registry import machine_of_stub
from kprobes.drivers.guest.attach import Access, look
from kprobes.drivers.guest.borrow import Landing, stopping_at
from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.identity import check, check_stopped
from kprobes.drivers.guest.lending import settle
from kprobes.drivers.guest.records import Records, paused_between_changes
from kprobes.drivers.guest.stopped import StoppedMemory
from kprobes.drivers.journal import Journal, Undo
from kprobes.drivers.loans import Ledger
from kprobes.drivers.rollback import roll_back
from kprobes.errors import TargetError
from kprobes.transport.stub import Stub
from kprobes.units import Addr

_LATE_S = 2.0
"""For a call whose tracer was killed: it may have come back before, and nobody has seen it."""


def reclaim(
    stub: Stub, journal: Journal, records: Sequence[Undo], *, image: str
) -> tuple[int, int]:
    """Give back what a journal says is lent; the guest, which is stopped, runs again afterwards.

    Args:
        stub: of the guest, whose text is as it was before.
        journal: of the dead tracer.
        records: what it wrote to those of the guest's ftrace.
        image: of the kernel, or "".

    Returns:
        How many records were put back, and bytes given back. None are where nothing proves that
        the guest still lends them.

    Raises:
        GuestReplacedError: it was rebooted meanwhile, or restored to an earlier state.
        KprobesError: the guest is not understood, a task sleeps in the code, or none could be
            borrowed; the journal tells what is still lent.
    """
    ledger = journal.ledger
    # Before the guest runs: who comes back is seen only while somebody waits.
    is_seen = _finish_call(stub, ledger)
    is_known = is_seen or journal.mark_place is not None
    guest = look(stub, Access(image=Path(image) if image else None))
    journal.watch(partial(check, journal, guest.memory.ram.read))
    if not is_known:
        return 0, 0
    count = _put_back(guest, journal, records) if records else 0
    memory = ledger.memory
    settle(guest, ledger)
    return count, memory


def _put_back(guest: Guest, journal: Journal, records: Sequence[Undo]) -> int:
    ram = guest.memory.ram
    memory = StoppedMemory(guest.stub, ram)
    memory.note_data(undo.phys for undo in records)
    with paused_between_changes(guest):
        check_stopped(journal, guest.stub, ram)
        those = Records(guest, memory)
        count = roll_back(those.settled(records), memory)
        those.make_calls(records)
        return count


def _finish_call(stub: Stub, ledger: Ledger) -> bool:
    """Wait for the call that a tracer died in, and note its result; whether there was one."""
    call = ledger.call
    if call is None:
        return False
    facts = machine_of_stub(stub.architecture).borrowing
    place = Addr(call.landing)
    landing = Landing(debugger=stub, place=place, frame=call.frame, facts=facts)
    try:
        with stopping_at(stub, landing.place):
            back = landing.look() or landing.wait(call.number, _LATE_S)
    except TargetError:
        ledger.end(0)
        return False
    if call.number in (None, back.number):
        ledger.end(back.result)
    else:
        # It stands there since the call before: its tracer died when it had noted this one.
        ledger.cancel()
    return True
