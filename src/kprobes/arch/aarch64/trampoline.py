"""The arm64 ftrace site, and the code that it calls.

A function begins with two words for the tracer, after a ``bti c`` if it has one (kernel:
arch/arm64/kernel/ftrace.c, ftrace_init_nop and ftrace_make_call):

    mov x9, x30         since boot
    nop                 the site; ``bl T`` while traced

Since 6.3 (CONFIG_DYNAMIC_FTRACE_WITH_CALL_OPS) a pointer to an ftrace_ops is in front of the
function, by which the kernel's own tracer finds whom a call is for. T does not ask it.

T finds the caller's return address in x9, where it goes on in x30, and x10 to x17 dead. It saves

    [x0 ... x30] [pstate] [where to go on] [-] | the probed code's stack

with the caller's address in the place of x30, and calls the probes' code, which may put another one
there. Of pstate only the condition flags are saved: nothing changes the rest. Where T goes back to
the site, only what the function is given (x0 to x8) and what the probes' code reads is saved, at
the same places: the rest is dead there, flags included, or kept by that code. x18 is either the
shadow call stack, which guest functions that are called leave as it was, or dead. So does the
kernel's own tracer (arch/arm64/kernel/entry-ftrace.S).

Code that a patched instruction leads to: the probes of the site, then what was displaced.

Entered by a branch, with every register and flag as the instruction would find them; left the same
way for whatever follows. One word is patched, and one instruction displaced.
"""

from collections.abc import Collection

from kprobes.arch.aarch64 import encode
from kprobes.arch.aarch64.decode import decode_one
from kprobes.arch.aarch64.encode import SP
from kprobes.arch.aarch64.insn import LINK
from kprobes.arch.aarch64.slot import branch, branch_over, slot
from kprobes.arch.arch import Restored
from kprobes.model.plan import Displaced
from kprobes.units import Addr

SIZE = encode.SIZE
NOPS = (encode.NOP,)
OFFSETS = (4, 8)
GENERAL = tuple(f"x{n}" for n in range(31))
SAVED = (*GENERAL, "pstate")
"""What all saving code keeps, lowest address first."""
ABOVE = 16
FRAME_SIZE = 8 * len(SAVED) + ABOVE

LINK_AT, PSTATE_AT = 8 * LINK, 8 * len(GENERAL)
_GO_ON_AT = 8 * len(SAVED)
_CHANGED = 18
"""The last register that a C function may change, x30 aside; x18 is its own matter."""
_X9 = 9
_GIVEN = GENERAL[:_X9]
"""Arguments, and where a large result is to be."""


def saving_call(place: Addr, body: Addr, *, skips: bool = False) -> bytes:
    """Return code for ``place`` that saves all registers, calls ``body`` and restores them.

    The probed code's stack pointer is FRAME_SIZE above the lowest: it does not go back. Where it
    ``skips`` and the body returns 1, the function returns to its caller instead.
    """
    code = save(LINK)
    code += encode.bl(Addr(place + len(code)), body) + (_skip() if skips else b"")
    code += restore_flags() + restore(range(_CHANGED + 1))
    return code + encode.load(LINK, LINK_AT)


def _skip() -> bytes:
    # Where the body's result is 1 the call is skipped: its caller goes on, with what the body has
    # left in x0's place. What a function must leave alone the body has left alone.
    code = encode.load(0, 0) + encode.load(LINK, LINK_AT) + drop() + encode.ret()
    return encode.cbz(0, len(code)) + code


def drop() -> bytes:
    """Return code that gives the frame's part of the stack back."""
    return encode.add(SP, SP, FRAME_SIZE)


def save(link: int, kept: Collection[str] = SAVED) -> bytes:
    """Return code that makes a frame, with the register that has the caller's address.

    Args:
        link: that register.
        kept: what is to be in it besides.
    """
    code = encode.stp_down(0, 1, FRAME_SIZE)
    pairs = [n for n in range(2, LINK, 2) if not {GENERAL[n], GENERAL[n + 1]}.isdisjoint(kept)]
    code += b"".join(encode.stp(n, n + 1, 8 * n) for n in pairs)
    if "pstate" not in kept:
        return code + encode.store(link, LINK_AT)
    code += encode.read_nzcv(0)
    return code + encode.stp(link, 0, LINK_AT)


def restore_flags() -> bytes:
    """Return code that restores the condition flags, and changes x0."""
    return encode.load(0, PSTATE_AT) + encode.write_nzcv(0)


def restore(registers: range) -> bytes:
    """Return code that restores registers from an even one on."""
    pairs = [n for n in registers if n % 2 == 0 and n + 1 in registers]
    code = b"".join(encode.ldp(n, n + 1, 8 * n) for n in pairs)
    last = registers[-1]
    return code if last % 2 else code + encode.load(last, 8 * last)


def entry(
    place: Addr,
    body: Addr,
    /,
    *,
    flags: Restored = Restored.ALL,
    reads: Collection[str] | None = None,
    skips: bool = False,
) -> bytes:
    """Return code for ``place``, which a site calls; see the module.

    It goes on after the site, with all that is not dead there as the site had it; but for a return
    address that ``body`` has put in the place of the caller's. Where it ``skips`` and the body
    returns 1, it goes there.
    """
    # There is no cheaper way to restore fewer of them.
    del flags
    is_whole = reads is None
    code = save(_X9, SAVED if is_whole else {*_GIVEN, *(reads or ())})
    code += encode.store(LINK, _GO_ON_AT)
    code += encode.bl(Addr(place + len(code)), body) + (_skip() if skips else b"")
    code += restore_flags() + restore(range(_CHANGED + 1)) if is_whole else restore(range(_X9))
    code += encode.load(LINK, LINK_AT)
    return code + encode.load(_X9, _GO_ON_AT) + drop() + encode.ret(_X9)


LANDING_PAD = encode.BTI_C
TRAMPOLINE_MARK = LANDING_PAD + save(encode.LINK)[: encode.SIZE]
"""A trampoline's first bytes: what a call of ours returns to begins otherwise."""
_STUB = len(LANDING_PAD)


def detour(
    place: Addr,
    body: Addr,
    displaced: Displaced,
    /,
    *,
    flags: Restored = Restored.ALL,
    skips: bool = False,
) -> bytes:
    """Return code for ``place`` that calls ``body``, then runs what was displaced.

    Where it ``skips`` and the body returns 1, the function returns to its caller instead.

    Raises:
        RefusedError: too far from what an instruction names.
    """
    del flags
    saved = calling(place, body, skips=skips)
    return saved + slot(decode_one(displaced.code, displaced.addr), Addr(place + len(saved)))


def trampoline(place: Addr, body: Addr, /, *, flags: Restored = Restored.ALL) -> bytes:
    """Return code for ``place`` that a function returns to, whose return address is taken over.

    It calls ``body``, which puts the return address into x30's place, and returns.
    """
    del flags
    return trampoline_call(place, body) + encode.ret()


def trampoline_call(place: Addr, body: Addr) -> bytes:
    """Return a trampoline without its return."""
    return LANDING_PAD + calling(Addr(place + _STUB), body)


def branch_detour(
    place: Addr,
    probes_body: Addr | None,
    tail_body: Addr,
    displaced: Displaced,
    /,
    *,
    flags: Restored = Restored.ALL,
) -> bytes:
    """Return code for ``place`` that calls a body only where a conditional branch is taken.

    Args:
        place: where it will be.
        probes_body: called in any case before, or None.
        tail_body: called when the branch is taken.
        displaced: the branch.
        flags: what of them both bodies may have changed: all is restored.

    Raises:
        RefusedError: too far from what the branch names.
    """
    del flags
    code = b"" if probes_body is None else calling(place, probes_body)
    instruction = decode_one(displaced.code, displaced.addr)
    code += branch_over(instruction, encode.SIZE)
    code += branch(Addr(place + len(code)), instruction.next)
    code += calling(Addr(place + len(code)), tail_body)
    assert instruction.target is not None
    return code + branch(Addr(place + len(code)), instruction.target)


def calling(place: Addr, body: Addr, *, skips: bool = False) -> bytes:
    """Return code for ``place`` that calls ``body`` with every register saved, and goes on.

    Args:
        place: where it will be.
        body: what it calls.
        skips: as of ``saving_call``.
    """
    return saving_call(place, body, skips=skips) + drop()
