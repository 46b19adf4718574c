"""The x86-64 ftrace site: five bytes at a function's start, and the code that they call.

Encodings: Intel SDM volume 2, CALL and JMP.
"""

from collections.abc import Collection

from kprobes.arch.making import Restored
from kprobes.units import Addr

SIZE = 5
NOPS = (bytes.fromhex("0f1f440000"), bytes.fromhex("6666666690"))
"""The kernel's five-byte nops: since 5.13, and before."""

CALL, JMP = 0xE8, 0xE9
ENDBR64 = bytes.fromhex("f30f1efa")

SAVED = ("r15", "r14", "r13", "r12", "r11", "r10", "bp", "bx", "ax", "flags")
"""What ``entry`` pushes, lowest address first."""

# pushfq; push rax, rbx, rbp, r10, r11, r12, r13, r14, r15
PUSH_SAVED = bytes.fromhex("9c 50 53 55 4152 4153 4154 4155 4156 4157")
# The code called leaves r12-r15, rbx and rbp alone and preserves r10: only r11, rax and the
# flags must come back.  add rsp, 32; pop r11; add rsp, 24; pop rax; popfq
_POP = bytes.fromhex("4883c420 415b 4883c418 58 9d")
# popfq costs an emulated guest more than all the rest. mov r11, [rsp+32]; mov eax, [rsp+72];
# xchg al, ah; and al, 8; add al, 0x78, which overflows as the saved flags did; sahf, for the
# other five; mov rax, [rsp+64]; lea rsp, [rsp+80]
_POP_ARITHMETIC = bytes.fromhex("4c8b5c2420 8b442448 86c4 2408 0478 9e 488b442440 488d642450")
_RET = b"\xc3"


def branch(opcode: int, place: Addr, target: Addr) -> bytes:
    """Return a five-byte call or jump from ``place`` to ``target``.

    Raises:
        ValueError: the target is out of a 32-bit displacement's reach.
    """
    displacement = target - (place + SIZE)
    if not -(1 << 31) <= displacement < 1 << 31:
        raise ValueError(f"{target:#x} cannot be reached from {place:#x}")
    return bytes([opcode]) + displacement.to_bytes(4, "little", signed=True)


def call(place: Addr, target: Addr) -> bytes:
    """Return the bytes that call ``target`` from a site."""
    return branch(CALL, place, target)


def call_target(place: Addr, code: bytes) -> Addr | None:
    """Return where a site calls, or None when it does not hold a call."""
    return _target(CALL, place, code)


def jump_target(place: Addr, code: bytes) -> Addr | None:
    """Return where a five-byte jump leads, or None when it is none."""
    return _target(JMP, place, code)


def saving_call(place: Addr, body: Addr, flags: Restored = Restored.ALL) -> bytes:
    """Return code for ``place`` that pushes SAVED, calls ``body`` and restores all of them."""
    pop = _POP if flags is Restored.ALL else _POP_ARITHMETIC
    return PUSH_SAVED + branch(CALL, Addr(place + len(PUSH_SAVED)), body) + pop


def entry(
    place: Addr,
    body: Addr,
    /,
    *,
    flags: Restored = Restored.ALL,
    reads: Collection[str] | None = None,
) -> bytes:
    """Return code for ``place`` that saves the registers a body cannot get as parameters.

    It pushes SAVED, calls ``body``, restores, and returns to the site.
    """
    # A body that reads none of them is called without this code.
    del reads
    return saving_call(place, body, flags) + _RET


def _target(opcode: int, place: Addr, code: bytes) -> Addr | None:
    if len(code) != SIZE or code[0] != opcode:
        return None
    return Addr(place + SIZE + int.from_bytes(code[1:], "little", signed=True) & (1 << 64) - 1)
