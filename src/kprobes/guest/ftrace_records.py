"""The guest's own ftrace records of patched sites: what they must hold when the patches are gone.

A patched site's record is marked disabled, and the guest's ftrace counts no tracer at it
(``skip_record()`` in kernel/trace/ftrace.c). A tracer that began meanwhile would count below zero
when it ends, and ftrace gives up for good then. So a record gets back what its tracers would have
made of it by now: their number, and whether one of them has all registers saved. Their call is made
at the guest's next change of a tracer, as between ``ftrace_hash_rec_enable()`` and
``ftrace_run_update_code()``; by us where that one may be too late.

What went with its module, or when boot was over: its records and text serve another purpose.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from kprobes.guest.armed import FLAGS, ArmedPatch, lasting
from kprobes.guest.guest import Guest
from kprobes.guest.patches import PhysicalMemory
from kprobes.guest.tracers import Tracers, offsets
from kprobes.image.module_types import module_ranges, with_loaded_modules
from kprobes.units import Addr, Phys

_IP = 8
"""Bytes from a record's address of its site to its flags."""
_COUNT = (1 << 16) - 1
"""Of the flags, what counts tracers; the kernel has some bits more for it."""
_REGS, _REGS_ENABLED, _ENABLED = 1 << 30, 1 << 29, 1 << 31
"""FTRACE_FL_REGS: a tracer has all registers saved; FTRACE_FL_REGS_EN, FTRACE_FL_ENABLED: its call
is made. Same bits from 5.10 to 7.x."""


_CHANGE_S = 1.0
"""A task that changes tracers may be preempted, but not for long."""
_BETWEEN_S = 0.002


@contextmanager
def paused_between_changes(guest: Guest) -> Generator[None]:
    """Stop a guest that is not just about to change its own tracers, if that is to be had."""
    # Its memory is read only while it stands still, as the stub tells who has ended.
    stay = when_tracers_stay(guest)
    while True:
        with guest.stub.paused():
            if stay():
                yield
                return
        time.sleep(_BETWEEN_S)


def when_tracers_stay(guest: Guest) -> Callable[[], bool]:
    """Return what tells, of a stopped guest, whether it is not just about to change its tracers.

    After a second it says so in any case.
    """
    # Before the guest stands still.
    offsets(guest.kernel)
    deadline = time.monotonic() + _CHANGE_S

    def stay() -> bool:
        are_changing = Tracers(guest.memory, guest.kernel).are_changing
        return not are_changing or time.monotonic() > deadline

    return stay


class Records:
    """Records of patched sites, in a guest that stands still."""

    def __init__(
        self, guest: Guest, memory: PhysicalMemory, tracers: Tracers | None = None
    ) -> None:
        """Look at a guest; ``memory`` is what patches are written through."""
        self._guest = guest
        self._memory = memory
        self._tracers = tracers or Tracers(guest.memory, guest.kernel)

    def settled(self, patches: Sequence[ArmedPatch]) -> list[ArmedPatch]:
        """Return undos that give records what they must hold now.

        Where it is not known who traces what, or their call is not, records stay disabled as long
        as somebody traces.
        """
        if not self._tracers.are_there:
            return list(patches)
        new = {found[0].phys: self._flags(*found) for found in self._users(patches)}
        return [
            replace(patch, old=new[patch.phys]) if patch.what == FLAGS else patch
            for patch in patches
        ]

    def make_calls(self, patches: Sequence[ArmedPatch]) -> None:
        """Make the calls of tracers that want all registers, at sites that are idle again.

        The kernel looks at such a record's flags only where its call is made: if the tracer ended
        before, one would stay, and ftrace give up for good (``ftrace_shutdown()``).
        """
        if not self._tracers.are_there:
            return
        writes: list[tuple[Phys, bytes]] = []
        for patch, site, users in self._users(patches):
            flags = self._flags(patch, site, users)
            if flags != patch.new and users is not None and users[1]:
                made = int.from_bytes(flags, "little") | _ENABLED | _REGS_ENABLED
                writes += [*self._call(site), (patch.phys, made.to_bytes(8, "little"))]
        self._memory.write_physical_many(writes)

    def _users(
        self, patches: Sequence[ArmedPatch]
    ) -> Iterator[tuple[ArmedPatch, Addr, tuple[int, bool] | None]]:
        flags = [patch for patch in patches if patch.what == FLAGS]
        found = self._memory.read_physical_many([(Phys(patch.phys - _IP), 8) for patch in flags])
        sites = [Addr(int.from_bytes(ip, "little")) for ip in found]
        return zip(flags, sites, self._tracers.wanted(sites), strict=True)

    def _flags(self, patch: ArmedPatch, site: Addr, users: tuple[int, bool] | None) -> bytes:
        if patch.old == patch.new:
            # Disabled before, so that nobody counts.
            return patch.old
        if users is None or (users[1] and not self._call(site)):
            return patch.new
        count, has_registers = users
        flags = int.from_bytes(patch.old, "little") & ~(_COUNT | _REGS)
        return (flags | count | (_REGS if has_registers else 0)).to_bytes(8, "little")

    def _call(self, site: Addr) -> list[tuple[Phys, bytes]]:
        # As ftrace_get_addr_new() has it for such a record; nothing where that is out of reach.
        caller, arch = self._guest.kernel.symbols.find("ftrace_regs_caller"), self._guest.arch
        if caller is None or abs(caller.addr - site) >= arch.reach:
            return []
        code = arch.site.branch(site, caller.addr)
        pieces = self._guest.memory.pieces(site, len(code))
        return [(phys, code[at : at + size]) for phys, at, size in pieces]


def stale_records(
    records: Sequence[tuple[Addr, ArmedPatch]], memory: PhysicalMemory
) -> list[ArmedPatch]:
    """Return the patches of what is not a record of its site any more.

    A module's records are freed with it; a moment later their page may be a page table.

    Args:
        records: sites, each with the patch of its record.
        memory: that patches are written through.
    """
    if not records:
        return []
    places = [(Phys(patch.phys - _IP), _IP) for _, patch in records]
    found = zip(records, memory.read_physical_many(places), strict=True)
    return [patch for (site, patch), ip in found if int.from_bytes(ip, "little") != site]


def loaded_records(
    records: Sequence[ArmedPatch], guest: Guest, memory: PhysicalMemory
) -> list[ArmedPatch]:
    """Return the patches of records whose sites are in the kernel or a module that is loaded.

    Args:
        records: what a dead tracer wrote to them.
        guest: that stands still.
        memory: that patches are written through.
    """
    found = memory.read_physical_many([(Phys(patch.phys - _IP), _IP) for patch in records])
    sites = [int.from_bytes(ip, "little") for ip in found]
    is_there = _are_loaded(sites, guest)
    return [patch for patch, is_loaded in zip(records, is_there, strict=True) if is_loaded]


def unloaded_text(
    patches: Sequence[ArmedPatch], guest: Guest, memory: PhysicalMemory
) -> list[ArmedPatch]:
    """Return the patches of text that is gone: by its module, changed since, or by boot.

    Args:
        patches: of text.
        guest: that stands still.
        memory: that patches are written through.
    """
    now = memory.read_physical_many([(patch.phys, len(patch.old)) for patch in patches])
    changed = [p for p, held in zip(patches, now, strict=True) if held not in (p.old, p.new)]
    there = {*loaded_text(changed, guest)}
    # What boot frees it fills with bytes that are x86's breakpoint.
    left = lasting(patches, guest.init_text, guest.memory.ram.read)
    freed = {*patches} - {*left}
    return [*freed, *(patch for patch in changed if patch not in there | freed)]


def loaded_text(patches: Sequence[ArmedPatch], guest: Guest) -> list[ArmedPatch]:
    """Return the patches of text, of a guest that stands still, that is in it by its addresses."""
    is_there = _are_loaded([patch.addr for patch in patches], guest)
    return [patch for patch, is_loaded in zip(patches, is_there, strict=True) if is_loaded]


def _are_loaded(addrs: Sequence[int], guest: Guest) -> list[bool]:
    # The kernel's own are told at once: of tens of thousands nearly all are.
    start, stop = guest.kernel.text
    if all(start <= addr < stop for addr in addrs):
        return [True] * len(addrs)
    modules = module_ranges(with_loaded_modules(guest.kernel, guest.memory))
    ranges = [(start, stop), *modules]
    init_text = guest.init_text
    if init_text is not None and not init_text.is_freed(guest.memory.ram.read):
        ranges.append((init_text.start, init_text.stop))
    return [any(start <= addr < stop for start, stop in ranges) for addr in addrs]
