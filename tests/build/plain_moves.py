"""Instructions that do nothing but move data: which registers they leave alone."""

from collections.abc import Callable, Mapping

import iced_x86

_X86 = (
    *("ax", "bx", "cx", "dx", "si", "di", "bp", "sp"),
    *("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"),
)
_MOVES = frozenset(
    {
        iced_x86.Mnemonic.MOV,
        iced_x86.Mnemonic.LEA,
        iced_x86.Mnemonic.MOVZX,
        iced_x86.Mnemonic.MOVSXD,
    }
)
"""They change no flag."""
_NAMES = {
    getattr(iced_x86.Register, name.upper() if name[0] == "r" else f"R{name.upper()}"): name
    for name in _X86
}
_STORES = ((0xFFC00000, 0xF9000000), (0xFFC00000, 0xA9000000))
"""Mask and bits of str and stp of 64-bit registers with an offset."""
_LOADS = (
    (0x7FE0FFE0, 0x2A0003E0),
    (0x7F800000, 0x52800000),
    (0x7F800000, 0x11000000),
    (0xFFC00000, 0xF9400000),
)
"""mov of a register, movz, add of a number, ldr of 64 bits with an offset: they change Rd or Rt."""
_SP = 31

REGISTERS: Mapping[str, tuple[str, ...]] = {
    "amd64": (*_X86, "flags", "cs", "ss"),
    "arm64": (*(f"x{n}" for n in range(31)), "sp"),
}
"""By Debian's name of the architecture."""


def kept_by(arch: str, code: bytes) -> tuple[str, ...] | None:
    """Return the registers that an instruction leaves alone, or None when it is no plain move."""
    changed = _CHANGED[arch](code)
    if changed is None:
        return None
    return tuple(name for name in REGISTERS[arch] if name != changed)


def _x86(code: bytes) -> str | None:
    decoded = next(iter(iced_x86.Decoder(64, code)))
    if decoded.mnemonic not in _MOVES:
        return None
    if decoded.op0_kind != iced_x86.OpKind.REGISTER:
        return ""
    return _NAMES.get(iced_x86.RegisterExt.full_register(decoded.op0_register))


def _a64(code: bytes) -> str | None:
    word = int.from_bytes(code, "little")
    if any(word & mask == bits for mask, bits in _STORES):
        return ""
    if all(word & mask != bits for mask, bits in _LOADS):
        return None
    return "sp" if word & 31 == _SP else f"x{word & 31}"


_CHANGED: Mapping[str, Callable[[bytes], str | None]] = {"amd64": _x86, "arm64": _a64}
"""The one register that a plain move changes, "" for none, None for what is no such."""
