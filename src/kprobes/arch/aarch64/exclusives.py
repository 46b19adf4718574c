"""What is between an exclusive load and its store: a probe there makes the store fail for ever.

Exact where the kernel's is_probed_address_atomic() (arch/arm64/kernel/probes/decode-insn.c) looks
back through 32 words only, whatever they are: here are the ways from a load to a store.
Arm ARM, B2.17 "Synchronization and semaphores".
"""

from collections.abc import Iterator

import numpy as np

from kprobes.arch.aarch64.function import Flow, Function
from kprobes.arch.aarch64.words import SIZE, Kind

_LONGEST = 32
"""Words of the kernel's MAX_ATOMIC_CONTEXT_SIZE."""
_MONITOR_ENDS = frozenset({Kind.STORE_EXCLUSIVE, Kind.CLREX, Kind.LOAD_EXCLUSIVE})


def between_exclusives(function: Function, addr: int) -> bool:
    """Return whether an instruction is on a way from an exclusive load to an exclusive store."""
    return any(addr in way for way in _ways(function))


def _ways(function: Function) -> Iterator[set[int]]:
    for row in np.flatnonzero(function.kinds == Kind.LOAD_EXCLUSIVE).tolist():
        yield _between(function, int(function.addrs[row]))


def _between(function: Function, load: int) -> set[int]:
    # Forwards from the load; then backwards from stores, through what was found.
    after: dict[int, list[int]] = {}
    waiting, ends = [(load, 0)], set[int]()
    while waiting:
        addr, steps = waiting.pop(0)
        if addr in after or steps > _LONGEST:
            continue
        after[addr] = list(_next(function, addr, is_load=addr == load))
        if _kind(function, addr) is Kind.STORE_EXCLUSIVE:
            ends.add(addr)
        waiting += [(each, steps + 1) for each in after[addr]]
    on_way, is_new = set(ends), True
    while is_new:
        found = {addr for addr, nexts in after.items() if not on_way.isdisjoint(nexts)}
        is_new = not found <= on_way
        on_way |= found
    return on_way - ends - {load}


def _next(function: Function, addr: int, *, is_load: bool) -> Iterator[int]:
    i = function.at(addr)
    if i is None or (i.kind in _MONITOR_ENDS and not is_load):
        return
    if i.flow in (Flow.JUMP, Flow.BRANCH) and i.target is not None:
        yield i.target
    if i.flow in (Flow.NEXT, Flow.BRANCH):
        yield addr + SIZE


def _kind(function: Function, addr: int) -> Kind | None:
    i = function.at(addr)
    return None if i is None else i.kind
