"""Which data an x86-64 function names, by what its instructions have as operands."""

from collections.abc import Iterator

from kprobes.units import U64

_KERNEL = 1 << 63


def references(code: bytes, addr: int) -> Iterator[int]:
    """Yield the addresses of data that code names, as it comes to them."""
    # It takes 15 ms to load, and only kernels that hide their data's names need it.
    from iced_x86 import Decoder, OpKind, Register

    for each in Decoder(64, code, ip=addr):
        for n in range(each.op_count):
            if each.op_kind(n) == OpKind.IMMEDIATE32TO64:
                yield each.immediate32to64 & U64
        if each.memory_base in (Register.RIP, Register.NONE) and each.memory_displacement:
            yield each.memory_displacement & U64
