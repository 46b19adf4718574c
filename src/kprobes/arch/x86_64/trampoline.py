"""Code that a patched instruction leads to: the probes of the site, then what was displaced.

Entered by a jump, or by our breakpoint callback, with every register and flag as the instruction
would find them; left the same way for whatever follows. Encodings: Intel SDM volume 2.
"""

from collections.abc import Callable, Sequence

from kprobes.arch.arch import Restored
from kprobes.arch.x86_64 import slot
from kprobes.arch.x86_64.decode import decode_function, decode_one
from kprobes.arch.x86_64.insn import Instruction
from kprobes.arch.x86_64.slot import branch_over, slots
from kprobes.arch.x86_64.verdict import insn_verdict, jump_run
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Displaced, PatchOptions
from kprobes.units import Addr

BREAKPOINT = b"\xcc"
TRAP_PATH = frozenset(
    {
        "do_int3",
        "notify_die",
        "atomic_notifier_call_chain",
        "notifier_call_chain",
        "__rcu_read_lock",
        "__rcu_read_unlock",
        "rcu_read_unlock_special",
        "rcu_read_unlock_strict",
        "kprobe_exceptions_notify",
        "hw_breakpoint_exceptions_notify",
    }
)
"""What runs between a breakpoint's exception and our callback, and is not forbidden anyway.

A kernel without kprobes has no blacklist, which would have ``do_int3``.

``rcu_read_unlock_special`` calls nothing there: it returns at once in an NMI's context, which a
breakpoint's is. How the list was found: docs/internals/patching.md;
tests/system/test_trap_path.py does it again.
"""

# push 0: where a site's call has its return address. lea rsp, [rsp+8] leaves the flags alone.
_PUSH = bytes.fromhex("6a00")
_DROP = bytes.fromhex("488d642408")
_RET_INT3 = bytes.fromhex("c3cc")
TRAMPOLINE_MARK = (_PUSH + slot.PUSH_SAVED)[:8]
"""A trampoline's first bytes: nothing after a call of ours pushes a zero."""


def jump(place: Addr, target: Addr) -> bytes:
    """Return the bytes that jump from a site to its detour."""
    return slot.branch(slot.JMP, place, target)


def first(code: bytes) -> int:
    """Return the offset of a function's first instruction that can be probed.

    Indirect branches land on endbr64, which must stay: arch_adjust_kprobe_addr().
    """
    return len(slot.ENDBR64) if code.startswith(slot.ENDBR64) else 0


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

    The stack is as at an ftrace site, with a word where that has its return address. Where it
    ``skips`` and the body returns 1, the function returns to its caller instead.

    Raises:
        RefusedError: too far from what an instruction names.
    """
    saved = trampoline_call(place, body, flags, skips=skips) + _DROP
    return saved + slots(_instructions(displaced), Addr(place + len(saved)))


def trampoline(place: Addr, body: Addr, /, *, flags: Restored = Restored.ALL) -> bytes:
    """Return code for ``place`` that a function returns to, whose return address is taken over.

    It pushes a word where that was, calls ``body``, which puts the return address there, and
    returns. The stack is as at an ftrace site, with that word where it has its return address.
    """
    return trampoline_call(place, body, flags) + _RET_INT3


def trampoline_call(
    place: Addr, body: Addr, flags: Restored = Restored.ALL, *, skips: bool = False
) -> bytes:
    """Return a trampoline without its return; see ``slot.saving_call``."""
    return _PUSH + slot.saving_call(Addr(place + len(_PUSH)), body, flags, skips=skips)


def branch_detour(
    place: Addr,
    probes_body: Addr | None,
    tail_body: Addr,
    displaced: Displaced,
    /,
    *,
    flags: Restored = Restored.ALL,
) -> bytes:
    """Return code for ``place`` that calls a body only where a conditional jump is taken.

    Args:
        place: where it will be.
        probes_body: called in any case before, or None.
        tail_body: called when the jump, which is the first of what is displaced, is taken.
        displaced: what then runs.
        flags: what of them both bodies may have changed.

    Raises:
        RefusedError: too far from what an instruction names.
    """
    code = b"" if probes_body is None else _calling(place, probes_body, flags)
    first, *rest = _instructions(displaced)
    at = Addr(place + len(code))
    following = Addr(at + len(branch_over(first, at, 0)))
    stay = slots(tuple(rest), following) if rest else jump(following, first.next)
    code += branch_over(first, at, len(stay)) + stay
    code += _calling(Addr(place + len(code)), tail_body, flags)
    target = decode_one(first.code, first.addr).near_branch_target
    return code + jump(Addr(place + len(code)), Addr(target))


def _calling(place: Addr, body: Addr, flags: Restored) -> bytes:
    # The stack is as at an ftrace site, with a word where that has its return address.
    return trampoline_call(place, body, flags) + _DROP


def examine(
    name: str, parts: Sequence[TextPart], tables: TextTables
) -> Callable[[Addr], PatchOptions]:
    """Return what tells how a function's instructions may be patched."""
    function = decode_function(name, parts, tables)

    def options(addr: Addr) -> PatchOptions:
        slot_verdict = insn_verdict(function, addr, tables)
        is_boundary = slot_verdict.instruction is not None
        if slot_verdict.instruction is None or slot_verdict.is_refused:
            return PatchOptions(
                breakpoint=slot_verdict.why, jump=slot_verdict.why, is_boundary=is_boundary
            )
        try:
            run = jump_run(function, addr, tables)
            by_jump = _displaced(run.instructions, run.stop)
        except RefusedError as error:
            by_jump = str(error)
        return PatchOptions(
            breakpoint=alone(slot_verdict.instruction), jump=by_jump, is_boundary=True
        )

    def alone(instruction: Instruction) -> Displaced | str:
        if name in TRAP_PATH:
            return "our own breakpoints come through it, and would come for ever"
        return _displaced((instruction,), instruction.next)

    return options


def _displaced(instructions: Sequence[Instruction], stop: Addr) -> Displaced:
    return Displaced(
        addr=instructions[0].addr,
        code=b"".join(instruction.code for instruction in instructions),
        count=len(instructions),
        stop=stop,
    )


def _instructions(displaced: Displaced) -> tuple[Instruction, ...]:
    part = TextPart(addr=displaced.addr, code=displaced.code)
    return tuple(decode_function("", (part,)).instructions.values())
