"""Programs for a guest to run while its kernel is probed."""

import struct
from collections.abc import Sequence

PAGE = 4096
BASE = 0x400000
"""Where a program is; in front of it memory is not mapped."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_START = _HEADER.size + _SEGMENT.size
_SYSCALL = b"\x0f\x05"
# movabs $imm64 to rax, rdi, rsi, rdx, r10, r8, r9: a system call's number and arguments.
_MOVES = (b"\x48\xb8", b"\x48\xbf", b"\x48\xbe", b"\x48\xba", b"\x49\xba", b"\x49\xb8", b"\x49\xb9")
_EXIT = 60


def syscalls(calls: Sequence[tuple[int, ...]], *, size: int, tail: bytes = b"") -> bytes:
    """Return an x86-64 program that makes some system calls, whatever they return, and exits.

    Args:
        calls: a number and up to six arguments each.
        size: of the program, whole pages, and large enough; behind them memory is not mapped.
        tail: the program's last bytes.
    """
    code = b"".join(_call(call) for call in (*calls, (_EXIT, 0)))
    return _headers(size) + code.ljust(size - _START - len(tail), b"\0") + tail


def program(code: bytes) -> bytes:
    """Return an x86-64 program of a page that is this code."""
    return _headers(PAGE) + code.ljust(PAGE - _START, b"\0")


def _call(call: tuple[int, ...]) -> bytes:
    values = zip(_MOVES, call, strict=False)
    return b"".join(move + struct.pack("<Q", v & (1 << 64) - 1) for move, v in values) + _SYSCALL


def _headers(size: int) -> bytes:
    # System V ABI, chapter 4 and 5: ET_EXEC for EM_X86_64, one PT_LOAD that may be read and run.
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = (0, _HEADER.size, _SEGMENT.size, 1, 0, 0, 0)
    header = _HEADER.pack(ident, 2, 62, 1, BASE + _START, _HEADER.size, 0, *sizes)
    return header + _SEGMENT.pack(1, 5, 0, BASE, BASE, size, size, PAGE)
