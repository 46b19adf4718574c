"""Bytes to lines of assembly, and what of them a reader wants named.

iced-x86 formats; its symbol resolver is not in its Python binding, so that names are put behind
the operands by whoever prints, as objdump does.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from iced_x86 import Decoder, Formatter, FormatterSyntax, OpKind, Register
from iced_x86 import Instruction as Decoded

from kprobes.arch.listed import Listed, Syntax
from kprobes.arch.x86_64 import kernel_map
from kprobes.units import U64, Addr

_SYNTAXES = {Syntax.ATT: FormatterSyntax.GAS, Syntax.INTEL: FormatterSyntax.INTEL}
_BRANCHES = frozenset({OpKind.NEAR_BRANCH16, OpKind.NEAR_BRANCH32, OpKind.NEAR_BRANCH64})
_ADDRESS_SIZES = frozenset({4, 8})
# An address in a 32-bit immediate is sign-extended: that of the kernel's image.
_CONSTANTS = frozenset({OpKind.IMMEDIATE64, OpKind.IMMEDIATE32TO64})

_IMAGE = range(*kernel_map.WINDOW)
_KERNEL, _SMALL = 0xFF00_0000_0000_0000, -(1 << 24) & U64
"""Between them a constant is an address; above, a small negative number."""


def list_code(code: bytes, addr: int, syntax: Syntax = Syntax.ATT) -> tuple[Listed, ...]:
    """Return the lines of some code, every byte in one of them.

    Args:
        code: bytes that begin with an instruction.
        addr: where they are.
        syntax: how operands are written.
    """
    return tuple(_lines(code, addr, _formatter(syntax)))


def _lines(code: bytes, addr: int, formatter: Formatter) -> Iterator[Listed]:
    decoder = Decoder(64, code, ip=addr)
    at = 0
    while at < len(code):
        decoder.position, decoder.ip = at, addr + at
        decoded = decoder.decode()
        size = 1 if decoded.is_invalid else decoded.len
        line = _line(decoded, code[at : at + size], formatter)
        yield replace(line, fields=_fields(decoder, decoded))
        at += size


def _line(decoded: Decoded, code: bytes, formatter: Formatter) -> Listed:
    if decoded.is_invalid:
        return Listed(addr=Addr(decoded.ip), code=code, mnemonic="(bad)", operands="")
    # As objdump has it: a displacement that is there is shown, be it zero.
    formatter.show_zero_displacements = decoded.memory_displ_size > 0
    formatter.always_show_scale = decoded.memory_index != Register.NONE
    formatter.signed_memory_displacements = decoded.memory_displacement not in _IMAGE
    value = _value(decoded)
    formatter.signed_immediate_operands = value is None or not _KERNEL <= value < _SMALL
    return Listed(
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
