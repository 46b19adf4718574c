"""The guest's own list of ftrace sites, as it lies in its memory."""

import struct
from collections.abc import Sequence
from typing import Protocol

RECORD_SIZE = 16


class Writable(Protocol):
    """Memory that a test may write."""

    def write(self, addr: int, data: bytes) -> None:
        """Write bytes."""
        ...


def write_page(
    memory: Writable, addr: int, sites: Sequence[int], *, records: int, next: int
) -> None:
    """Write a ``struct ftrace_page`` and its records, none of them in use."""
    memory.write(addr, struct.pack("<QQii", next, records, len(sites), 0))
    for n, site in enumerate(sites):
        memory.write(records + RECORD_SIZE * n, struct.pack("<QQ", site, 0))


def write_list(memory: Writable, start: int, groups: Sequence[Sequence[int]]) -> None:
    """Write the list's head at ``start``, and after it a page with its records per group."""
    at = start + 64
    memory.write(start, struct.pack("<Q", at if groups else 0))
    for n, sites in enumerate(groups):
        return_address_size = at + 64 + RECORD_SIZE * len(sites)
        is_last = n == len(groups) - 1
        write_page(memory, at, sites, records=at + 64, next=0 if is_last else return_address_size)
        at = return_address_size
