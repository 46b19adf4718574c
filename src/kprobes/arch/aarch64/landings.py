"""Whether a kernel's calls through pointers must land on an instruction made for it.

Arm ARM, D8.4.7 "PE handling of branch target exceptions": in guarded pages they land on bti, or on
paciasp. A compiler that makes a kernel for that (CONFIG_ARM64_BTI_KERNEL) puts bti c before the
function tracer's words; else paciasp at an entry is an instruction like others.
"""

import itertools
from collections.abc import Iterable

from kprobes.arch.listed import Read
from kprobes.errors import MemoryFault

_BTI = (0xFFFFFF3F, 0xD503241F)
_BEFORE = 8
"""Bytes from bti to a site: a word that the tracer has, too, is between."""
_SAMPLE = 64


def has_landings(read: Read, sites: Iterable[int]) -> bool:
    """Return whether calls through pointers land on instructions that must stay.

    Args:
        read: the kernel's text.
        sites: of its function tracer.
    """
    some = list(itertools.islice(sites, _SAMPLE))
    return not some or any(_is_pad(read, site - _BEFORE) for site in some)


def _is_pad(read: Read, addr: int) -> bool:
    try:
        word = int.from_bytes(read(addr, 4), "little")
    except MemoryFault:
        return True
    return word & _BTI[0] == _BTI[1]
