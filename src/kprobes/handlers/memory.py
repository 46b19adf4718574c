"""Memory as the task in the guest has it that a handler looks at: the kernel's and its own.

A type and the bits of a number to Python's integers, and back.
"""

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

from kprobes.errors import MemoryFault, RefusedError, UnknownTypeError
from kprobes.model.kernel import CType, TypeKind, Types
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
        pieces = self._pieces(index(addr), size)
        if len(pieces) == 1:
            return self._ram.read(*pieces[0])
        return b"".join(self._ram.read(*piece) for piece in pieces)

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
        if 0 < size <= _PAGE - addr % _PAGE:
            return [(tables.physical(addr), size)]
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


_BOOL = "_Bool"
NUMBERS = (TypeKind.INT, TypeKind.ENUM, TypeKind.POINTER)
"""What is a number in memory and in a register."""


class Enumerator(int):
    """A value of an enum: a number that knows its name.

    Attributes:
        name: of the enumerator, or "" when none has this value.
    """

    name: str

    def __new__(cls, value: int, name: str) -> "Enumerator":
        """Return the number with its name."""
        made = super().__new__(cls, value)
        made.name = name
        return made

    def __repr__(self) -> str:
        return f"<{self.name}: {int(self)}>" if self.name else str(int(self))


def number(types: Types, ctype: CType, raw: int) -> int:
    """Return what the bits of a number mean: an int, a bool or an Enumerator.

    Args:
        types: the kernel's.
        ctype: INT or ENUM.
        raw: at least the type's bits; those above are ignored.
    """
    if ctype.kind is TypeKind.ENUM:
        return _enumerator(types, ctype, raw)
    bits = ctype.bits or 8 * ctype.size
    value = cut(raw >> ctype.bit_offset, bits, is_signed=ctype.is_signed)
    return bool(value) if ctype.name == _BOOL else value


def bit_field(types: Types, ctype: CType, raw: int, bits: int) -> int:
    """Return what a bit-field means whose lowest bit is the lowest of ``raw``."""
    value = cut(raw, bits, is_signed=ctype.is_signed)
    if ctype.kind is TypeKind.ENUM:
        return _enumerator(types, ctype, value)
    return bool(value) if ctype.name == _BOOL else value


def cut(raw: int, bits: int, *, is_signed: bool) -> int:
    """Return the lowest bits as a number."""
    value = raw & (1 << bits) - 1
    return value - (1 << bits) if is_signed and value >> (bits - 1) else value


def pattern(value: int, bits: int) -> int:
    """Return the bits that hold a number, signed or not.

    Raises:
        OverflowError: it does not fit.
    """
    if not -(1 << bits - 1) <= value < 1 << bits:
        raise OverflowError(f"{value:#x} does not fit into {bits} bits")
    return value & (1 << bits) - 1


def check_number(types: Types, ctype: CType) -> None:
    """Refuse what is not a number.

    Raises:
        UnknownTypeError: an aggregate, an array, or what has no size.
    """
    if ctype.kind not in NUMBERS or ctype.size == 0:
        raise UnknownTypeError(f"{types.type_name(ctype.number)} is not a number")


def _enumerator(types: Types, ctype: CType, raw: int) -> Enumerator:
    bits = 8 * ctype.size
    raw &= (1 << bits) - 1
    named = types.enumerators(ctype.number)
    for value, name in named:
        if value & (1 << bits) - 1 == raw:
            return Enumerator(value, name)
    is_signed = any(value < 0 for value, _ in named)
    return Enumerator(cut(raw, bits, is_signed=is_signed), "")
