"""Calls in progress, from outside: their return addresses given back, and dead ones' frames freed.

A call that a return probe has taken over returns to a trampoline of ours; its frame, drawn in
``model.returns``, knows where it came from. Giving the address back does not free the frame: who
has just returned to the trampoline still looks for it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.memory import GuestMemory, remembering
from kprobes.drivers.guest.stacks import is_anyone_inside, live_stacks
from kprobes.errors import MemoryFault
from kprobes.model.returns import (
    FRAME_CALLER,
    FRAME_MULTIPLIER,
    FRAME_ORIGIN,
    FRAME_SLOT,
    Frames,
)
from kprobes.ports import Text
from kprobes.units import U64, Addr

_WORD = 8
_GUESTS_OWN = (
    "arch_rethook_trampoline",
    "__kretprobe_trampoline",
    "kretprobe_trampoline",
    "return_to_handler",
)
"""What the kernel's own return probes and its function graph tracer put into slots."""


def give_callers_back(memory: GuestMemory, tables: Sequence[Frames]) -> int:
    """Have every call in progress return to its caller, not to us.

    Args:
        memory: of a guest that stands still.
        tables: all that the session has; a return address may have been taken over several times.

    Returns:
        How many return addresses were put back.
    """
    now = remembering(memory)
    origins: dict[int, Mapping[int, int]]
    origins = {frames.trampoline: _origins(now, frames) for frames in tables if frames.trampoline}
    slots = {slot for found in origins.values() for slot in found}
    return sum(_give_back(now, slot, origins) for slot in slots)


def awaited(guest: Guest, tables: Sequence[Frames]) -> list[Frames]:
    """Return the tables with calls in progress that will still return to us.

    A return probe of the guest's own on a call of ours keeps our trampoline's address where only
    the kernel looks, and goes there when it has run. Where return addresses cannot be given back
    every call is waited for whose frame says that it is in progress. What a call that has returned
    has left on a stack says nothing: without a frame there is nowhere to return to.
    """
    hooked = [frames for frames in tables if frames.trampoline]
    if not hooked:
        return []
    now = remembering(guest.memory)
    if not guest.arch.returns.comes_back:
        live = np.array(live_stacks(guest, now), np.uint64).reshape(-1, 2)
        return [frames for frames in hooked if _is_in_progress(now, frames, live)]
    theirs = [guest.kernel.symbols.find(name) for name in _GUESTS_OWN]
    addrs = {symbol.addr for symbol in theirs if symbol is not None}

    def is_held(frames: Frames) -> bool:
        return any(_content(now, slot) in addrs for slot in _origins(now, frames))

    return [frames for frames in hooked if is_held(frames)]


def free_dead_calls(guest: Guest, tables: Sequence[Frames], ranges: Sequence[Text]) -> int:
    """Free the frames of calls that will never return: their tasks have died.

    Args:
        guest: that stands still.
        tables: all that the session has.
        ranges: of our code. While anybody is inside, nothing is freed: who has just returned to a
            trampoline stands above the slot that it is about to look for.

    Returns:
        How many frames were freed.
    """
    if is_anyone_inside(guest, ranges):
        return 0
    now = remembering(guest.memory)
    live = np.array(live_stacks(guest, now), np.uint64).reshape(-1, 2)
    return sum(_free(now, frames, live) for frames in tables)


def find_caller(memory: GuestMemory, tables: Sequence[Frames], slot: Addr, held: Addr) -> Addr:
    """Return where a call in progress came from, even if its return was taken over.

    Args:
        memory: of a guest, where whoever stands on that stack does not go on meanwhile.
        tables: all that the session has.
        slot: of the call; see ``model.returns``.
        held: what its return address is now.
    """
    frames = next((each for each in tables if each.trampoline == held), None)
    return held if frames is None else Addr(_origins(memory, frames).get(slot, held))


def home(count: int, slot: int) -> int:
    """Return the number of the frame at which the search for a slot's begins."""
    return ((slot * FRAME_MULTIPLIER & U64) >> 32) * count >> 32


def _is_in_progress(memory: GuestMemory, frames: Frames, live: NDArray[np.uint64]) -> bool:
    slots = np.array([*_origins(memory, frames)], np.uint64)
    return bool(_is_live(slots, live).any())


def _is_live(slots: NDArray[np.uint64], live: NDArray[np.uint64]) -> NDArray[np.bool_]:
    # For each slot, whether it is in the used part of a stack.
    above, below = slots[:, np.newaxis] >= live[:, 0], slots[:, np.newaxis] < live[:, 1]
    return np.asarray((above & below).any(axis=1), np.bool_)


def _origins(memory: GuestMemory, frames: Frames) -> dict[int, int]:
    # By slot: where its calls came from that were taken over.
    table = _table(memory, frames)
    slots = table[:, FRAME_SLOT // _WORD]
    is_taken = (slots != 0) & (table[:, FRAME_CALLER // _WORD] != 0)
    found: dict[int, int] = {}
    for slot in np.unique(slots[is_taken]).tolist():
        # Of several the one that the guest itself comes to first is the newest.
        start = home(frames.count, slot)
        order = (np.flatnonzero(is_taken & (slots == slot)) - start) % frames.count
        newest = (int(order.min()) + start) % frames.count
        found[slot] = int(table[newest, FRAME_ORIGIN // _WORD])
    return found


def _table(memory: GuestMemory, frames: Frames) -> NDArray[np.uint64]:
    raw = memory.read(frames.addr, frames.size)
    return np.frombuffer(raw, np.uint64).reshape(frames.count, frames.stride // _WORD)


def _free(memory: GuestMemory, frames: Frames, live: NDArray[np.uint64]) -> int:
    slots = _table(memory, frames)[:, FRAME_SLOT // _WORD]
    dead = np.flatnonzero((slots != 0) & ~_is_live(slots, live))
    for index in dead.tolist():
        memory.set_u64(Addr(frames.addr + index * frames.stride + FRAME_SLOT), 0)
    return len(dead)


def _content(memory: GuestMemory, slot: int) -> int | None:
    # A task that died has perhaps no stack any more.
    with suppress(MemoryFault):
        return memory.u64(slot)
    return None


def _give_back(memory: GuestMemory, slot: int, origins: Mapping[int, Mapping[int, int]]) -> bool:
    held = _content(memory, slot)
    origin = origins.get(held, {}).get(slot) if held is not None else None
    if origin is None:
        return False
    memory.set_u64(slot, origin)
    return True
