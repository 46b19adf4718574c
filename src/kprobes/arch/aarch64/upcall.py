"""Code that hands a hit to the guest's ``upcall`` function and goes on as that says.

Who asks makes room for a frame, with every register and flag as the probed code has it, and calls
the gate with the upcall's number in x0 and the address that is to be shown in x1:

    [x0 ... x30] [pstate] [number] [address] | the probed code's stack

Of it the asking code stores x0, x1 and x30, the gate the rest. ``upcall`` leaves there what is to
be loaded, and in the place of the number 0 when it goes on where it asked; else the stack pointer
that is to be, and in the place of the address where to go on. There is no way to branch anywhere
with all registers in use: x16 and x17 are lost then, which no call preserves.
"""

from kprobes.arch.aarch64 import encode, site
from kprobes.arch.aarch64.encode import LINK, SP
from kprobes.units import Addr

SAVED = site.SAVED
"""What is saved of a hit, lowest address first."""
_NUMBER_AT = 8 * len(SAVED)
_BACK, _STACK, _TARGET = 19, 16, 17


def ask(place: Addr, number: int, gate: Addr, shown: Addr | int) -> bytes:
    """Return code for ``place`` that asks, and goes on behind itself.

    Args:
        place: where it will be.
        number: of what it asks.
        gate: where all code asks.
        shown: the address that is shown.
    """
    return _ask(place, number, gate, encode.move_number(1, shown))


def ask_by_register(place: Addr, number: int, gate: Addr, register: int) -> bytes:
    """Return the same where a register has the address that is shown."""
    return _ask(place, number, gate, encode.mov(1, register))


def gate(place: Addr, upcall: Addr) -> bytes:
    """Return the gate's code for ``place``; it calls ``upcall``, a C function."""
    code = b"".join(encode.stp(n, n + 1, 8 * n) for n in range(2, LINK, 2))
    code += encode.stp(0, 1, _NUMBER_AT)
    code += encode.read_nzcv(0) + encode.store(0, site.PSTATE_AT)
    # mov x0, sp
    code += encode.mov(_BACK, LINK) + encode.add(0, SP, 0)
    code += encode.bl(Addr(place + len(code)), upcall)
    code += encode.mov(LINK, _BACK) + encode.ldp(_STACK, _TARGET, _NUMBER_AT)
    code += site.restore_flags()
    elsewhere = _elsewhere()
    is_here = encode.cbz(_STACK, len(elsewhere))
    return code + is_here + elsewhere + site.restore(range(LINK)) + encode.ret()


def _ask(place: Addr, number: int, gate: Addr, show: bytes) -> bytes:
    code = encode.stp_down(0, 1, site.FRAME) + encode.store(LINK, site.LINK_AT)
    code += show + encode.movz(0, number)
    code += encode.bl(Addr(place + len(code)), gate)
    return code + encode.load(LINK, site.LINK_AT) + site.drop()


def _elsewhere() -> bytes:
    code = site.restore(range(_STACK)) + site.restore(range(_TARGET + 1, LINK))
    # mov sp, x16
    return code + encode.load(LINK, site.LINK_AT) + encode.add(SP, _STACK, 0) + encode.ret(_TARGET)
