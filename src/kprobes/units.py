"""Bare numbers that cross packages, each with a name of its own."""

from typing import NewType

Addr = NewType("Addr", int)
"""A virtual address in the target's kernel."""

Phys = NewType("Phys", int)
"""A guest-physical address."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

U64 = (1 << 64) - 1
"""All 64 bits: what an address or a register is masked with."""


def signed(value: int) -> int:
    """Return the number that the low 64 bits of another are where they have a sign."""
    value &= U64
    return value - (value >> 63 << 64)
