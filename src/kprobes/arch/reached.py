"""Code that no symbol tells the size of: what is reached from its entry, and what that computes.

An architecture says where one instruction leads, and what it does to what registers hold.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from kprobes.units import Addr

_MAX_CODE = 1 << 16
"""Instructions that are followed: a probe of 128 arguments has some thousands."""

Instruction = TypeVar("Instruction")
Held = TypeVar("Held")
Pieces = tuple[tuple[Addr, bytes], ...]
"""(address, bytes) by address; neighbours are one piece."""
Led = tuple[bytes, Iterable[int]]
"""An instruction, and where it leads by itself."""


def pieces_from(entry: int, inside: range, led: Callable[[int], Led | None]) -> Pieces:
    """Return what can be reached from an address by direct branches and calls.

    Args:
        entry: of the code.
        inside: which addresses belong to it; what leads elsewhere is not followed.
        led: the instruction at an address, or None where none is.
    """
    found: dict[int, bytes] = {}
    waiting = [entry]
    while waiting and len(found) < _MAX_CODE:
        addr = waiting.pop()
        if addr in found or addr not in inside:
            continue
        instruction = led(addr)
        if instruction is not None:
            found[addr], targets = instruction
            waiting += targets
    return _joined(found)


def _joined(found: Mapping[int, bytes]) -> Pieces:
    pieces: list[tuple[Addr, bytes]] = []
    for addr in sorted(found):
        code = found[addr]
        if pieces and pieces[-1][0] + len(pieces[-1][1]) == addr:
            pieces[-1] = pieces[-1][0], pieces[-1][1] + code
        else:
            pieces.append((Addr(addr), code))
    return tuple(pieces)


def states_of(
    code: Mapping[int, Instruction],
    entry: int,
    successors: Callable[[Instruction], Iterable[int]],
    after: Callable[[Instruction, Mapping[int, Held]], Mapping[int, Held]],
) -> dict[int, Mapping[int, Held]]:
    """Return what is known of registers before each instruction, on every way there.

    Args:
        code: instructions by address.
        entry: where nothing is known; a piece that only calls lead to begins so, too.
        successors: where an instruction leads.
        after: what registers hold behind an instruction.
    """
    states: dict[int, Mapping[int, Held]] = {}
    waiting: list[tuple[int, Mapping[int, Held]]] = [(entry, {})]
    while waiting:
        addr, state = waiting.pop()
        if addr not in code:
            continue
        known = states.get(addr)
        merged = state if known is None else dict(known.items() & state.items())
        if merged == known:
            continue
        states[addr] = merged
        behind = after(code[addr], merged)
        waiting += [(successor, behind) for successor in successors(code[addr])]
    return states
