"""Programs for a guest that make system calls, one many times or some that go deep."""

import struct

_BASE = 0x400000
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_START = _HEADER.size + _SEGMENT.size
_EXIT = b"\xb8\x3c\0\0\0\x31\xff\x0f\x05"
"""mov eax, exit; xor edi, edi; syscall"""


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
    return _program(code + _EXIT)


def nested_epolls(depth: int) -> bytes:
    """Return an x86-64 program that adds an epoll to a second one, this to a third, and so on.

    At each the kernel looks for loops, from the one that is added down to the first.
    """
    create = (
        b"\xb8" + struct.pack("<I", 291)  # mov eax, epoll_create1
        + b"\x31\xff\x0f\x05"  # xor edi, edi; syscall
    )  # fmt: skip
    loop = (
        create
        + b"\x41\x89\xc5"  # mov r13d, eax
        + b"\xb8" + struct.pack("<I", 233)  # mov eax, epoll_ctl
        + b"\x44\x89\xef"  # mov edi, r13d
        + b"\xbe" + struct.pack("<I", 1)  # mov esi, EPOLL_CTL_ADD
        + b"\x44\x89\xe2"  # mov edx, r12d
        + b"\x49\x89\xe2\x0f\x05"  # mov r10, rsp; syscall
        + b"\x45\x89\xec"  # mov r12d, r13d
        + b"\xff\xcb"  # dec ebx
    )  # fmt: skip
    back = struct.pack("<b", -len(loop) - 2)
    head = b"\x6a\0\x6a\0" + create + b"\x41\x89\xc4"  # push 0, twice; ...; mov r12d, eax
    return _program(head + b"\xbb" + struct.pack("<I", depth) + loop + b"\x75" + back + _EXIT)


def _program(code: bytes) -> bytes:
    # System V ABI, chapters 4 and 5: ET_EXEC for EM_X86_64, one PT_LOAD to be read and run.
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = (0, _HEADER.size, _SEGMENT.size, 1, 0, 0, 0)
    header = _HEADER.pack(ident, 2, 62, 1, _BASE + _START, _HEADER.size, 0, *sizes)
    size = _START + len(code)
    return header + _SEGMENT.pack(1, 5, 0, _BASE, _BASE, size, size, 4096) + code
