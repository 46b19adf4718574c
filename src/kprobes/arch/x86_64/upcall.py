"""Code that hands a hit to the guest's ``upcall`` function and goes on as that says.

A detour comes to the entry stub by ``push CONTINUE; push NUMBER; jmp STUB``, with every register
and flag as the probed code has it. The entry stub pushes SAVED on top and calls ``upcall`` with the
address of the lowest of them:

    [r15 ... di] [flags] [number] [continue] | the probed code's stack

``upcall`` leaves there what is to be loaded: for the stack pointer and instruction pointer that
are to be, [sp - 8] = ip and [sp - 16] = flags, and in the place of the saved flags sp - 16.
Where the stack pointer stays as it was these are the places of continue and number: nothing
outside is touched. There is no red zone in a kernel, so it may go up, but not down.

Encodings: Intel SDM volume 2.

Detours that ask Python, before the instruction and after it.

To ask is ``push CONTINUE; push NUMBER; jmp STUB``. After an instruction CONTINUE is where that
leads, so that Python sees its true result and the true next address, whatever it was:

    jmp target            ask to go on at target
    jcc target            jcc T; ask to go on after it; T: ask to go on at target
    loop, jrcxz           likewise
    call target           push ORIGINAL return address; ask to go on at target
    call/jmp reg or mem   (push ORIGINAL return address;) push what it names; push NUMBER; jmp STUB
    ret                   push NUMBER; jmp STUB: where it goes on is on the stack
    anything else         its copy; ask to go on after it

Of several instructions that a jump displaces only the first is asked about. Encodings: Intel SDM
volume 2.
"""

from collections.abc import Callable, Mapping

from iced_x86 import Code, FlowControl
from iced_x86 import Instruction as Decoded
from msgspec import Struct

from kprobes.arch.x86_64 import registers, slot
from kprobes.arch.x86_64.decode import decode_function, decode_one
from kprobes.arch.x86_64.insn import Instruction
from kprobes.arch.x86_64.slot import body, branch_over, control, push, slots, through
from kprobes.arch.x86_64.trampoline import trampoline_call
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart
from kprobes.model.plan import Displaced
from kprobes.model.upcall import Detour, SiteUpcalls
from kprobes.units import Addr

SAVED = (*registers.GENERAL, "flags")
"""What the entry stub pushes, lowest address first."""

_PUSH = bytes.fromhex("9c 57 56 52 51 50 4150 4151 4152 4153 53 55 4154 4155 4156 4157")
_POP = bytes.fromhex("415f 415e 415d 415c 5d 5b 415b 415a 4159 4158 58 59 5a 5e 5f")
_CLD = b"\xfc"
_MOV_RDI_RSP = bytes.fromhex("4889e7")
_POP_RSP_POPFQ_RET_INT3 = bytes.fromhex("5c 9d c3 cc")


def entry_stub(place: Addr, upcall: Addr) -> bytes:
    """Return the entry stub's code for ``place``; it calls ``upcall``, a C function."""
    code = _PUSH + _CLD + _MOV_RDI_RSP
    code += slot.branch(slot.CALL, Addr(place + len(code)), upcall)
    return code + _POP + _POP_RSP_POPFQ_RET_INT3


_DROP = bytes.fromhex("488d642408")
"""lea rsp, [rsp+8], which leaves flags alone."""
_RET_INT3 = bytes.fromhex("c3cc")


def at_call(
    place: Addr,
    probes: Addr | None,
    upcalls: SiteUpcalls,
    after: Addr,
    *,
    skips: bool = False,
) -> Detour:
    """Return code for ``place``, which an ftrace site calls.

    Args:
        place: where it will be.
        probes: the compiled probes' code, which comes first, or None.
        upcalls: what it asks.
        after: where the site's call returns to.
        skips: whether the function returns to its caller at once where ``probes`` returns 1.
    """
    code = b"" if probes is None else slot.saving_call(place, probes, skips=skips)
    # The probed code's stack has no return address of ours.
    code += _DROP
    copies: dict[Addr, Addr] = {}
    if upcalls.before is not None:
        code += _ask_here(Addr(place + len(code)), upcalls.before, upcalls.entry_stub)
        copies[Addr(after - slot.SIZE)] = Addr(place + len(code))
    if upcalls.after is not None:
        code += _ask_here(Addr(place + len(code)), upcalls.after, upcalls.entry_stub)
        copies[after] = Addr(place + len(code))
    return Detour(code=code + _jump(Addr(place + len(code)), after), copies=copies)


def at_instruction(
    place: Addr,
    probes: Addr | None,
    upcalls: SiteUpcalls,
    displaced: Displaced,
    *,
    skips: bool = False,
) -> Detour:
    """Return code for ``place``, where a patch leads with every register as the site has it.

    Args:
        place: where it will be.
        probes: the compiled probes' code, which comes first, or None.
        upcalls: what it asks.
        displaced: what then runs.
        skips: whether the function returns to its caller at once where ``probes`` returns 1.

    Raises:
        RefusedError: too far from what an instruction names.
    """
    code = b""
    if probes is not None:
        # The stack as at an ftrace site, with a word where that has its return address.
        code = trampoline_call(place, probes, skips=skips) + _DROP
    if upcalls.before is not None:
        code += _ask_here(Addr(place + len(code)), upcalls.before, upcalls.entry_stub)
    first, *rest = _instructions(displaced)
    copies = {first.addr: Addr(place + len(code))}
    if upcalls.after is not None:
        code += _first(first, Addr(place + len(code)), upcalls, is_last=not rest)
    elif rest:
        code += body(first, Addr(place + len(code)))
    else:
        return Detour(code=code + slots((first,), Addr(place + len(code))), copies=copies)
    for index, each in enumerate(rest):
        at = Addr(place + len(code))
        copies[each.addr] = at
        is_last = index == len(rest) - 1
        code += slots((each,), at) if is_last else body(each, at)
    return Detour(code=code, copies=copies)


def at_trampoline(place: Addr, body: Addr, upcalls: SiteUpcalls, shown: Addr) -> Detour:
    """Return a trampoline for ``place`` that asks before it returns.

    Args:
        place: where it will be.
        body: what it calls first, which puts the return address back.
        upcalls: what it asks, all of it before.
        shown: the return instruction that there seems to be.
    """
    code = trampoline_call(place, body)
    if upcalls.before is not None:
        code += _ask_here(Addr(place + len(code)), upcalls.before, upcalls.entry_stub)
    copies = {shown: Addr(place + len(code))}
    return Detour(code=code + _RET_INT3, copies=copies)


def _first(instruction: Instruction, at: Addr, upcalls: SiteUpcalls, *, is_last: bool) -> bytes:
    asker = _Asker(number=upcalls.after or 0, entry_stub=upcalls.entry_stub)
    decoded = decode_one(instruction.code, instruction.addr)
    made = _ENDS.get(control(decoded))
    try:
        if made is not None:
            return made(instruction, decoded, at, asker)
        resume = instruction.next
        if not is_last:
            # How long it is does not depend on where that is.
            resume = Addr(at + len(_through(instruction, at, asker, at)))
        return _through(instruction, at, asker, resume)
    except ValueError as e:
        # iced says so of a displacement that does not fit.
        raise RefusedError(f"{at:#x} is too far from {instruction.addr:#x}") from e


class _Asker(Struct, frozen=True, kw_only=True):
    number: int
    entry_stub: Addr

    def ask(self, at: Addr, then: Addr) -> bytes:
        return push(then) + self.go(Addr(at + len(push(then))))

    def go(self, at: Addr) -> bytes:
        # Where to go on has been pushed.
        code = push(self.number)
        return code + _jump(Addr(at + len(code)), self.entry_stub)


def _through(instruction: Instruction, at: Addr, asker: _Asker, resume: Addr) -> bytes:
    # Falls through to `resume`; a branch that is taken comes after that.
    decoded = decode_one(instruction.code, instruction.addr)
    if control(decoded) != FlowControl.CONDITIONAL_BRANCH:
        code = body(instruction, at)
        return code + asker.ask(Addr(at + len(code)), resume)
    target = Addr(decoded.near_branch_target)
    size = len(branch_over(instruction, at, 0))
    fall = asker.ask(Addr(at + size), resume)
    code = branch_over(instruction, at, len(fall)) + fall
    return code + asker.ask(Addr(at + len(code)), target)


def _jump_away(instruction: Instruction, decoded: Decoded, at: Addr, asker: _Asker) -> bytes:
    del instruction
    return asker.ask(at, Addr(decoded.near_branch_target))


def _call(instruction: Instruction, decoded: Decoded, at: Addr, asker: _Asker) -> bytes:
    code = push(instruction.next)
    return code + asker.ask(Addr(at + len(code)), Addr(decoded.near_branch_target))


def _indirect_jump(instruction: Instruction, decoded: Decoded, at: Addr, asker: _Asker) -> bytes:
    del instruction
    code = through(decoded, at, to_stack=True, is_pushed=False)
    return code + asker.go(Addr(at + len(code)))


def _indirect_call(instruction: Instruction, decoded: Decoded, at: Addr, asker: _Asker) -> bytes:
    code = push(instruction.next)
    code += through(decoded, Addr(at + len(code)), to_stack=True, is_pushed=True)
    return code + asker.go(Addr(at + len(code)))


def _return(instruction: Instruction, decoded: Decoded, at: Addr, asker: _Asker) -> bytes:
    if decoded.code != Code.RETNQ:
        raise RefusedError(
            f"{instruction.addr:#x} returns and drops arguments: no handler can come after it"
        )
    return asker.go(at)


def _ask_here(at: Addr, number: int, entry_stub: Addr) -> bytes:
    asker = _Asker(number=number, entry_stub=entry_stub)
    return asker.ask(at, Addr(at + len(asker.ask(at, at))))


def _jump(at: Addr, target: Addr) -> bytes:
    try:
        return slot.branch(slot.JMP, at, target)
    except ValueError as e:
        raise RefusedError(f"code at {at:#x} is too far from {target:#x}") from e


def _instructions(displaced: Displaced) -> tuple[Instruction, ...]:
    part = TextPart(addr=displaced.addr, code=displaced.code)
    return tuple(decode_function("", (part,)).instructions.values())


_ENDS: Mapping[int, Callable[[Instruction, Decoded, Addr, _Asker], bytes]] = {
    FlowControl.UNCONDITIONAL_BRANCH: _jump_away,
    FlowControl.INDIRECT_BRANCH: _indirect_jump,
    FlowControl.CALL: _call,
    FlowControl.INDIRECT_CALL: _indirect_call,
    FlowControl.RETURN: _return,
}
