"""Looking at a guest beside the tracer that has its stub: through QEMU's own memory.

A stub serves one client. The tracer's journal says where the guest's RAM is in QEMU's process and
where its page table is; that is enough to read the kernel, and nothing can be written.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from kprobes.arch.registry import machine
from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.memory import GuestMemory
from kprobes.drivers.journal import Entry, Journal, Window, process_start
from kprobes.errors import TargetError
from kprobes.image.cache import KernelCache, default_root
from kprobes.image.find import find_spaces, read_kernel
from kprobes.model.kernel import Kernel
from kprobes.transport.ram import ProcessRam, ProcessRun
from kprobes.units import Phys


def point_out(guest: Guest, journal: Journal) -> None:
    """Write into a journal how others can look at its guest; nothing where they cannot."""
    host = guest.host
    if host is None:
        return
    runs = tuple((int(run.start), run.size, run.addr) for run in host.runs)
    started = process_start(host.pid)
    facts = guest.arch.machine
    journal.point(
        Window(
            pid=host.pid,
            started=started,
            runs=runs,
            arch=facts.name,
            registers=facts.paging.again(guest.tables),
        )
    )


def tracer_at_work(entries: Iterable[Entry]) -> Entry | None:
    """Return the journal of a tracer that has its guest's stub now, or None."""
    alive = (e for e in entries if not e.is_abandoned and e.window is not None)
    return next(alive, None)


@contextmanager
def overlooking(window: Window) -> Generator[tuple[GuestMemory, Kernel]]:
    """Open a guest's memory for reading, and find the kernel in it.

    Raises:
        TargetError: its QEMU has ended, is not ours to look into, or runs no Linux that we know.
    """
    if not window.started or process_start(window.pid) != window.started:
        raise TargetError(f"the guest's QEMU, process {window.pid}, has ended")
    runs = [
        ProcessRun(start=Phys(start), size=size, addr=addr) for start, size, addr in window.runs
    ]
    try:
        ram = ProcessRam(window.pid, runs)
    except (OSError, ValueError) as error:
        raise TargetError(f"QEMU, process {window.pid}, cannot be looked into: {error}") from error
    try:
        spaces = find_spaces(ram, machine(window.arch), [window.registers])
        found = read_kernel(spaces, cache=KernelCache(default_root()))
        yield GuestMemory(ram, found.tables), found.kernel
    finally:
        ram.close()
