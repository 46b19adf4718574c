"""Exported names, found by their looks."""

import struct

from kprobes.image import data_symbols

BASE = 0xFFFF_8000_0900_0000
NAMES = b"\0init_task\0nr_cpu_ids\0not_init_task\0"
TABLE_AT = 0x100


def region(entries: dict[str, int]) -> bytes:
    """Return names, and a table of entries after them."""
    data = bytearray(NAMES.ljust(TABLE_AT, b"\0"))
    for name, value in entries.items():
        at = len(data)
        place = NAMES.index(b"\0" + name.encode() + b"\0") + 1
        data += struct.pack("<iii", value - (BASE + at), place - (at + 4), 0)
    return bytes(data)


def test_exported_names_have_addresses() -> None:
    data = region({"init_task": BASE + 0x10_0000, "nr_cpu_ids": BASE - 0x5000})

    found = data_symbols.find(data, BASE, ["nr_cpu_ids", "init_task", "absent"])

    assert found == {"nr_cpu_ids": BASE - 0x5000, "init_task": BASE + 0x10_0000}


def test_a_name_that_nobody_points_at_is_not_exported() -> None:
    assert data_symbols.find(region({}), BASE, ["init_task"]) == {}


def test_the_end_of_another_name_is_no_name() -> None:
    data = region({"not_init_task": BASE + 8})

    assert data_symbols.find(data, BASE, ["init_task", "task"]) == {}
