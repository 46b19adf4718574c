"""Veneers: calls of what is further away than the 128 MB that ``bl`` goes.

Any call may change x16 and x17, as linkers use them for this (AAPCS64, 6.1.1), and a branch by x16
may land on ``bti c``.
"""

from kprobes.arch.aarch64 import encode
from kprobes.units import Addr

_X16 = 16


def veneer(target: Addr) -> bytes:
    """Return code that a call of a far function goes to instead; it runs anywhere."""
    return encode.move_number(_X16, target) + encode.br(_X16)
