"""Small static programs for a guest: system calls, many of one, or some that go deep."""

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

PAGE = 4096
BASE = 0x400000
"""Where a program is; in front of it memory is not mapped."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_START = _HEADER.size + _SEGMENT.size
_EPOLL_CTL_ADD = 1
_READ, _PRIVATE, _FIXED, _HERE, _FILE = 1, 2, 16, -100, 3
"""PROT_READ, MAP_PRIVATE, MAP_FIXED, AT_FDCWD, and the first descriptor that is free."""
Call = tuple[str, *tuple[int, ...]]
"""A system call by name, and up to six arguments."""


class _Isa(ABC):
    """The few instructions that these programs need.

    Attributes:
        elf: the machine's number in ELF files.
        numbers: of system calls.
        registers: of a call's number, and of its arguments.
        kept: three registers that calls leave alone.
        result: of a call.
        frame: the register that points to the frame.
        call: the instruction.
        enter, leave: what a function begins and ends with that has a frame.
    """

    elf: int
    numbers: ClassVar[Mapping[str, int]]
    registers: tuple[int, ...]
    kept: tuple[int, int, int]
    result: int
    frame: int
    call: bytes
    enter: bytes
    leave: bytes

    @abstractmethod
    def load(self, to: int, value: int) -> bytes:
        """Load a number of 64 bits."""

    @abstractmethod
    def copy(self, to: int, source: int) -> bytes:
        """Copy a register."""

    @abstractmethod
    def count_down(self, counter: int, loop: bytes) -> bytes:
        """Return the end of a loop: one less, and back to its start unless that is 0."""

    @abstractmethod
    def count_zero(self, counter: int) -> bytes:
        """Add one to a register if the last call has returned 0."""

    @abstractmethod
    def push_to(self, register: int, pushed: int) -> bytes:
        """Push a register and load its address."""

    @abstractmethod
    def zeroes_to(self, register: int) -> bytes:
        """Push 16 bytes of zeroes and load their address."""

    @abstractmethod
    def call_over(self, size: int) -> bytes:
        """Call what comes after the next ``size`` bytes."""

    def ask(self, name: str, *arguments: int) -> bytes:
        """Make a system call."""
        values = (self.numbers[name], *arguments)
        loads = (self.load(*pair) for pair in zip(self.registers, values, strict=False))
        return b"".join(loads) + self.call


class _Amd64(_Isa):
    elf = 62
    numbers: ClassVar[Mapping[str, int]] = {
        "read": 0,
        "write": 1,
        "mmap": 9,
        "exit": 60,
        "getppid": 110,
        "sched_get_priority_min": 147,
        "epoll_ctl": 233,
        "openat": 257,
        "epoll_create1": 291,
    }
    registers = (0, 7, 6, 2, 10, 8, 9)
    kept = (3, 12, 13)
    result = 0
    frame = 5
    call = b"\x0f\x05"
    enter = b"\x55\x48\x89\xe5"
    leave = b"\x5d\xc3"

    def load(self, to: int, value: int) -> bytes:
        return bytes((0x48 | to >> 3, 0xB8 | to & 7)) + struct.pack("<Q", value & (1 << 64) - 1)

    def copy(self, to: int, source: int) -> bytes:
        return bytes((0x48 | to >> 3 | source >> 3 << 2, 0x89, 0xC0 | (source & 7) << 3 | to & 7))

    def count_down(self, counter: int, loop: bytes) -> bytes:
        less = bytes((0x48 | counter >> 3, 0xFF, 0xC8 | counter & 7))
        return less + b"\x0f\x85" + struct.pack("<i", -len(loop) - len(less) - 6)

    def count_zero(self, counter: int) -> bytes:
        # cmp rax, 1; adc counter, 0
        return b"\x48\x83\xf8\x01" + bytes((0x48 | counter >> 3, 0x83, 0xD0 | counter & 7, 0))

    def push_to(self, register: int, pushed: int) -> bytes:
        return bytes((0x40 | pushed >> 3, 0x50 | pushed & 7)) + self.copy(register, 4)

    def zeroes_to(self, register: int) -> bytes:
        return b"\x6a\0\x6a\0" + self.copy(register, 4)

    def call_over(self, size: int) -> bytes:
        return b"\xe8" + struct.pack("<i", size)


class _Arm64(_Isa):
    elf = 183
    numbers: ClassVar[Mapping[str, int]] = {
        "epoll_create1": 20,
        "epoll_ctl": 21,
        "openat": 56,
        "read": 63,
        "write": 64,
        "exit": 93,
        "sched_get_priority_min": 126,
        "getppid": 173,
        "mmap": 222,
    }
    registers = (8, 0, 1, 2, 3, 4, 5)
    kept = (19, 20, 21)
    result = 0
    frame = 29
    call = struct.pack("<I", 0xD4000001)
    # stp x29, x30, [sp, #-16]!; mov x29, sp; and back, and ret
    enter = struct.pack("<II", 0xA9BF7BFD, 0x910003FD)
    leave = struct.pack("<II", 0xA8C17BFD, 0xD65F03C0)

    def load(self, to: int, value: int) -> bytes:
        parts = [value >> 16 * n & 0xFFFF for n in range(4)]
        words = (0xF2800000 | n << 21 | part << 5 | to for n, part in enumerate(parts))
        return struct.pack("<I", 0xD2800000 | parts[0] << 5 | to) + struct.pack("<4I", *words)[4:]

    def copy(self, to: int, source: int) -> bytes:
        return struct.pack("<I", 0xAA0003E0 | source << 16 | to)

    def count_down(self, counter: int, loop: bytes) -> bytes:
        less = 0xF1000400 | counter << 5 | counter
        return struct.pack("<II", less, 0x54000001 | (-len(loop) // 4 - 1 & 0x7FFFF) << 5)

    def count_zero(self, counter: int) -> bytes:
        # cmp x0, #1; cinc counter, counter, lo
        return struct.pack("<II", 0xF100041F, 0x9A802400 | counter * 0x10021)

    def push_to(self, register: int, pushed: int) -> bytes:
        # str pushed, [sp, #-16]!; mov register, sp
        return struct.pack("<II", 0xF81F0FE0 | pushed, 0x910003E0 | register)

    def zeroes_to(self, register: int) -> bytes:
        # stp xzr, xzr, [sp, #-16]!; mov register, sp
        return struct.pack("<II", 0xA9BF7FFF, 0x910003E0 | register)

    def call_over(self, size: int) -> bytes:
        return struct.pack("<I", 0x94000000 | size // 4 + 1)


_ISAS: dict[str, _Isa] = {"amd64": _Amd64(), "arm64": _Arm64()}


def syscalls(calls: Sequence[Call], *, size: int, tail: bytes = b"", arch: str = "amd64") -> bytes:
    """Return a program that makes some system calls, whatever they return, and exits.

    Args:
        calls: in their order.
        size: of the program, whole pages, and large enough; after them memory is not mapped.
        tail: the program's last bytes.
        arch: the guest's, by Debian's name.
    """
    isa = _ISAS[arch]
    code = b"".join(isa.ask(*call) for call in calls) + isa.ask("exit", 0)
    return _headers(isa.elf, size) + code.ljust(size - _START - len(tail), b"\0") + tail


def program(code: bytes, *, arch: str = "amd64") -> bytes:
    """Return a program that is this code, at most a page."""
    return _headers(_ISAS[arch].elf, PAGE) + code.ljust(PAGE - _START, b"\0")


def counting_loop(call: str, times: int, *, arch: str = "amd64") -> bytes:
    """Return a program that makes a system call with ``times``, then one less, to 1."""
    isa = _ISAS[arch]
    number, argument, *_ = isa.registers
    counter = isa.kept[0]
    loop = isa.load(number, isa.numbers[call]) + isa.copy(argument, counter) + isa.call
    code = isa.load(counter, times) + loop + isa.count_down(counter, loop) + isa.ask("exit", 0)
    return program(code, arch=arch)


def counted_zeroes(call: str, times: int, *, arch: str = "amd64") -> bytes:
    """Return a program that makes a system call so often, and writes how often that returned 0.

    It writes a u64.
    """
    isa = _ISAS[arch]
    number, descriptor, where, size, *_ = isa.registers
    counter, zeroes, _ = isa.kept
    loop = isa.load(number, isa.numbers[call]) + isa.call + isa.count_zero(zeroes)
    code = (
        *(isa.load(zeroes, 0), isa.load(counter, times), loop, isa.count_down(counter, loop)),
        *(isa.push_to(where, zeroes), isa.load(descriptor, 1), isa.load(size, 8)),
        *(isa.load(number, isa.numbers["write"]), isa.call, isa.ask("exit", 0)),
    )
    return program(b"".join(code), arch=arch)


def nested_epolls(depth: int, *, arch: str = "amd64") -> bytes:
    """Return a program that adds an epoll to a second one, this to a third, and so on.

    At each the kernel looks for loops, from the one that is added down to the first.
    """
    isa = _ISAS[arch]
    counter, last, new = isa.kept
    number, where, what, added, event, *_ = isa.registers
    loop = (
        *(isa.ask("epoll_create1", 0), isa.copy(new, isa.result)),
        *(isa.load(number, isa.numbers["epoll_ctl"]), isa.copy(where, new)),
        *(isa.load(what, _EPOLL_CTL_ADD), isa.copy(added, last)),
        *(isa.zeroes_to(event), isa.call, isa.copy(last, new)),
    )
    body = b"".join(loop)
    head = isa.ask("epoll_create1", 0) + isa.copy(last, isa.result) + isa.load(counter, depth)
    return program(head + body + isa.count_down(counter, body) + isa.ask("exit", 0), arch=arch)


def mapping(path: str, addr: int, count: int, *, arch: str = "amd64") -> bytes:
    """Return a program that maps a file's first page so often, and then reads its input.

    Args:
        path: of the file.
        addr: where it is mapped first; the others come after it, each two pages farther.
        count: how often.
        arch: the guest's, by Debian's name.
    """
    size, name = PAGE * (1 + count // 32), path.encode() + b"\0"
    maps = [
        ("mmap", addr + 2 * n * PAGE, PAGE, _READ, _PRIVATE | _FIXED, _FILE, 0)
        for n in range(count)
    ]
    opened = ("openat", _HERE, BASE + size - len(name), 0, 0)
    return syscalls([opened, *maps, ("read", 0, BASE, 1)], size=size, tail=name, arch=arch)


def framed(call: str, depth: int, *, arch: str = "amd64") -> bytes:
    """Return a program of functions with frames, each of which calls the next, and the last asks.

    Args:
        call: the system call.
        depth: how many functions.
        arch: the guest's, by Debian's name.
    """
    return program(b"".join(_frames(call, depth, arch)), arch=arch)


def framed_functions(call: str, depth: int, *, arch: str = "amd64") -> dict[str, tuple[int, int]]:
    """Return the functions of that program, ``start``, ``outer1`` ... and ``inner``.

    Each with its address and its bytes.
    """
    found, addr = dict[str, tuple[int, int]](), BASE + _START
    names = ["start", *(f"outer{n}" for n in range(1, depth)), "inner"]
    for name, code in zip(names, _frames(call, depth, arch), strict=True):
        found[name] = addr, len(code)
        addr += len(code)
    return found


def _frames(call: str, depth: int, arch: str) -> list[bytes]:
    isa = _ISAS[arch]
    end = isa.ask("exit", 0)
    outer = isa.enter + isa.call_over(len(isa.leave)) + isa.leave
    inner = isa.enter + isa.ask(call, 0) + isa.leave
    start = isa.load(isa.frame, 0) + isa.call_over(len(end)) + end
    return [start, *([outer] * (depth - 1)), inner]


_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
SYMTAB, DYNSYM = 2, 11
"""Types of sections."""


def with_functions(
    data: bytes, functions: Mapping[str, tuple[int, int]], *, kind: int = SYMTAB
) -> bytes:
    """Return a program of these with a table of functions, of addresses and bytes by name."""
    names, table = b"\0", bytes(_SYMBOL.size)
    for name, (addr, size) in functions.items():
        table += _SYMBOL.pack(len(names), 1 << 4 | 2, 0, 1, addr, size)
        names += name.encode() + b"\0"
    at = len(data)
    sections = [
        bytes(_SECTION.size),
        _SECTION.pack(0, 1, 6, BASE, 0, at, 0, 0, 16, 0),
        _SECTION.pack(0, kind, 0, 0, at, len(table), 3, 1, 8, _SYMBOL.size),
        _SECTION.pack(0, 3, 0, 0, at + len(table), len(names), 0, 0, 1, 0),
    ]
    head = bytearray(data[: _HEADER.size])
    struct.pack_into("<Q", head, 40, at + len(table) + len(names))
    struct.pack_into("<HHH", head, 58, _SECTION.size, len(sections), 0)
    return bytes(head) + data[_HEADER.size :] + table + names + b"".join(sections)


def _headers(machine: int, size: int) -> bytes:
    # System V ABI, chapter 4 and 5: ET_EXEC, one PT_LOAD that may be read and run.
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = (0, _HEADER.size, _SEGMENT.size, 1, 0, 0, 0)
    header = _HEADER.pack(ident, 2, machine, 1, BASE + _START, _HEADER.size, 0, *sizes)
    return header + _SEGMENT.pack(1, 5, 0, BASE, BASE, size, size, PAGE)
