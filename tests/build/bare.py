"""Guests that are no Linux: code that puts the CPU into a mode and stays there."""

import struct
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from kprobes.transport.qemu_command import MACHINE_TYPES
from tests.build.waiting import wait_until

_ORG = 0x7C00
_CODE32, _DATA, _CODE64 = 0x08, 0x10, 0x18
_GDT = b"".join(
    struct.pack("<Q", entry)
    for entry in (0, 0x00CF_9A00_0000_FFFF, 0x00CF_9200_0000_FFFF, 0x00AF_9A00_0000_FFFF)
)
_TOLD = "file:told"
"""What a guest writes to a port when it stays, whatever its firmware has taken."""
_STAY = b"\xb0\x41\xe6\xe9\xeb\xfe"  # mov al, 'A'; out 0xe9, al; jmp $
_LONG = (
    b"\xc7\x05\x00\x10\x00\x00\x03\x20\x00\x00"  # mov dword [0x1000], 0x2003: a table at 0x2000
    b"\xc7\x05\x00\x20\x00\x00\x83\x00\x00\x00"  # mov dword [0x2000], 0x83: a page of 1 GiB at 0
    b"\xb8\x00\x10\x00\x00\x0f\x22\xd8"  # mov eax, 0x1000; mov cr3, eax
    b"\x0f\x20\xe0\x83\xc8\x20\x0f\x22\xe0"  # cr4 |= PAE
    b"\xb9\x80\x00\x00\xc0\x0f\x32\x0d\x00\x01\x00\x00\x0f\x30"  # EFER |= LME
    b"\x0f\x20\xc0\x0d\x00\x00\x00\x80\x0f\x22\xc0"  # cr0 |= PG
)


@contextmanager
def bare_guest(directory: Path, arch: str, what: str) -> Generator[str]:
    """Start QEMU without a kernel, let it come to where it stays, and yield its stub's address.

    A monitor is beside it, ``monitor.sock``.

    Args:
        directory: of its own.
        arch: by Debian's name.
        what: runs there: see ``_BARE``.
    """
    board = MACHINE_TYPES[arch]
    command = [board.program, "-machine", board.machine, "-cpu", "max", "-m", "64M"]
    command += ["-display", "none", "-no-reboot", *_BARE[arch, what](directory / "image")]
    command += ["-chardev", "socket,id=gdb,path=gdb.sock,server=on,wait=off", "-gdb", "chardev:gdb"]
    command += ["-monitor", "unix:monitor.sock,server=on,wait=off"]
    with (directory / "log").open("wb") as log:
        qemu = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        assert wait_until((directory / "gdb.sock").exists) is not None
        if _TOLD in command:
            told = directory / "told"
            assert wait_until(lambda: told.exists() and told.read_bytes()) is not None
        else:
            time.sleep(2)
        yield str(directory / "gdb.sock")
    finally:
        qemu.kill()
        qemu.wait()


def _disk(image: Path, *, is_long: bool) -> Sequence[str]:
    image.write_bytes(_boot_sector(is_long=is_long).ljust(1 << 20, b"\0"))
    drive = ("-drive", f"file={image},format=raw,if=ide", "-boot", "c")
    return (*drive, "-debugcon", _TOLD)


def _raw(image: Path, *, translation: int) -> Sequence[str]:
    image.write_bytes(_arm64_image(translation=translation))
    return ("-kernel", str(image))


def _boot_sector(*, is_long: bool) -> bytes:
    """Return a disk that boots into 64-bit mode, or into 32-bit protected mode, and loops."""
    real = b"\xfa\x31\xc0\x8e\xd8"  # cli; xor ax, ax; mov ds, ax
    size = len(real) + 5 + 8 + 5
    table = _ORG + size + 2
    gate = (
        b"\x0f\x01\x16" + struct.pack("<H", table)  # lgdt [table]
        + b"\x0f\x20\xc0\x0c\x01\x0f\x22\xc0"  # cr0 |= PE
    )  # fmt: skip
    protected = table + 6 + len(_GDT)
    jump = b"\xea" + struct.pack("<HH", protected, _CODE32)
    described = struct.pack("<HI", len(_GDT) - 1, table + 6) + _GDT
    code = real + gate + jump + b"\x90\x90" + described
    # mov ax, data; mov ds, ax
    code += b"\x66\xb8" + struct.pack("<H", _DATA) + b"\x8e\xd8"
    if is_long:
        code += _LONG
        code += b"\xea" + struct.pack("<IH", _ORG + len(code) + 7, _CODE64)
    return (code + _STAY).ljust(510, b"\0") + b"\x55\xaa"


def _arm64_image(*, translation: int) -> bytes:
    """Return a raw image that sets TCR_EL1 to a number, has empty page tables, and loops.

    It runs at EL1 and leaves the MMU as it is: what looks at the registers cannot tell.
    """
    # Where its last page is: QEMU loads it 512 KiB into RAM, at 1 GiB.
    tables = (1 << 30) + 0x80000 + 0x1000
    loads = [_movz_movk(0, tables), _movz_movk(1, translation)]
    # msr TTBR1_EL1, x0; msr TCR_EL1, x1; b .
    words = [*loads[0], *loads[1], 0xD5182020, 0xD5182041, 0x14000000]
    return struct.pack(f"<{len(words)}I", *words).ljust(0x2000, b"\0")


def _movz_movk(register: int, value: int) -> tuple[int, int]:
    low, high = value & 0xFFFF, value >> 16
    return 0xD2800000 | low << 5 | register, 0xF2A00000 | high << 5 | register


_BARE: Mapping[tuple[str, str], Callable[[Path], Sequence[str]]] = {
    ("amd64", "stopped at reset"): lambda _: ("-S",),
    ("amd64", "firmware"): lambda _: (),
    ("amd64", "64-bit"): partial(_disk, is_long=True),
    ("amd64", "32-bit"): partial(_disk, is_long=False),
    ("arm64", "stopped at reset"): lambda _: ("-S",),
    ("arm64", "firmware"): lambda _: (),
    # TCR_EL1: T1SZ of 16, TG1 of 4 KiB.
    ("arm64", "64-bit"): partial(_raw, translation=16 << 16 | 0b10 << 30),
    ("arm64", "no translation"): partial(_raw, translation=0),
}
