"""What functions begin with: an instruction that calls must land on, the tracer's words.

Arm ARM, D8.4.7 "PE handling of branch target exceptions": in guarded pages they land on bti, or on
paciasp. A compiler that makes a kernel for that (CONFIG_ARM64_BTI_KERNEL) puts bti c before the
function tracer's words; else paciasp at an entry is an instruction like others.

A compiler lists where the first of the tracer's words is, the kernel's tracer where the last is
(ftrace_call_adjust() in arch/arm64/kernel/ftrace.c).
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from kprobes.arch.listed import Read
from kprobes.errors import MemoryFault
from kprobes.units import Addr

_BTI = (0xFFFFFF3F, 0xD503241F)
_BEFORE = 8
"""Bytes from bti to a site: a word that the tracer has, too, is between."""
_SAMPLE = 64
_NOP = 0xD503201F
_CALL_OPS = 8
_BEFORE_POINTER = 12
_NOPS = [_NOP, _NOP]


def has_landings(read: Read, sites: Iterable[int]) -> bool:
    """Return whether calls through pointers land on instructions that must stay.

    Args:
        read: the kernel's text.
        sites: of its function tracer.
    """
    some = list(itertools.islice(sites, _SAMPLE))
    pads = [pad for site in some if (pad := _is_pad(read, site - _BEFORE)) is not None]
    return not pads or any(pads)


def pointer(site: int) -> Addr:
    """Return where a site's pointer to an ftrace_ops is: ftrace_rec_set_ops()."""
    return Addr((site - _BEFORE_POINTER) & -_CALL_OPS)


def listed_sites(read: Read, listed: Sequence[int]) -> list[int]:
    """Return the tracer's sites that a kernel's file lists by other addresses."""
    # Since 6.3 (CONFIG_DYNAMIC_FTRACE_WITH_CALL_OPS) two words before every function come first;
    # without them a function may begin with as many, which are its own.
    some = listed[:_SAMPLE]
    before = _CALL_OPS if 2 * sum(_is_before(read, at) for at in some) > len(some) else 0
    return [_site(read, at + before) for at in listed]


def _is_before(read: Read, addr: int) -> bool:
    words = np.frombuffer(read(addr, 16), "<u4").tolist()
    return words[:2] == _NOPS and (_is_bti(words[2]) or words[2:] == _NOPS)


def _site(read: Read, entry: int) -> int:
    is_guarded = _is_bti(int.from_bytes(read(entry, 4), "little"))
    return entry + 4 * is_guarded + 4


def _is_pad(read: Read, addr: int) -> bool | None:
    try:
        return _is_bti(int.from_bytes(read(addr, 4), "little"))
    except MemoryFault:
        # A module's first function: nothing is before it.
        return None


def _is_bti(word: int) -> bool:
    return word & _BTI[0] == _BTI[1]
