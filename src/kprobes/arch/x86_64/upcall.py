"""Code that hands a hit to the guest's ``upcall`` function and goes on as that says.

A detour comes to the gate by ``push CONTINUE; push NUMBER; jmp gate``, with every register and flag
as the probed code has it. The gate pushes SAVED on top and calls ``upcall`` with the address of
the lowest of them:

    [r15 ... di] [flags] [number] [continue] | the probed code's stack

``upcall`` leaves there what is to be loaded: for the stack pointer and instruction pointer that
are to be, [sp - 8] = ip and [sp - 16] = flags, and in the place of the saved flags sp - 16.
Where the stack pointer stays as it was these are the places of continue and number: nothing
outside is touched. There is no red zone in a kernel, so it may go up, but not down.

Encodings: Intel SDM volume 2.
"""

from kprobes.arch.x86_64 import registers, site
from kprobes.units import Addr

SAVED = (*registers.GENERAL, "flags")
"""What the gate pushes, lowest address first."""

_PUSH = bytes.fromhex("9c 57 56 52 51 50 4150 4151 4152 4153 53 55 4154 4155 4156 4157")
_POP = bytes.fromhex("415f 415e 415d 415c 5d 5b 415b 415a 4159 4158 58 59 5a 5e 5f")
_CLD = b"\xfc"
_MOV_RDI_RSP = bytes.fromhex("4889e7")
_POP_RSP_POPFQ_RET_INT3 = bytes.fromhex("5c 9d c3 cc")


def gate(place: Addr, upcall: Addr) -> bytes:
    """Return the gate's code for ``place``; it calls ``upcall``, a C function."""
    code = _PUSH + _CLD + _MOV_RDI_RSP
    code += site.branch(site.CALL, Addr(place + len(code)), upcall)
    return code + _POP + _POP_RSP_POPFQ_RET_INT3
