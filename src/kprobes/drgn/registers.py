"""A vCPU's registers as ``struct pt_regs``, from which drgn walks its stack.

struct pt_regs { unsigned long r15, ..., bx, ax, ..., ip, cs, flags, sp, ss; };   // x86-64
struct pt_regs { union { struct user_pt_regs user_regs;                           // arm64
                         struct { u64 regs[31], sp, pc, pstate; }; }; ... };
"""

import re
from collections.abc import Mapping

from drgn import Object, Program

from kprobes.units import U64

_NUMBERED = re.compile(r"x(\d+)")
_WORD = 8
_FRAME = 0xFFE0 << 48
"""Below all memory of arm64 kernels: drgn follows frames upwards only."""
_FRAME_POINTER = "x29"


def with_frame(prog: Program, values: Mapping[str, int], caller: int) -> Mapping[str, int]:
    """Return registers whose frame pointer leads to a frame of ours: struct { fp, lr; }, of arm64.

    Args:
        prog: which sees that frame from now on.
        values: of the registers, of a function that has none yet.
        caller: where it returns to.
    """
    words = values[_FRAME_POINTER], caller
    data = b"".join(word.to_bytes(_WORD, "little") for word in words)

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        del address, physical
        return data[offset : offset + count]

    prog.add_memory_segment(_FRAME, len(data), read)
    return {**values, _FRAME_POINTER: _FRAME}


def pt_regs(prog: Program, values: Mapping[str, int]) -> Object:
    """Return some registers as a value of drgn's; those that it has no member for are left out.

    Args:
        prog: of the kernel.
        values: by pt_regs' names, those of arm64's array ``x0`` and so on.
    """
    type_ = prog.type("struct pt_regs")
    data = bytearray(type_.size or 0)
    for name, value in values.items():
        numbered = _NUMBERED.fullmatch(name)
        member = "regs" if numbered else name
        if not type_.has_member(member):
            continue
        found = type_.member(member)
        at = found.offset + (_WORD * int(numbered[1]) if numbered else 0)
        data[at : at + _WORD] = (value & U64).to_bytes(_WORD, "little")
    return Object.from_bytes_(prog, type_, bytes(data))
