"""Instructions in detours that ask Python before and after them, beside the same in place.

The entry stub answers at once with nothing changed: it drops the number and goes on.
"""

from collections.abc import Sequence

from kprobes.arch.x86_64.insn import Instruction
from kprobes.arch.x86_64.upcall import at_instruction
from kprobes.model.plan import Displaced
from kprobes.model.upcall import Detour, SiteUpcalls
from kprobes.units import Addr
from tests.build.emulator import GENERAL, SLOT, Emulator, Outcome
from tests.build.text import START

_ENTRY_STUB = SLOT + 0x200
# lea rsp, [rsp+8]; ret
_ANSWER = bytes.fromhex("488d642408 c3")
_SP = GENERAL.index("RSP")
_POOL = 1 << 16
_BELOW = 24


def detour_of(instructions: Sequence[Instruction], *, before: int | None = None) -> Detour:
    """Return a detour for SLOT that asks after the first instruction, and perhaps before it."""
    displaced = Displaced(
        addr=instructions[0].addr,
        code=b"".join(each.code for each in instructions),
        count=len(instructions),
        stop=instructions[-1].next,
    )
    upcalls = SiteUpcalls(entry_stub=Addr(_ENTRY_STUB), before=before, after=2)
    return at_instruction(Addr(SLOT), None, upcalls, displaced)


def run_both(
    emulator: Emulator, instructions: Sequence[Instruction], state: int
) -> tuple[Outcome, Outcome]:
    """Run instructions in place and in a detour that asks after the first."""
    code = b"".join(each.code for each in instructions)
    detour = detour_of(instructions).code
    assert len(detour) <= _ENTRY_STUB - SLOT
    blob = detour.ljust(_ENTRY_STUB - SLOT, b"\xcc") + _ANSWER
    place = (int(instructions[0].addr), code)
    return emulator.run(place, blob, state=state, is_one=len(instructions) == 1)


def is_same(here: Outcome, there: Outcome) -> bool:
    """Whether both left the same, but for what lies dead below the stack pointer."""
    if here.fault or there.fault:
        return bool(here.fault) == bool(there.fault)
    if (here.registers, here.next) != (there.registers, there.next):
        return False
    sp = here.registers[_SP]
    return _without_dead(here.data, sp) == _without_dead(there.data, sp)


def is_done(here: Outcome) -> bool:
    """Whether an instruction is over, and left a stack that something can be pushed to.

    A repeated one may stop in the middle, and random bytes may be loaded as stack pointer.
    """
    canonical = here.registers[_SP] + (1 << 47) & (1 << 64) - 1 < 1 << 48
    return here.next != START and canonical


def _without_dead(data: bytes, sp: int) -> bytes:
    left = bytearray(data)
    for at in range(sp - _BELOW, sp):
        left[at % _POOL] = 0
    return bytes(left)
