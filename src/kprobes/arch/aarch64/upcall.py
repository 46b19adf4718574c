"""Code that hands a hit to the guest's ``upcall`` function and goes on as that says.

Who asks makes room for a frame, with every register and flag as the probed code has it, and calls
the entry stub with the upcall's number in x0 and the address that is to be shown in x1:

    [x0 ... x30] [pstate] [number] [address] | the probed code's stack

Of it the asking code stores x0, x1 and x30, the entry stub the rest. ``upcall`` leaves there what
is to be loaded, and in the place of the number 0 when it goes on where it asked; else the stack
pointer that is to be, and in the place of the address where to go on. There is no way to branch
anywhere with all registers in use: x16 and x17 are lost then, which no call preserves.

Detours that ask Python, before the instruction and after it.

After an instruction what is shown is where that leads, so that Python sees its true result and the
true next address, whatever it was:

    b target              ask, showing target; b target
    b.cond, cbz, tbz      the same over what follows; ask, showing what is after; b after; ask,
                          showing target; b target
    bl target             x30 = ORIGINAL return address; ask, showing target; b target
    br xN, ret xN         ask, showing xN; its word
    blr xN                x30 = ORIGINAL return address; ask, showing xN; x16 = xN; br x16
    anything else         its copy; ask, showing what is after; b after

The asking code of each place goes on by itself, so that no address stands for another.
"""

from collections.abc import Callable, Mapping

from kprobes.arch.aarch64 import encode, trampoline
from kprobes.arch.aarch64.decode import Flow, Instruction, decode_one
from kprobes.arch.aarch64.encode import SP
from kprobes.arch.aarch64.insn import LINK, first_register, is_authenticated
from kprobes.arch.aarch64.slot import body, branch, branch_over, indirect_jump, set_register, slot
from kprobes.arch.aarch64.trampoline import calling, trampoline_call
from kprobes.errors import RefusedError
from kprobes.model.plan import Displaced
from kprobes.model.upcall import Detour, SiteUpcalls
from kprobes.units import Addr

SAVED = trampoline.SAVED
"""What is saved of a hit, lowest address first."""
_NUMBER_AT = 8 * len(SAVED)
_BACK, _STACK, _TARGET = 19, 16, 17


def ask(place: Addr, number: int, entry_stub: Addr, shown: Addr | int) -> bytes:
    """Return code for ``place`` that asks, and goes on after itself.

    Args:
        place: where it will be.
        number: of what it asks.
        entry_stub: where all code asks.
        shown: the address that is shown.
    """
    return _ask(place, number, entry_stub, encode.move_number(1, shown))


def ask_by_register(place: Addr, number: int, entry_stub: Addr, register: int) -> bytes:
    """Return the same where a register has the address that is shown."""
    return _ask(place, number, entry_stub, encode.mov(1, register))


def entry_stub(place: Addr, upcall: Addr) -> bytes:
    """Return the entry stub's code for ``place``; it calls ``upcall``, a C function."""
    code = b"".join(encode.stp(n, n + 1, 8 * n) for n in range(2, LINK, 2))
    code += encode.stp(0, 1, _NUMBER_AT)
    code += encode.read_nzcv(0) + encode.store(0, trampoline.PSTATE_AT)
    # mov x0, sp
    code += encode.mov(_BACK, LINK) + encode.add(0, SP, 0)
    code += encode.bl(Addr(place + len(code)), upcall)
    code += encode.mov(LINK, _BACK) + encode.ldp(_STACK, _TARGET, _NUMBER_AT)
    code += trampoline.restore_flags()
    elsewhere = _elsewhere()
    is_here = encode.cbz(_STACK, len(elsewhere))
    return code + is_here + elsewhere + trampoline.restore(range(LINK)) + encode.ret()


def _ask(place: Addr, number: int, entry_stub: Addr, show: bytes) -> bytes:
    code = encode.stp_down(0, 1, trampoline.FRAME_SIZE) + encode.store(LINK, trampoline.LINK_AT)
    code += show + encode.movz(0, number)
    code += encode.bl(Addr(place + len(code)), entry_stub)
    return code + encode.load(LINK, trampoline.LINK_AT) + trampoline.drop()


def _elsewhere() -> bytes:
    code = trampoline.restore(range(_STACK)) + trampoline.restore(range(_TARGET + 1, LINK))
    # mov sp, x16
    return (
        code
        + encode.load(LINK, trampoline.LINK_AT)
        + encode.add(SP, _STACK, 0)
        + encode.ret(_TARGET)
    )


_X9 = 9


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
    # The probed code has the caller's address in x30.
    code = encode.mov(LINK, _X9)
    if probes is not None:
        code += calling(Addr(place + len(code)), probes, skips=skips)
    if upcalls.before is not None:
        shown = after - trampoline.SIZE
        code += ask(Addr(place + len(code)), upcalls.before, upcalls.entry_stub, shown)
    if upcalls.after is not None:
        code += ask(Addr(place + len(code)), upcalls.after, upcalls.entry_stub, after)
    return Detour(code=code + branch(Addr(place + len(code)), after), copies={})


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
        RefusedError: too far from what an instruction names, or nothing can come after it.
    """
    instruction = decode_one(displaced.code, displaced.addr)
    code = b"" if probes is None else calling(place, probes, skips=skips)
    if upcalls.before is not None:
        at = Addr(place + len(code))
        code += ask(at, upcalls.before, upcalls.entry_stub, instruction.addr)
    at = Addr(place + len(code))
    if upcalls.after is None:
        code += slot(instruction, at)
    else:
        made = _ENDS.get(instruction.flow, _through)
        code += made(instruction, at, _Asker(upcalls.after, upcalls.entry_stub))
    return Detour(code=code, copies={})


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
        code += ask(Addr(place + len(code)), upcalls.before, upcalls.entry_stub, shown)
    return Detour(code=code + encode.ret(), copies={})


class _Asker:
    def __init__(self, number: int, entry_stub: Addr) -> None:
        self._number, self._entry_stub = number, entry_stub

    def and_go(self, at: Addr, target: Addr) -> bytes:
        code = ask(at, self._number, self._entry_stub, target)
        return code + branch(Addr(at + len(code)), target)

    def by_register(self, at: Addr, register: int) -> bytes:
        return ask_by_register(at, self._number, self._entry_stub, register)


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
        raise RefusedError(f"{instruction.addr:#x} calls by x30: no handler can come after it")
    code = set_register(LINK, instruction.next, at)
    code += asker.by_register(Addr(at + len(code)), register)
    return code + indirect_jump(instruction)


def _register(instruction: Instruction) -> int:
    if is_authenticated(instruction.word):
        raise RefusedError(
            f"{instruction.addr:#x} checks an address and goes there: no handler can come after it"
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
