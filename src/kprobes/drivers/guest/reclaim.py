"""Giving a guest its memory back when the tracer that was lent it is dead."""

from functools import partial
from pathlib import Path

from kprobes.arch.registry import machine_of_stub
from kprobes.drivers.guest.attach import Access, look
from kprobes.drivers.guest.borrow import Landing, stopping_at
from kprobes.drivers.guest.identity import check
from kprobes.drivers.guest.lending import settle
from kprobes.drivers.journal import Journal
from kprobes.drivers.loans import Ledger
from kprobes.errors import TargetError
from kprobes.transport.stub import Stub
from kprobes.units import Addr

_LATE_S = 2.0
"""For a call whose tracer was killed: it may have come back before, and nobody has seen it."""


def reclaim(stub: Stub, journal: Journal, *, image: str) -> int:
    """Give back what a journal says is lent; the guest, which is stopped, runs again afterwards.

    Args:
        stub: of the guest, whose text is as it was before.
        journal: of the dead tracer.
        image: of the kernel, or "".

    Returns:
        Bytes given back. None are where nothing proves that the guest still lends them.

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
        return 0
    memory = ledger.memory
    settle(guest, ledger)
    return memory


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
            _, result = landing.look() or landing.wait(_LATE_S)
    except TargetError:
        ledger.end(0)
        return False
    ledger.end(result)
    return True
