"""Looking at a guest without arming anything, so that it runs on whatever becomes of us."""

from collections.abc import Generator
from contextlib import contextmanager

from kprobes.drivers.guest.attach import attach
from kprobes.drivers.guest.guardian import Guardian
from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.journal import Journal
from kprobes.transport.connect import parse_target


@contextmanager
def looking(target: str) -> Generator[Guest]:
    """Connect to a guest; it runs but while it is looked at through ``stub.paused``.

    Raises:
        UnreachableError: nothing answers there, or somebody else uses the stub.
        TargetError: no Linux that we understand runs there.
    """
    target = parse_target(target)
    journal = Journal.create(target)
    try:
        # Connecting stops the guest: if we are killed right then, somebody must let it go on.
        with Guardian(target, journal.path) as guardian:
            journal.note_guardian(guardian.pid)
            guest = attach(target)
            try:
                yield guest
            finally:
                guest.stub.detach()
    finally:
        journal.remove()
