"""Functions made of bytes, at an address where kernels are."""

from kprobes.arch.x86_64.decode import decode_function
from kprobes.arch.x86_64.insn import Function, Instruction
from kprobes.model.kernel import TextPart, TextTables
from kprobes.units import Addr

START = 0xFFFF_FFFF_8110_0000
COLD = 0xFFFF_FFFF_8190_0000
SLOT = Addr(0xFFFF_FFFF_C000_0000)


def function(
    code: str, *, cold: str = "", name: str = "f", tables: TextTables | None = None
) -> Function:
    """Decode hexadecimal bytes at START, and those of a cold part at COLD."""
    parts = [TextPart(addr=Addr(START), code=bytes.fromhex(code))]
    if cold:
        parts.append(TextPart(addr=Addr(COLD), code=bytes.fromhex(cold)))
    return decode_function(name, parts, tables or TextTables())


def first(code: str) -> Instruction:
    """Decode the first instruction of hexadecimal bytes at START."""
    return function(code).instructions[START]


def to(target: int, size: int, *, place: int = START) -> str:
    """Return the 32-bit displacement of a branch of some size at ``place``, as hexadecimal."""
    return (target - place - size).to_bytes(4, "little", signed=True).hex()
