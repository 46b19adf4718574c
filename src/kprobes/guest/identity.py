"""Proof that a guest is still the one that was attached to, in the state that a journal is of.

A guest may be rebooted, and ``loadvm`` puts it back to any moment: then memory that was allocated
belongs to something else. Four things show it. The tracer, its guardian and ``kprobe restore``
check them before every write and every call:

    boot    init_task's stack canary, random at each boot, still lies where it was
    vCPUs   one of them has page tables that lead to it: a reset leaves memory as it was
    mark    16 random bytes of the session and a u64, how often its patches have changed, lie in
            the memory that was allocated; the count may be one behind, between journal and guest
    time    jiffies have not gone back: the tracer's only, who makes calls before there is a mark,
            and after it was freed
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from kprobes.arch.registry import machine_of_stub
from kprobes.errors import (
    RESTORED,
    FormatError,
    GuestReplacedError,
    MemoryFault,
    UnknownTypeError,
)
from kprobes.guest.attach import registers_of
from kprobes.guest.guest import Guest
from kprobes.guest.journal import Boot
from kprobes.model.kernel import Kernel
from kprobes.ports import Ram
from kprobes.transport.stub import Stub
from kprobes.units import Addr, Phys

_WORD = 8
REBOOTED = "the guest was rebooted"
_STILL_ARMED = f"{RESTORED}, in which it has probes of ours: `kprobe restore --target` ends them"


class Identified(Protocol):
    """A journal, as it is written or as it was read."""

    @property
    def boot(self) -> Boot | None:
        """Bytes of the guest's kernel that are random at each boot."""
        ...

    @property
    def mark(self) -> bytes:
        """Random bytes of the session."""
        ...

    @property
    def mark_place(self) -> Phys | None:
        """Where these must be in the guest, or None."""
        ...

    @property
    def state(self) -> int:
        """How often its patches have changed."""
        ...


def read_boot(guest: Guest) -> Boot:
    """Return what tells this boot of a guest from others."""
    addr = _canary(guest.kernel)
    if addr is None or not any(guest.memory.read(addr, _WORD)):
        # Where nothing is random at least the place may be.
        addr = Addr(guest.kernel.text[0])
    return Boot(addr=addr, phys=guest.memory.physical(addr), value=guest.memory.read(addr, _WORD))


def check(journal: Identified, read: Callable[[int, int], bytes]) -> None:
    """Check that a guest's memory is what a journal is of.

    Args:
        journal: whose memory it should be.
        read: returns bytes of the guest's physical memory.

    Raises:
        GuestReplacedError: it is not, so that nothing there may be touched.
    """
    _check_boot(journal, read)
    place = journal.mark_place
    if place is None:
        return
    size, before = len(journal.mark), journal.state
    found = _held(read, place, size + _WORD)
    if found[:size] != journal.mark:
        raise GuestReplacedError(RESTORED)
    # The guest hears of a state when it has begun; another thread may begin some meanwhile.
    if not before - 1 <= int.from_bytes(found[size:], "little") <= journal.state:
        raise GuestReplacedError(_STILL_ARMED)


class IdentityCheck:
    """Repeated checks of one guest while it is traced, in any thread."""

    def __init__(self, journal: Identified, guest: Guest) -> None:
        """Begin with the guest as it is now."""
        self._journal = journal
        self._read = guest.memory.ram.read
        jiffies = guest.kernel.symbols.find("jiffies_64")
        self._jiffies = None if jiffies is None else guest.memory.physical(jiffies.addr)
        self._latest = 0
        self._has_gone_back = False
        self.check()

    def check(self) -> None:
        """Check that it is still the same, and that its time has not gone back.

        Raises:
            GuestReplacedError: it is another, or another state of it.
        """
        # Before its successor is read: another thread may have seen a later one.
        latest = self._latest
        check(self._journal, self._read)
        if self._jiffies is None:
            return
        now = int.from_bytes(_held(self._read, self._jiffies, _WORD), "little")
        # It may jump ahead afterwards: QEMU's emulated TSC never goes back.
        self._has_gone_back = self._has_gone_back or now < latest
        if self._has_gone_back:
            raise GuestReplacedError(RESTORED)
        self._latest = now


def check_stopped(journal: Identified, stub: Stub, ram: Ram) -> None:
    """Check the same of a guest that stands still, and that its vCPUs run in that memory.

    Raises:
        GuestReplacedError: as for ``check``.
    """
    _check_boot(journal, ram.read)
    # The mark last, which a reset may overwrite before anything else. A second look, as a
    # ``loadvm`` may come between the looks at registers and at what they lead to.
    boot = journal.boot
    if boot is not None and not any(_is_mapped(boot, stub, ram) for _ in range(2)):
        raise GuestReplacedError(REBOOTED)
    check(journal, ram.read)


def _check_boot(journal: Identified, read: Callable[[int, int], bytes]) -> None:
    boot = journal.boot
    if boot is not None and _held(read, boot.phys, _WORD) != boot.value:
        raise GuestReplacedError(REBOOTED)


def _canary(kernel: Kernel) -> Addr | None:
    task = kernel.symbols.find("init_task")
    if task is None:
        return None
    try:
        return Addr(task.addr + kernel.offset("task_struct", "stack_canary"))
    except (UnknownTypeError, FormatError):
        return None


def _held(read: Callable[[int, int], bytes], phys: int, size: int) -> bytes:
    try:
        return read(phys, size)
    except MemoryFault:
        return bytes(size)


def _is_mapped(boot: Boot, stub: Stub, ram: Ram) -> bool:
    machine = machine_of_stub(stub.description.architecture)
    for vcpu in registers_of(stub, machine):
        for tables in machine.paging.tables(ram, vcpu):
            with suppress(MemoryFault):
                if tables.physical(boot.addr) == boot.phys:
                    return True
    return False
