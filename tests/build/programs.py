"""A program for a guest that makes one system call many times, and numbers the calls."""

import struct

_BASE = 0x400000
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_START = _HEADER.size + _SEGMENT.size


def counting_loop(number: int, times: int) -> bytes:
    """Return an x86-64 program that makes a system call with ``times``, then one less, to 1."""
    loop = (
        b"\xb8" + struct.pack("<I", number)  # mov eax, number
        + b"\x89\xdf"  # mov edi, ebx
        + b"\x0f\x05"  # syscall
        + b"\xff\xcb"  # dec ebx
    )  # fmt: skip
    back = struct.pack("<b", -len(loop) - 2)
    code = b"\xbb" + struct.pack("<I", times) + loop + b"\x75" + back
    return _program(code + b"\xb8\x3c\0\0\0\x31\xff\x0f\x05")  # exit(0)


def _program(code: bytes) -> bytes:
    # System V ABI, chapters 4 and 5: ET_EXEC for EM_X86_64, one PT_LOAD to be read and run.
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = (0, _HEADER.size, _SEGMENT.size, 1, 0, 0, 0)
    header = _HEADER.pack(ident, 2, 62, 1, _BASE + _START, _HEADER.size, 0, *sizes)
    size = _START + len(code)
    return header + _SEGMENT.pack(1, 5, 0, _BASE, _BASE, size, size, 4096) + code
