"""Disassembler of aarch64 code: its lines, what they name, and the memory that they access.

capstone formats; addresses are written as objdump writes them, without ``#``. capstone has no
types, so its names stay in this file; importing it takes some 20 ms, so that nothing imports this
module before something is to be shown. Code that was made while the kernel ran, which no symbol
tells the size of, is followed along its direct branches.
"""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import capstone

from kprobes.arch.aarch64.decode import Instruction, decode_one
from kprobes.arch.aarch64.insn import (
    LEADING,
    SIZE,
    SP_OR_ZR,
    Kind,
    first_register,
    fits,
    is_wide_move,
    sign_extended,
    target_register,
    wide_move,
)
from kprobes.arch.cfg import Led, Pieces, pieces_from, states_of
from kprobes.arch.insn import Disassembled, Flow, MemoryAccess, Read, Syntax
from kprobes.errors import MemoryFault
from kprobes.units import U64, Addr

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false


def text_of(code: bytes, addr: int) -> tuple[str, str] | None:
    """Return mnemonic and operands of four bytes, or None when they are not an instruction."""
    found = next(_disassembler().disasm_lite(code, addr), None)
    return None if found is None else (str(found[2]), str(found[3]))


def written_by(code: bytes) -> frozenset[int]:
    """Return the numbers of the general registers that four bytes write, 31 being sp."""
    engine = _detailing()
    found = next(engine.disasm(code, 0), None)
    if found is None:
        return frozenset()
    names = [str(engine.reg_name(number)) for number in found.regs_access()[1]]
    return frozenset(_NUMBERS[name] for name in names if name in _NUMBERS)


@cache
def _disassembler() -> Any:
    return capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)


@cache
def _detailing() -> Any:
    engine = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)
    engine.detail = True
    return engine


_NUMBERS = {
    **{f"{kind}{n}": n for kind in "xw" for n in range(31)},
    "fp": 29,
    "lr": 30,
    "sp": 31,
    "wsp": 31,
}


_ADD = (0xFFC00000, 0x91000000)
_KERNEL = 1 << 63
"""What is above, and comes in parts, is an address."""
_ADDRESSES = frozenset({Kind.ADR, Kind.ADRP})
_SCALED = (0x3B000000, 0x39000000)
"""Loads and stores with an unsigned, scaled immediate."""


def list_code(code: bytes, addr: int, syntax: Syntax = Syntax.ATT) -> tuple[Disassembled, ...]:
    """Return the lines of some code, every byte in one of them.

    Args:
        code: bytes that begin with an instruction.
        addr: where they are.
        syntax: of no account: there is one only.
    """
    del syntax
    return tuple(_lines(code, addr))


def _lines(code: bytes, addr: int) -> Iterator[Disassembled]:
    held: dict[int, int] = {}
    for at in range(0, len(code), SIZE):
        word = code[at : at + SIZE]
        if len(word) < SIZE:
            yield Disassembled(addr=Addr(addr + at), code=word, mnemonic="(bad)", operands="")
            return
        yield _line(decode_one(word, addr + at), held)


def _line(i: Instruction, held: dict[int, int]) -> Disassembled:
    # `held` has what adrp and movz have put into registers, for what adds the rest.
    text = text_of(i.code, i.addr)
    mnemonic, operands = ("(bad)", "") if text is None else text
    if i.kind in LEADING:
        # Of a number of a bit before it, tbz's, that is left alone.
        operands = "".join(operands.rsplit("#", 1))
    place, value = _named(i, held)
    made = i.mention if i.kind is Kind.ADRP else None
    if is_wide_move(i.word):
        made = wide_move(i.word, held.get(target_register(i.word)))
        value = made if made is not None and made >= _KERNEL else None
    held.pop(target_register(i.word), None)
    if made is not None:
        held[target_register(i.word)] = made
    return Disassembled(
        addr=i.addr,
        code=i.code,
        mnemonic=mnemonic,
        operands=operands,
        target=i.target,
        place=None if place is None else Addr(place),
        value=value,
    )


def _named(i: Instruction, held: dict[int, int]) -> tuple[int | None, int | None]:
    # The place that it accesses, and the address that it computes.
    if i.mention is not None:
        return (None, i.mention) if i.kind in _ADDRESSES else (i.mention, None)
    page = held.get(first_register(i.word))
    immediate = i.word >> 10 & 0xFFF
    if page is None:
        return None, None
    if i.word & _ADD[0] == _ADD[1]:
        return None, page + immediate
    if i.word & _SCALED[0] == _SCALED[1]:
        return page + immediate * access_scale(i.word), None
    return None, None


def access_scale(word: int) -> int:
    """Return how many bytes a load or store of one register accesses."""
    is_quad = word & 1 << 26 and word & 1 << 23
    return 16 if is_quad else 1 << (word >> 30)


_ENDS = frozenset({Flow.JUMP, Flow.INDIRECT_JUMP, Flow.RETURN, Flow.LEAVE, Flow.TRAP})
_CLOBBERED = frozenset({*range(19), 30})
"""By a callee: AAPCS64, 6.1.1."""

_ADD_IMMEDIATE = (0xBF800000, 0x91000000)
"""add, and with bit 30 sub."""
_ADD_REGISTER = (0xFF200000, 0x8B000000)
_ADD_EXTENDED = (0xFFE00000, 0x8B200000)
_MOVE = (0xFFE0FFE0, 0xAA0003E0)
_UNSCALED = (0x3B200000, 0x38000000)
_INDEXED = (0x3B200C00, 0x38200800)
_ATOMIC = (0x3B200C00, 0x38200000)
_PAIR = (0x3A000000, 0x28000000)
_EXCLUSIVE = (0x3F000000, 0x08000000)


class _Held(NamedTuple):
    # An address, and what is not a constant counting as nothing: where that was added.
    value: int
    origin: Addr


_State = Mapping[int, _Held]


def follow(read: Read, entry: int, inside: range) -> Pieces:
    """Return what can be reached from an address by direct branches and calls, as pieces.

    Args:
        read: memory.
        entry: of the code.
        inside: which addresses belong to it; what leads elsewhere is not followed.
    """
    return pieces_from(entry, inside, partial(_led, read))


def _led(read: Read, addr: int) -> Led | None:
    if addr % SIZE:
        return None
    try:
        code = read(addr, SIZE)
    except MemoryFault:
        return None
    i = decode_one(code, addr)
    return None if i.flow is Flow.UNKNOWN else (code, _successors(i))


def _successors(i: Instruction) -> Iterator[int]:
    if i.target is not None:
        yield i.target
    if i.flow not in _ENDS:
        yield i.next


def reaches(entry: int, pieces: Pieces, window: range) -> Mapping[Addr, MemoryAccess]:
    """Return which instructions access, or compute, an address in some window of memory.

    A window's address comes in as a constant, from ``movz`` and ``movk`` or ``adrp`` and ``add``;
    what is added to it that is not a constant counts as nothing. Every way through the code must
    agree on what a register holds.

    Args:
        entry: where nothing is known.
        pieces: as ``follow`` returns them for it.
        window: addresses, the constant among them.
    """
    code = {
        addr + at: decode_one(data[at : at + SIZE], addr + at)
        for addr, data in pieces
        for at in range(0, len(data), SIZE)
    }
    states = states_of(code, entry, _successors, _after)
    found: dict[Addr, MemoryAccess] = {}
    for addr, state in states.items():
        reach = _reach(code[addr], state, window)
        if reach is not None:
            found[Addr(addr)] = reach
    return found


def _after(i: Instruction, state: _State) -> dict[int, _Held]:
    gone = _CLOBBERED if i.kind in (Kind.BL, Kind.BLR) else written_by(i.code)
    left = {register: held for register, held in state.items() if register not in gone}
    made = _made(i, state)
    if made is not None and target_register(i.word) != SP_OR_ZR:
        left[target_register(i.word)] = made
    return left | _moved_base(i, state)


def _made(i: Instruction, state: _State) -> _Held | None:
    # What the first register holds afterwards.
    word, first = i.word, state.get(first_register(i.word))
    if i.kind in (Kind.ADR, Kind.ADRP) and i.mention is not None:
        return _Held(i.mention, i.addr)
    if is_wide_move(word):
        return _wide(i, state)
    if fits(word, _ADD_IMMEDIATE) and first is not None:
        by = (word >> 10 & 0xFFF) << (12 if word & 1 << 22 else 0)
        return _Held(first.value + (-by if word & 1 << 30 else by) & U64, first.origin)
    if fits(word, _MOVE):
        return state.get(word >> 16 & 31)
    if fits(word, _ADD_REGISTER) or fits(word, _ADD_EXTENDED):
        held = first or state.get(word >> 16 & 31)
        return None if held is None else _Held(held.value, i.addr)
    return None


def _wide(i: Instruction, state: _State) -> _Held | None:
    before = state.get(target_register(i.word))
    value = wide_move(i.word, None if before is None else before.value)
    return None if value is None else _Held(value, i.addr)


def _base_change(word: int) -> bool:
    is_pair = fits(word, _PAIR) and bool(word & 1 << 23)
    return is_pair or (fits(word, _UNSCALED) and bool(word & 1 << 10))


def _moved_base(i: Instruction, state: _State) -> dict[int, _Held]:
    # Before or after the access the base takes on the sum.
    base = first_register(i.word)
    if not _base_change(i.word) or base not in state:
        return {}
    offset = _pair_offset(i.word) if fits(i.word, _PAIR) else sign_extended(i.word >> 12, 9)
    return {base: _Held(state[base].value + offset & U64, state[base].origin)}


def _reach(i: Instruction, state: _State, window: range) -> MemoryAccess | None:
    accessed = _access(i.word)
    held = state.get(first_register(i.word))
    if accessed is not None:
        if held is None and fits(i.word, _INDEXED):
            held = state.get(i.word >> 16 & 31)
        offset, size, is_write = accessed
        return _in_window(held, offset, window, size=size, is_write=is_write)
    made = _made(i, state)
    is_sum = fits(i.word, _ADD_IMMEDIATE) or fits(i.word, _ADD_REGISTER)
    return _in_window(made, 0, window, size=0, is_write=False) if is_sum else None


def _in_window(
    held: _Held | None, offset: int, window: range, *, size: int, is_write: bool
) -> MemoryAccess | None:
    if held is None or held.value + offset not in window:
        return None
    at = held.value + offset - window.start
    return MemoryAccess(offset=at, origin=held.origin, size=size, is_write=is_write)


def _access(word: int) -> tuple[int, int, bool] | None:
    # (constant offset, bytes, whether memory is written), or None when it accesses none.
    size, is_store = access_scale(word), not word >> 22 & 3
    if fits(word, _SCALED):
        return (word >> 10 & 0xFFF) * size, size, is_store
    if fits(word, _INDEXED):
        return 0, size, is_store
    if fits(word, _ATOMIC):
        return 0, size, True
    if fits(word, _UNSCALED):
        is_post = word >> 10 & 3 == 1
        return 0 if is_post else sign_extended(word >> 12, 9), size, is_store
    if fits(word, _PAIR):
        scale = _pair_scale(word)
        is_post = word >> 23 & 3 == 1
        return 0 if is_post else _pair_offset(word), 2 * scale, not word & 1 << 22
    if fits(word, _EXCLUSIVE):
        is_compare = word & 0xA00000 == 0xA00000
        return 0, size, is_compare or not word & 1 << 22
    return None


def _pair_scale(word: int) -> int:
    return 4 << (word >> 30) if word & 1 << 26 else 4 << (word >> 31)


def _pair_offset(word: int) -> int:
    return sign_extended(word >> 15, 7) * _pair_scale(word)
