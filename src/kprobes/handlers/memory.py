"""Memory as the task in the guest has it that a handler looks at: the kernel's and its own."""

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

from kprobes.errors import MemoryFault, RefusedError
from kprobes.ports import MappedRun, Ram, Tables, Translator
from kprobes.units import U64, Phys

MAX_STRING = 4096
"""Bytes of a string that are read unless told otherwise."""

_MAX_READ = 1 << 24
_PAGE = 4096


class TaskMemory:
    """Reads and writes by virtual address, of one address space. Implements ``ports.Memory``.

    Kernel addresses go through the kernel's own page table, all others through the task's.
    Writing is for data: code is refused, and so is what the guest may not write itself.
    """

    def __init__(self, ram: Ram, kernel: Translator, user: Translator, *, task_size: int) -> None:
        self._ram = ram
        self._kernel = kernel
        self._user = user
        self._task_size = task_size

    def read(self, addr: SupportsIndex, size: int) -> bytes:
        """Return exactly ``size`` bytes, at most 16 MiB, or raise MemoryFault."""
        if not 0 <= size <= _MAX_READ:
            raise MemoryFault(index(addr), size, "too much at once")
        return b"".join(self._ram.read(*piece) for piece in self._pieces(index(addr), size))

    def read_u8(self, addr: SupportsIndex) -> int:
        """Return the byte at an address, or raise MemoryFault."""
        return self._number(addr, 1)

    def read_u16(self, addr: SupportsIndex) -> int:
        """Return the u16 at an address, or raise MemoryFault."""
        return self._number(addr, 2)

    def read_u32(self, addr: SupportsIndex) -> int:
        """Return the u32 at an address, or raise MemoryFault."""
        return self._number(addr, 4)

    def read_u64(self, addr: SupportsIndex) -> int:
        """Return the u64 at an address, or raise MemoryFault."""
        return self._number(addr, 8)

    def string(self, addr: SupportsIndex, max_size: int = MAX_STRING) -> str:
        """Return the text up to its NUL, or ``max_size`` bytes; others than UTF-8's as escapes.

        Raises:
            MemoryFault: it does not end before memory does.
        """
        return self.c_string(addr, max_size).decode(errors="backslashreplace")

    def c_string(self, addr: SupportsIndex, max_size: int = MAX_STRING) -> bytes:
        """Return the bytes up to a NUL, or ``max_size`` of them; errors as for ``string``."""
        found, size = b"", min(max_size, _MAX_READ)
        while len(found) < size:
            at = index(addr) + len(found)
            # The next page may not be there, and need not be.
            part = self.read(at, min(size - len(found), _PAGE - at % _PAGE))
            end = part.find(b"\0")
            if end >= 0:
                return found + part[:end]
            found += part
        return found

    def write(self, addr: SupportsIndex, data: bytes) -> None:
        """Write data, in the order of its pages.

        Raises:
            MemoryFault: it is not mapped, or read-only; nothing was written.
            RefusedError: it is code.
        """
        start, at = self._checked(index(addr), len(data), "write"), 0
        self._check_is_data(start, len(data))
        for phys, step in self._pieces(start, len(data)):
            self._ram.write(phys, data[at : at + step])
            at += step

    def _number(self, addr: SupportsIndex, size: int) -> int:
        return int.from_bytes(self.read(addr, size), "little")

    def _tables(self, addr: int) -> Translator:
        return self._user if addr < self._task_size else self._kernel

    def _pieces(self, addr: int, size: int) -> list[tuple[int, int]]:
        addr = self._checked(addr, size, "read")
        tables, found, at = self._tables(addr), list[tuple[int, int]](), 0
        while at < size:
            step = min(size - at, _PAGE - (addr + at) % _PAGE)
            found.append((tables.physical(addr + at), step))
            at += step
        return found

    def _checked(self, addr: int, size: int, verb: str) -> int:
        if not 0 <= addr <= U64 + 1 - size:
            raise MemoryFault(addr, size, "no address", verb=verb)
        if addr < self._task_size < addr + size:
            raise MemoryFault(addr, size, "beyond user space", verb=verb)
        return addr

    def _check_is_data(self, addr: int, size: int) -> None:
        runs = self._tables(addr).mapped_runs(addr, addr + size) if size else ()
        if sum(run.size for run in runs) != size:
            raise MemoryFault(addr, size, verb="write")
        if any(run.is_executable for run in runs):
            # Also because a write behind QEMU's back would leave stale translated code.
            raise RefusedError(f"{addr:#x} is code: a handler may write data only")
        if not all(run.is_writable for run in runs):
            raise MemoryFault(addr, size, "read-only", verb="write")


def task_memory(kernel: Tables, *, page_table: int, task_size: int) -> TaskMemory:
    """Return the memory of the task that a page table belongs to.

    Args:
        kernel: the guest's kernel's page table.
        page_table: what the register has while the task runs.
        task_size: addresses below are user space's.
    """
    return TaskMemory(kernel.ram, kernel, kernel.of_user(page_table), task_size=task_size)


class NoUser:
    """Page tables of nobody: what is below the kernel is not there. Implements ``Translator``."""

    def physical(self, addr: int) -> Phys:
        """Raise MemoryFault."""
        raise MemoryFault(addr, 1, "user memory is a task's: use regs.user in a handler")

    def mapped_runs(self, start: int, stop: int) -> Sequence[MappedRun]:
        """Raise MemoryFault."""
        raise MemoryFault(start, stop - start, "user memory is a task's: use regs.user")
