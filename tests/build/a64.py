"""arm64 functions made of words, at an address where kernels are."""

from kprobes.arch.aarch64.decode import Function, Instruction, decode_function, decode_one
from kprobes.model.kernel import TextPart, TextTables
from kprobes.units import Addr

START = 0xFFFF_8000_0811_0000
COLD = 0xFFFF_8000_0819_0000
SLOT = Addr(0xFFFF_8000_0A00_0000)

NOP = "d503201f"
PACIASP, AUTIASP, RET, RETAA = "d503233f", "d50323bf", "d65f03c0", "d65f0bff"
PUSH, POP = "a9be7bfd", "a8c27bfd"
"""stp x29, x30, [sp, #-32]!; ldp x29, x30, [sp], #32"""
BUG = "d4210000"
"""brk #0x800"""


def code_of(words: str) -> bytes:
    """Return the bytes of words as a disassembler shows them: ``"d503201f d65f03c0"``."""
    return b"".join(int(word, 16).to_bytes(4, "little") for word in words.split())


def function(
    words: str, *, cold: str = "", name: str = "f", tables: TextTables | None = None
) -> Function:
    """Decode words at START, and those of a cold part at COLD."""
    return decode_function(name, parts(words, cold), tables or TextTables())


def parts(words: str, cold: str = "") -> list[TextPart]:
    """Return the parts of a function."""
    found = [TextPart(addr=Addr(START), code=code_of(words))]
    return [*found, TextPart(addr=Addr(COLD), code=code_of(cold))] if cold else found


def first(words: str) -> Instruction:
    """Decode the first instruction of words at START."""
    return decode_one(code_of(words), START)


def b(target: int, *, at: int = START) -> str:
    """Return the word of a branch."""
    return f"{0x14000000 | (target - at) // 4 & 0x3FFFFFF:08x}"


def bl(target: int, *, at: int = START) -> str:
    """Return the word of a call."""
    return f"{0x94000000 | (target - at) // 4 & 0x3FFFFFF:08x}"
