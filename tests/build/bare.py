"""Guests that are no Linux: boot sectors that put the CPU into a mode and stay there."""

import struct

_ORG = 0x7C00
_CODE32, _DATA, _CODE64 = 0x08, 0x10, 0x18
_GDT = b"".join(
    struct.pack("<Q", entry)
    for entry in (0, 0x00CF_9A00_0000_FFFF, 0x00CF_9200_0000_FFFF, 0x00AF_9A00_0000_FFFF)
)
_STAY = b"\xeb\xfe"  # jmp $
_LONG = (
    b"\xc7\x05\x00\x10\x00\x00\x03\x20\x00\x00"  # mov dword [0x1000], 0x2003: a table at 0x2000
    b"\xc7\x05\x00\x20\x00\x00\x83\x00\x00\x00"  # mov dword [0x2000], 0x83: a page of 1 GiB at 0
    b"\xb8\x00\x10\x00\x00\x0f\x22\xd8"  # mov eax, 0x1000; mov cr3, eax
    b"\x0f\x20\xe0\x83\xc8\x20\x0f\x22\xe0"  # cr4 |= PAE
    b"\xb9\x80\x00\x00\xc0\x0f\x32\x0d\x00\x01\x00\x00\x0f\x30"  # EFER |= LME
    b"\x0f\x20\xc0\x0d\x00\x00\x00\x80\x0f\x22\xc0"  # cr0 |= PG
)


def boot_sector(*, is_long: bool) -> bytes:
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
