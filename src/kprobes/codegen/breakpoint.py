"""Breakpoint notifier: the guest's callback for exceptions, and the table that it looks up.

The callback is C, runtime/breakpoint.c, where its decision is drawn. The table is a hash with open
addresses: pairs of u64, a breakpoint's address and its detour's; zero where nothing is.
"""

from collections.abc import Mapping

from kprobes.arch.arch import Arch
from kprobes.codegen import runtime
from kprobes.codegen.object import read_template
from kprobes.units import U64, Addr

# struct notifier_block in runtime/breakpoint.c: the kernel's three members, and ours.
#
#      0               8       16        20   24      32
#     [notifier_call] [next] [priority] [-] [table] [mask]
BLOCK_SIZE = 64
BLOCK_TABLE, BLOCK_MASK = 24, 32
"""Offsets in our block: of the table's address, and of its number of entries less one."""
EMPTY_TABLE = bytes(16)
"""A table with one entry, which is empty: its mask is 0."""
PRIORITY = 0x7FFF_FFFF
"""No other callback may take a breakpoint of ours for its own, or for a crash."""

_ENTRY = 16
_MULTIPLIER = 0x9E37_79B9_7F4A_7C15
_SHIFT = 40

_MODULE = """{constants}
{function}
attributes #0 = {{ noredzone nounwind }}
"""


def compile_notifier(arch: Arch) -> bytes:
    """Return the callback's code; it runs at any address."""
    from kprobes import llvm

    patch, trap = arch.patch, arch.patch.trap
    if trap is None or len(patch.breakpoint) != 1:
        raise ValueError(f"{arch.name} has no breakpoints of ours")
    values = {
        "trap_action": trap.action,
        "ip_offset": trap.ip,
        "breakpoint": patch.breakpoint[0],
    }
    source = _MODULE.format(
        constants=runtime.constants(values), function=runtime.part("breakpoint")
    )
    data = llvm.compile_object(source, arch.code)
    return patch.landing_pad + read_template(data, arch.code).link(Addr(0), {})


def hash_table(detours: Mapping[Addr, Addr]) -> bytes:
    """Return the table that leads breakpoints to their detours; never more than half full."""
    # Less than half full: 1.5 looks find a breakpoint, 2.5 that there is none of ours, on average
    # (linear probing; Knuth, volume 3, 6.4).
    count = 1 << (2 * len(detours)).bit_length()
    table = bytearray(_ENTRY * count)
    for addr, detour in detours.items():
        at = first_entry(addr, count - 1)
        while any(table[_ENTRY * at : _ENTRY * at + 8]):
            at = at + 1 & count - 1
        pair = addr.to_bytes(8, "little") + detour.to_bytes(8, "little")
        table[_ENTRY * at : _ENTRY * (at + 1)] = pair
    return bytes(table)


def first_entry(addr: int, mask: int) -> int:
    """Return the entry of a table at which the search for an address begins."""
    return (addr * _MULTIPLIER & U64) >> _SHIFT & mask


def table_mask(table: bytes) -> int:
    """Return the number of a table's entries less one."""
    return len(table) // _ENTRY - 1
