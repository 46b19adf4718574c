"""Effects of instructions on the stack pointer, the frame pointer and the return address in x30.

A function may hold its return address signed (paciasp: Arm ARM, D8.10 "Pointer authentication"),
on its stack, or on a shadow call stack that x18 points to (CONFIG_SHADOW_CALL_STACK).
"""

from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kprobes.arch.aarch64.insn import (
    FRAME_POINTER,
    LINK,
    SP_OR_ZR,
    Kind,
    Words,
    first_register,
    fits,
    sign_extended,
    target_register,
)

_TRACKED = (FRAME_POINTER, LINK)
_SHADOW_POP = 0xF85F8E5E
"""ldr x30, [x18, #-8]!"""
_XPACLRI = 0xD50320FF
_PAIR = (0x3A000000, 0x28000000)
_SINGLE_IMM9 = (0x3B200000, 0x38000000)
_SCALED_X = (0xFF800000, 0xF9000000)
"""ldr, str xT, [xN, #imm12 * 8]."""
_ADD_SUB = (0x9F000000, 0x91000000)
"""64-bit, of an immediate; bit 30 is sub, bit 29 sets flags."""
_SETS_SP = (
    (0x3F000000, 0x11000000),
    # add, sub of an extended register.
    (0x3FE00000, 0x0B200000),
    # and, orr, eor of an immediate.
    (0x7F800000, 0x12000000),
    (0x7F800000, 0x32000000),
    (0x7F800000, 0x52000000),
)
_LOADS_STORES = (0x0A000000, 0x08000000)


class Link(Enum):
    """What x30 holds."""

    RETURN = "return"
    """Where the function returns to, as at its entry."""
    SIGNED = "signed"
    """The same, signed."""
    CHANGED = "changed"
    """Something of the function's own."""


class Saved(NamedTuple):
    """The return address on the stack.

    Attributes:
        place: bytes below the stack pointer at the entry.
        link: what was stored.
    """

    place: int
    link: Link


# After a usual beginning: paciasp; stp x29, x30, [sp, #-48]!; mov x29, sp
#
#     sp at the entry -> +-------------+
#                        | locals      |
#                        | x30, signed |  saved = (place 40, SIGNED)
#     sp, x29 ---------> | x29         |  depth = 48, frame = 48
#                        +-------------+
#
# link is SIGNED until the first call, then CHANGED, and SIGNED again when x30 is loaded from where
# it was saved. cfg.py says which of these a return or a jump may leave with.
class Stack(NamedTuple):
    """The stack before an instruction.

    Attributes:
        depth: bytes that the stack pointer is below where it was at the entry, or None when that
            is not known.
        frame: what ``depth`` would be if the stack pointer were what x29 holds, or None.
        link: what x30 holds, or None.
        saved: where the return address is kept besides, or None.
    """

    depth: int | None
    frame: int | None = None
    link: Link | None = Link.RETURN
    saved: Saved | None = None

    @property
    def is_as_at_entry(self) -> bool:
        """Whether a jump to a function would be one more call of it."""
        return self.depth == 0 and self.link is Link.RETURN


ENTRY = Stack(0)


def touching(words: Words, kinds: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which words ``after`` has to look at: a new mask of their shape, (n,).

    Args:
        words: shape (n,), as the CPU reads them.
        kinds: shape (n,), from ``classify``.
    """
    target = words & np.uint32(31)
    pairs = _all(words, _PAIR)
    found = np.isin(target, _TRACKED) | (pairs & np.isin(words >> np.uint32(10) & 31, _TRACKED))
    for row in _SETS_SP:
        found |= _all(words, row) & (target == SP_OR_ZR)
    writes_back = (pairs & (words & np.uint32(1 << 23) != 0)) | (
        _all(words, _SINGLE_IMM9) & (words & np.uint32(1 << 10) != 0)
    )
    found |= writes_back & (words >> np.uint32(5) & 31 == SP_OR_ZR)
    return found | np.isin(kinds, [Kind.PACIASP, Kind.AUTIASP]) | (words == _XPACLRI)


def after(word: int, kind: Kind, before: Stack) -> Stack:
    """Return the stack after an instruction.

    Args:
        word: the instruction, as the CPU reads it.
        kind: from ``kind_of``.
        before: the stack before it.
    """
    match kind:
        case Kind.BL | Kind.BLR:
            return before._replace(link=Link.CHANGED)
        case Kind.PACIASP:
            return _turned(before, Link.RETURN, Link.SIGNED)
        case Kind.AUTIASP:
            return _turned(before, Link.SIGNED, Link.RETURN)
        case _ if word == _XPACLRI:
            return before._replace(link=before.link if before.link is Link.RETURN else None)
        case _ if word == _SHADOW_POP:
            return before._replace(link=Link.RETURN)
        case _ if fits(word, _LOADS_STORES):
            return _accessed(word, before)
        case _ if fits(word, _ADD_SUB) and not word & 1 << 29:
            return _added(word, before)
        case _:
            return _lost(word, before)


def merged(one: Stack, other: Stack) -> Stack:
    """Return what is known where two ways meet."""
    return Stack(
        depth=one.depth if one.depth == other.depth else None,
        frame=one.frame if one.frame == other.frame else None,
        link=one.link if one.link is other.link else None,
        saved=one.saved if one.saved == other.saved else None,
    )


def _turned(before: Stack, old: Link, new: Link) -> Stack:
    return before._replace(link=new) if before.link is old else before


def _added(word: int, before: Stack) -> Stack:
    held = _held(first_register(word), before)
    by = (word >> 10 & 0xFFF) << (12 if word & 1 << 22 else 0)
    value = None if held is None else held + by if word & 1 << 30 else held - by
    match target_register(word):
        case 31:
            return before._replace(depth=value)
        case 29:
            return before._replace(frame=value)
        case 30:
            return before._replace(link=None)
        case _:
            return before


def _accessed(word: int, before: Stack) -> Stack:
    # A pair, or one register with an immediate: where, and whether the base changes before or
    # after the access.
    base = first_register(word)
    if fits(word, _PAIR):
        scale = 4 << (word >> 30) if word & 1 << 26 else 4 << (word >> 31)
        offset = sign_extended(word >> 15, 7) * scale
        is_pre, is_post = word >> 23 & 3 == 3, word >> 23 & 3 == 1
        found = {target_register(word): 0, word >> 10 & 31: scale}
    else:
        offset, is_pre, is_post = _single(word)
        found = {target_register(word): 0}
    held = _held(base, before)
    place = None if held is None else held - (0 if is_post else offset)
    is_vector = bool(word & 1 << 26)
    stack = before if is_vector else _moved(word, found, place, before)
    if is_pre or is_post:
        return _based(base, None if held is None else held - offset, stack)
    return stack


def _single(word: int) -> tuple[int, bool, bool]:
    if fits(word, _SCALED_X):
        return (word >> 10 & 0xFFF) * 8, False, False
    if fits(word, _SINGLE_IMM9):
        mode = word >> 10 & 3
        return sign_extended(word >> 12, 9), mode == 3, mode == 1
    return 0, False, False


def _moved(word: int, found: dict[int, int], place: int | None, before: Stack) -> Stack:
    is_known = fits(word, _PAIR) or fits(word, _SCALED_X) or fits(word, _SINGLE_IMM9)
    is_long = word >> 30 in (2, 3)
    stack = before
    if _is_load(word):
        if FRAME_POINTER in found:
            stack = stack._replace(frame=None)
        if LINK in found:
            at = place - found[LINK] if place is not None and is_known and is_long else None
            is_saved = stack.saved is not None and stack.saved.place == at
            stack = stack._replace(link=stack.saved.link if is_saved and stack.saved else None)
        return stack
    if place is None or not is_known:
        return stack
    if LINK in found and is_long and stack.link in (Link.RETURN, Link.SIGNED):
        return stack._replace(saved=Saved(place - found[LINK], stack.link))
    return stack


def _is_load(word: int) -> bool:
    if word >> 27 & 7 == 7:
        return bool(word >> 22 & 3)
    return bool(word & 1 << 22)


def _based(base: int, value: int | None, stack: Stack) -> Stack:
    if base == SP_OR_ZR:
        return stack._replace(depth=value)
    return stack._replace(frame=value) if base == FRAME_POINTER else stack


def _lost(word: int, before: Stack) -> Stack:
    match target_register(word):
        case 31 if any(fits(word, row) for row in _SETS_SP):
            return before._replace(depth=None)
        case 30:
            return before._replace(link=None)
        case 29:
            return before._replace(frame=None)
        case _:
            return before


def _held(register: int, before: Stack) -> int | None:
    if register == SP_OR_ZR:
        return before.depth
    return before.frame if register == FRAME_POINTER else None


def _all(words: Words, row: tuple[int, int]) -> NDArray[np.bool_]:
    return words & np.uint32(row[0]) == row[1]
