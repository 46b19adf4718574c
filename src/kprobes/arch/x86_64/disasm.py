"""Disassembler of x86-64 code: its lines, what they name, and the memory that they access.

iced-x86 formats; its symbol resolver is not in its Python binding, so that names are put after
the operands where the lines are printed, as objdump does. Code that was made while the kernel ran,
which no symbol tells the size of, is followed along its direct branches.
"""

from collections.abc import Iterator, Mapping
from functools import cache, partial

from iced_x86 import (
    Code,
    Decoder,
    Formatter,
    FormatterSyntax,
    InstructionInfoFactory,
    MemorySizeExt,
    Mnemonic,
    OpAccess,
    OpKind,
    Register,
    RegisterExt,
)
from iced_x86 import Instruction as Decoded
from msgspec.structs import replace

from kprobes.arch.cfg import Led, Pieces, pieces_from, states_of
from kprobes.arch.insn import Disassembled, MemoryAccess, Read, Syntax
from kprobes.arch.x86_64 import machine
from kprobes.arch.x86_64.decode import decode_one
from kprobes.arch.x86_64.insn import MAX_SIZE
from kprobes.errors import MemoryFault
from kprobes.units import U64, Addr

_SYNTAXES = {Syntax.ATT: FormatterSyntax.GAS, Syntax.INTEL: FormatterSyntax.INTEL}
_BRANCHES = frozenset({OpKind.NEAR_BRANCH16, OpKind.NEAR_BRANCH32, OpKind.NEAR_BRANCH64})
_ADDRESS_SIZES = frozenset({4, 8})
# An address in a 32-bit immediate is sign-extended: that of the kernel's image.
_CONSTANTS = frozenset({OpKind.IMMEDIATE64, OpKind.IMMEDIATE32TO64})

_IMAGE = range(*machine.WINDOW)
_KERNEL, _SMALL = 0xFF00_0000_0000_0000, -(1 << 24) & U64
"""Between them a constant is an address; above, a small negative number."""


def list_code(code: bytes, addr: int, syntax: Syntax = Syntax.ATT) -> tuple[Disassembled, ...]:
    """Return the lines of some code, every byte in one of them.

    Args:
        code: bytes that begin with an instruction.
        addr: where they are.
        syntax: how operands are written.
    """
    return tuple(_lines(code, addr, _formatter(syntax)))


def _lines(code: bytes, addr: int, formatter: Formatter) -> Iterator[Disassembled]:
    decoder = Decoder(64, code, ip=addr)
    at = 0
    while at < len(code):
        decoder.position, decoder.ip = at, addr + at
        decoded = decoder.decode()
        size = 1 if decoded.is_invalid else decoded.len
        line = _line(decoded, code[at : at + size], formatter)
        yield replace(line, fields=_fields(decoder, decoded))
        at += size


def _line(decoded: Decoded, code: bytes, formatter: Formatter) -> Disassembled:
    if decoded.is_invalid:
        return Disassembled(addr=Addr(decoded.ip), code=code, mnemonic="(bad)", operands="")
    # As objdump has it: a displacement that is there is shown, be it zero.
    formatter.show_zero_displacements = decoded.memory_displ_size > 0
    formatter.always_show_scale = decoded.memory_index != Register.NONE
    formatter.signed_memory_displacements = decoded.memory_displacement not in _IMAGE
    value = _value(decoded)
    formatter.signed_immediate_operands = value is None or not _KERNEL <= value < _SMALL
    return Disassembled(
        addr=Addr(decoded.ip),
        code=code,
        mnemonic=formatter.format_mnemonic(decoded),
        operands=formatter.format_all_operands(decoded),
        target=Addr(decoded.near_branch_target) if decoded.op0_kind in _BRANCHES else None,
        place=_place(decoded),
        value=value,
        per_cpu=_per_cpu(decoded),
    )


def _fields(decoder: Decoder, decoded: Decoded) -> tuple[tuple[int, int], ...]:
    if decoded.is_invalid or decoded.op0_kind in _BRANCHES:
        return ()
    at = decoder.get_constant_offsets(decoded)
    found = (
        (at.displacement_offset, at.displacement_size),
        (at.immediate_offset, at.immediate_size),
    )
    return tuple((offset, size) for offset, size in found if size in _ADDRESS_SIZES)


@cache
def _formatter(syntax: Syntax) -> Formatter:
    formatter = Formatter(_SYNTAXES[syntax])
    formatter.uppercase_hex = False
    formatter.hex_prefix, formatter.hex_suffix = "0x", ""
    formatter.small_hex_numbers_in_decimal = False
    formatter.branch_leading_zeros = False
    formatter.show_branch_size = False
    formatter.rip_relative_addresses = True
    return formatter


def _has_memory(decoded: Decoded) -> bool:
    return any(decoded.op_kind(n) == OpKind.MEMORY for n in range(decoded.op_count))


def _is_per_cpu(decoded: Decoded) -> bool:
    return _has_memory(decoded) and decoded.segment_prefix == Register.GS


def _fixed(decoded: Decoded) -> int | None:
    # Where a memory operand is, when no register has a part in it.
    if not _has_memory(decoded):
        return None
    if decoded.is_ip_rel_memory_operand:
        return decoded.ip_rel_memory_address
    if decoded.memory_base == decoded.memory_index == Register.NONE:
        return decoded.memory_displacement
    return None


def _place(decoded: Decoded) -> Addr | None:
    fixed = None if _is_per_cpu(decoded) else _fixed(decoded)
    if fixed is None and _has_memory(decoded) and decoded.memory_displacement in _IMAGE:
        # An array of the kernel's, indexed: its displacement is an address.
        fixed = decoded.memory_displacement
    return None if fixed is None else Addr(fixed)


def _value(decoded: Decoded) -> int | None:
    for n in range(decoded.op_count):
        if decoded.op_kind(n) in _CONSTANTS:
            return decoded.immediate(n) & U64
    return None


def _per_cpu(decoded: Decoded) -> int | None:
    return _fixed(decoded) if _is_per_cpu(decoded) else None


_ENDS = frozenset({Mnemonic.RET, Mnemonic.JMP, Mnemonic.INT3, Mnemonic.UD2, Mnemonic.IRETQ})
_LONG_BRANCHES = frozenset({OpKind.NEAR_BRANCH64, OpKind.NEAR_BRANCH32})
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
"""Register to (bytes after the window's start, where what is not a constant was added)."""


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
    if decoded.op0_kind in _LONG_BRANCHES:
        yield decoded.near_branch_target
    if decoded.mnemonic not in _ENDS:
        yield decoded.next_ip


def reaches(entry: int, pieces: Pieces, window: range) -> Mapping[Addr, MemoryAccess]:
    """Return which instructions access, or compute, an address in some window of memory.

    A window's address comes in as a 64-bit constant; what is added to it that is not a constant
    counts as nothing. Every way through the code must agree on what a register holds.

    Args:
        entry: where nothing is known.
        pieces: as ``follow`` returns them for it.
        window: addresses, the constant among them.
    """
    code = {i.ip: i for addr, data in pieces for i in Decoder(64, data, ip=addr)}
    after = partial(_after, window, InstructionInfoFactory())
    states = states_of(code, entry, _successors, after)
    found: dict[Addr, MemoryAccess] = {}
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


def _reach(decoded: Decoded, state: _State) -> MemoryAccess | None:
    found = _memory(decoded, state)
    is_memory = any(decoded.op_kind(n) == OpKind.MEMORY for n in range(decoded.op_count))
    if found is None or not is_memory or decoded.code in (Code.NOP_RM32, Code.NOP_RM64):
        return None
    if decoded.mnemonic == Mnemonic.LEA:
        return MemoryAccess(offset=found[0], origin=found[1], size=0, is_write=False)
    is_write = any(
        each.access in _CHANGES for each in InstructionInfoFactory().info(decoded).used_memory()
    )
    size = MemorySizeExt.size(decoded.memory_size)
    return MemoryAccess(offset=found[0], origin=found[1], size=size, is_write=is_write)
