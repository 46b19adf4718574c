"""The guest's own ftrace records of patched sites: what they must hold when the patches are gone.

A patched site's record is marked disabled, and the guest's ftrace counts no tracer at it
(``skip_record()`` in kernel/trace/ftrace.c). A tracer that began meanwhile would count below zero
when it ends, and ftrace gives up for good then. So a record gets back what its tracers would have
made of it by now: their number, and whether one of them has all registers saved. Their call is made
at the guest's next change of a tracer, as between ``ftrace_hash_rec_enable()`` and
``ftrace_run_update_code()``.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest_tracers import Tracers, offsets
from kprobes.drivers.journal import FLAGS, Undo
from kprobes.drivers.rollback import PhysicalMemory
from kprobes.units import Phys

_IP = 8
"""Bytes from a record's address of its site to its flags."""
_COUNT = (1 << 16) - 1
"""Of the flags, what counts tracers; the kernel has some bits more for it."""
_REGS = 1 << 30
"""FTRACE_FL_REGS: a tracer has all registers saved. Same bit from 5.10 to 7.x."""


_CHANGE_S = 1.0
"""A task that changes tracers may be preempted, but not for long."""
_BETWEEN_S = 0.002


@contextmanager
def paused_between_changes(guest: Guest) -> Generator[None]:
    """Stop a guest that is not just about to change its own tracers, if that is to be had."""
    # Before it stands still; its memory is read only then, as the stub tells who has ended.
    offsets(guest.kernel)
    deadline = time.monotonic() + _CHANGE_S
    while True:
        with guest.stub.paused():
            tracers = Tracers(guest.memory, guest.kernel)
            if not tracers.are_changing or time.monotonic() > deadline:
                yield
                return
        time.sleep(_BETWEEN_S)


def settled(undos: Sequence[Undo], memory: PhysicalMemory, tracers: Tracers) -> list[Undo]:
    """Return undos that give a stopped guest's ftrace records what they must hold now.

    Where it is not known who traces what, records stay disabled as long as somebody traces.
    """
    if not tracers.are_there:
        return list(undos)
    flags = [undo for undo in undos if undo.what == FLAGS]
    found = memory.read_physical_many([(Phys(undo.phys - _IP), 8) for undo in flags])
    wanted = tracers.wanted([int.from_bytes(ip, "little") for ip in found])
    new = {
        undo.phys: undo.new if users is None else _flags(undo, *users)
        for undo, users in zip(flags, wanted, strict=True)
    }
    return [undo._replace(old=new[undo.phys]) if undo.what == FLAGS else undo for undo in undos]


def _flags(undo: Undo, count: int, registers: int) -> bytes:
    if undo.old == undo.new:
        # Disabled before, so that nobody counts.
        return undo.old
    flags = int.from_bytes(undo.old, "little") & ~(_COUNT | _REGS)
    return (flags | count | (_REGS if registers else 0)).to_bytes(8, "little")
