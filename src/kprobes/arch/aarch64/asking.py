"""Detours that ask Python, before the instruction and behind it.

Behind an instruction what is shown is where that leads, so that Python sees its true result and the
true next address, whatever it was:

    b target              ask, showing target; b target
    b.cond, cbz, tbz      the same over what follows; ask, showing what is behind; b behind; ask,
                          showing target; b target
    bl target             x30 = ORIGINAL return address; ask, showing target; b target
    br xN, ret xN         ask, showing xN; its word
    blr xN                x30 = ORIGINAL return address; ask, showing xN; br xN
    anything else         its copy; ask, showing what is behind; b behind

The asking code of each place goes on by itself, so that no address stands for another.
"""

from collections.abc import Callable, Mapping

from kprobes.arch.aarch64 import encode, site
from kprobes.arch.aarch64.decode import decode_one
from kprobes.arch.aarch64.detour import calling, landing
from kprobes.arch.aarch64.function import Flow, Instruction
from kprobes.arch.aarch64.slot import body, branch, branch_over, indirect_jump, set_register, slot
from kprobes.arch.aarch64.upcall import ask, ask_by_register
from kprobes.arch.aarch64.words import LINK, first_register, is_authenticated
from kprobes.errors import RefusedError
from kprobes.model.plan import Displaced
from kprobes.model.upcall import Detour, Questions
from kprobes.units import Addr

_X9 = 9


def at_call(place: Addr, probes: Addr | None, questions: Questions, after: Addr) -> Detour:
    """Return code for ``place``, which an ftrace site calls.

    Args:
        place: where it will be.
        probes: the compiled probes' code, which comes first, or None.
        questions: what it asks.
        after: where the site's call returns to.
    """
    # The probed code has the caller's address in x30.
    code = encode.mov(LINK, _X9)
    if probes is not None:
        code += calling(Addr(place + len(code)), probes)
    if questions.before is not None:
        shown = after - site.SIZE
        code += ask(Addr(place + len(code)), questions.before, questions.gate, shown)
    if questions.after is not None:
        code += ask(Addr(place + len(code)), questions.after, questions.gate, after)
    return Detour(code=code + branch(Addr(place + len(code)), after), copies={})


def at_instruction(
    place: Addr, probes: Addr | None, questions: Questions, displaced: Displaced
) -> Detour:
    """Return code for ``place``, where a patch leads with every register as the site has it.

    Raises:
        RefusedError: too far from what an instruction names, or nothing can come behind it.
    """
    instruction = decode_one(displaced.code, displaced.addr)
    code = b"" if probes is None else calling(place, probes)
    if questions.before is not None:
        at = Addr(place + len(code))
        code += ask(at, questions.before, questions.gate, instruction.addr)
    at = Addr(place + len(code))
    if questions.after is None:
        code += slot(instruction, at)
    else:
        made = _ENDS.get(instruction.flow, _through)
        code += made(instruction, at, _Asker(questions.after, questions.gate))
    return Detour(code=code, copies={})


def at_landing(place: Addr, body: Addr, questions: Questions, shown: Addr) -> Detour:
    """Return a trampoline for ``place`` that asks before it returns.

    Args:
        place: where it will be.
        body: what it calls first, which puts the return address back.
        questions: what it asks, all of it before.
        shown: the return instruction that there seems to be.
    """
    code = landing(place, body)
    if questions.before is not None:
        code += ask(Addr(place + len(code)), questions.before, questions.gate, shown)
    return Detour(code=code + encode.ret(), copies={})


class _Asker:
    def __init__(self, number: int, gate: Addr) -> None:
        self._number, self._gate = number, gate

    def and_go(self, at: Addr, target: Addr) -> bytes:
        code = ask(at, self._number, self._gate, target)
        return code + branch(Addr(at + len(code)), target)

    def by_register(self, at: Addr, register: int) -> bytes:
        return ask_by_register(at, self._number, self._gate, register)


def _through(instruction: Instruction, at: Addr, asker: _Asker) -> bytes:
    code = body(instruction, at)
    return code + asker.and_go(Addr(at + len(code)), instruction.next)


def _jump(instruction: Instruction, at: Addr, asker: _Asker) -> bytes:
    return asker.and_go(at, _target(instruction))


def _branch(instruction: Instruction, at: Addr, asker: _Asker) -> bytes:
    fall = asker.and_go(Addr(at + encode.SIZE), instruction.next)
    code = branch_over(instruction, len(fall)) + fall
    return code + asker.and_go(Addr(at + len(code)), _target(instruction))


def _call(instruction: Instruction, at: Addr, asker: _Asker) -> bytes:
    code = set_register(LINK, instruction.next, at)
    return code + asker.and_go(Addr(at + len(code)), _target(instruction))


def _leave(instruction: Instruction, at: Addr, asker: _Asker) -> bytes:
    return asker.by_register(at, _register(instruction)) + instruction.code


def _indirect_call(instruction: Instruction, at: Addr, asker: _Asker) -> bytes:
    register = _register(instruction)
    if register == LINK:
        raise RefusedError(f"{instruction.addr:#x} calls by x30: no handler can come behind it")
    code = set_register(LINK, instruction.next, at)
    code += asker.by_register(Addr(at + len(code)), register)
    return code + indirect_jump(instruction)


def _register(instruction: Instruction) -> int:
    if is_authenticated(instruction.word):
        raise RefusedError(
            f"{instruction.addr:#x} checks an address and goes there: no handler can come behind it"
        )
    return first_register(instruction.word)


def _target(instruction: Instruction) -> Addr:
    assert instruction.target is not None
    return instruction.target


_ENDS: Mapping[Flow, Callable[[Instruction, Addr, _Asker], bytes]] = {
    Flow.JUMP: _jump,
    Flow.BRANCH: _branch,
    Flow.CALL: _call,
    Flow.INDIRECT_JUMP: _leave,
    Flow.RETURN: _leave,
    Flow.INDIRECT_CALL: _indirect_call,
}
