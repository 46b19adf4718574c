"""Code that begins somewhere to all of it that direct branches reach, and what it does to memory.

For code that was made while the kernel ran, which no symbol tells the size of.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from iced_x86 import (
    Code,
    Decoder,
    InstructionInfoFactory,
    MemorySizeExt,
    Mnemonic,
    OpAccess,
    OpKind,
    Register,
    RegisterExt,
)
from iced_x86 import Instruction as Decoded

from kprobes.arch.listed import Reach, Read
from kprobes.arch.reached import Led, Pieces, pieces_from, states_of
from kprobes.arch.x86_64.decode import decode_one
from kprobes.arch.x86_64.function import MAX_SIZE
from kprobes.errors import MemoryFault
from kprobes.units import U64, Addr

_ENDS = frozenset({Mnemonic.RET, Mnemonic.JMP, Mnemonic.INT3, Mnemonic.UD2, Mnemonic.IRETQ})
_BRANCHES = frozenset({OpKind.NEAR_BRANCH64, OpKind.NEAR_BRANCH32})
_CLOBBERED = frozenset(
    {
        Register.RAX,
        Register.RCX,
        Register.RDX,
        Register.RSI,
        Register.RDI,
        Register.R8,
        Register.R9,
        Register.R10,
        Register.R11,
    }
)
"""By a callee: System V AMD64 ABI, figure 3.4."""
_CHANGES = frozenset(
    {OpAccess.WRITE, OpAccess.READ_WRITE, OpAccess.COND_WRITE, OpAccess.READ_COND_WRITE}
)

_State = Mapping[int, tuple[int, Addr]]
"""Register to (bytes behind the window's start, where what is no constant was added)."""


def follow(read: Read, entry: int, inside: range) -> Pieces:
    """Return what can be reached from an address by direct branches and calls, as pieces.

    Args:
        read: memory.
        entry: of the code.
        inside: which addresses belong to it; what leads elsewhere is not followed.
    """
    return pieces_from(entry, inside, partial(_led, read, inside))


def _led(read: Read, inside: range, addr: int) -> Led | None:
    try:
        decoded = decode_one(read(addr, min(MAX_SIZE, inside.stop - addr)), addr)
    except MemoryFault:
        return None
    if decoded.is_invalid:
        return None
    return read(addr, decoded.len), _successors(decoded)


def _successors(decoded: Decoded) -> Iterator[int]:
    if decoded.op0_kind in _BRANCHES:
        yield decoded.near_branch_target
    if decoded.mnemonic not in _ENDS:
        yield decoded.next_ip


def reaches(entry: int, pieces: Pieces, window: range) -> Mapping[Addr, Reach]:
    """Return which instructions access, or compute, an address in some window of memory.

    A window's address comes in as a 64-bit constant; what is added to it that is no constant
    counts as nothing. Every way through the code must agree on what a register holds.

    Args:
        entry: where nothing is known.
        pieces: as ``follow`` returns them for it.
        window: addresses, the constant among them.
    """
    code = {i.ip: i for addr, data in pieces for i in Decoder(64, data, ip=addr)}
    after = partial(_after, window, InstructionInfoFactory())
    states = states_of(code, entry, _successors, after)
    found: dict[Addr, Reach] = {}
    for addr, state in states.items():
        reach = _reach(code[addr], state)
        if reach is not None:
            found[Addr(addr)] = reach
    return found


def _after(
    window: range, info: InstructionInfoFactory, decoded: Decoded, state: _State
) -> dict[int, tuple[int, Addr]]:
    gone = {
        RegisterExt.full_register(used.register)
        for used in info.info(decoded).used_registers()
        if used.access in _CHANGES
    }
    if decoded.mnemonic == Mnemonic.CALL:
        gone |= _CLOBBERED
    left = {register: held for register, held in state.items() if register not in gone}
    made = _made(decoded, state, window)
    if made is not None:
        left[RegisterExt.full_register(decoded.op0_register)] = made
    return left


def _made(decoded: Decoded, state: _State, window: range) -> tuple[int, Addr] | None:
    # What the first operand, a register, holds afterwards.
    if decoded.op0_kind != OpKind.REGISTER:
        return None
    match decoded.mnemonic:
        case Mnemonic.MOV if decoded.op1_kind == OpKind.IMMEDIATE64:
            value = decoded.immediate(1) & U64
            return (value - window.start, Addr(decoded.ip)) if value in window else None
        case Mnemonic.MOV if decoded.op1_kind == OpKind.REGISTER:
            return state.get(decoded.op1_register)
        case Mnemonic.LEA:
            found = _memory(decoded, state)
            is_sum = Register.NONE not in (decoded.memory_base, decoded.memory_index)
            return (found[0], Addr(decoded.ip)) if found and is_sum else found
        case Mnemonic.ADD | Mnemonic.SUB:
            return _sum(decoded, state)
        case _:
            return None


def _sum(decoded: Decoded, state: _State) -> tuple[int, Addr] | None:
    held = state.get(decoded.op0_register)
    if decoded.op1_kind == OpKind.REGISTER:
        held = held or state.get(decoded.op1_register)
        is_sum = held is not None and decoded.mnemonic == Mnemonic.ADD
        return (held[0], Addr(decoded.ip)) if held is not None and is_sum else None
    if held is None or decoded.op1_kind == OpKind.MEMORY:
        return None
    number = decoded.immediate(1) & U64
    number -= (number >> 63) << 64
    return held[0] + (number if decoded.mnemonic == Mnemonic.ADD else -number), held[1]


def _memory(decoded: Decoded, state: _State) -> tuple[int, Addr] | None:
    held = state.get(decoded.memory_base)
    if held is None and decoded.memory_index_scale == 1:
        held = state.get(decoded.memory_index)
    if held is None:
        return None
    displacement = decoded.memory_displacement
    displacement -= (displacement >> 63) << 64
    return held[0] + displacement, held[1]


def _reach(decoded: Decoded, state: _State) -> Reach | None:
    found = _memory(decoded, state)
    is_memory = any(decoded.op_kind(n) == OpKind.MEMORY for n in range(decoded.op_count))
    if found is None or not is_memory or decoded.code in (Code.NOP_RM32, Code.NOP_RM64):
        return None
    if decoded.mnemonic == Mnemonic.LEA:
        return Reach(offset=found[0], origin=found[1], size=0, is_write=False)
    is_write = any(
        each.access in _CHANGES for each in InstructionInfoFactory().info(decoded).used_memory()
    )
    size = MemorySizeExt.size(decoded.memory_size)
    return Reach(offset=found[0], origin=found[1], size=size, is_write=is_write)
