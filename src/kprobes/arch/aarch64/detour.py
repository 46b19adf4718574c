"""Code that a patched instruction leads to: the probes of the site, then what was displaced.

Entered by a branch, with every register and flag as the instruction would find them; left the same
way for whatever follows. One word is patched, and one instruction displaced.
"""

from kprobes.arch.aarch64 import encode, site
from kprobes.arch.aarch64.decode import decode_one
from kprobes.arch.aarch64.slot import branch, branch_over, slot
from kprobes.arch.making import Restored
from kprobes.model.plan import Displaced
from kprobes.units import Addr

LANDING = encode.BTI_C
TRAMPOLINE_MARK = LANDING + site.save(encode.LINK)[: encode.SIZE]
"""A trampoline's first bytes: what a call of ours returns to begins otherwise."""
_STUB = len(LANDING)


def detour(
    place: Addr, body: Addr, displaced: Displaced, /, *, flags: Restored = Restored.ALL
) -> bytes:
    """Return code for ``place`` that calls ``body``, then runs what was displaced.

    Raises:
        RefusedError: too far from what an instruction names.
    """
    del flags
    saved = calling(place, body)
    return saved + slot(decode_one(displaced.code, displaced.addr), Addr(place + len(saved)))


def trampoline(place: Addr, body: Addr, /, *, flags: Restored = Restored.ALL) -> bytes:
    """Return code for ``place`` that a function returns to, whose return address is taken over.

    It calls ``body``, which puts the return address into x30's place, and returns.
    """
    del flags
    return landing(place, body) + encode.ret()


def landing(place: Addr, body: Addr) -> bytes:
    """Return a trampoline without its return."""
    return LANDING + calling(Addr(place + _STUB), body)


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


def calling(place: Addr, body: Addr) -> bytes:
    """Return code for ``place`` that calls ``body`` with every register saved, and goes on."""
    return site.saving_call(place, body) + site.drop()
