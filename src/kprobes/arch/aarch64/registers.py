"""Registers of arm64: those of pt_regs, a stub's names of them, and a function's arguments.

struct user_pt_regs {    // arch/arm64/include/uapi/asm/ptrace.h; struct pt_regs begins with it
    __u64 regs[31], sp, pc, pstate;
};

Arguments are where AAPCS64, 6.8.2 "Parameter passing rules", has them when a function is entered;
the kernel has no floating-point ones. A struct of up to 16 bytes is in one or two registers, or
wholly on the stack; of a larger one the caller has made a copy, and passes its address.
"""

from collections.abc import Iterator, Mapping, Sequence

from kprobes.arch.arch import Passed

GENERAL = tuple(f"x{n}" for n in range(31))
NAMES = (*GENERAL, "sp", "pc", "pstate")
"""In pt_regs order, 8 bytes each."""
ALIASES: Mapping[str, str] = {"lr": "x30"}
"""Further names in the kernel's regoffset_table (arch/arm64/kernel/ptrace.c)."""
QUERIED = (*NAMES, *ALIASES)
"""Every register that ``%NAME`` may name."""

ARGUMENTS = GENERAL[:8]
"""Where the first eight arguments of a function are (AAPCS64, 6.8.2)."""

STUB_NAMES = {**{name: name for name in NAMES}, "pstate": "cpsr"}
"""pt_regs names to those of a gdb stub's target description."""

_FLAGS = ((31, "N"), (30, "Z"), (29, "C"), (28, "V"), (9, "D"), (8, "A"), (7, "I"), (6, "F"))
_EXTENSIONS = ((22, "PAN"), (23, "UAO"), (25, "TCO"), (24, "DIT"), (12, "SSBS"))
_BRANCH_TYPES = ("--", "jc", "-c", "j-")
_LAST = 29
"""The kernel does not print x30 among the others: it is lr."""


def show(values: Mapping[str, int], place: str) -> str:
    """Return registers as the kernel prints them: __show_regs() in arch/arm64/kernel/process.c.

    Args:
        values: all of NAMES.
        place: ``pc`` as the kernel prints it.
    """
    head = (
        f"pstate: {values['pstate']:08x} ({_flags(values['pstate'])})",
        f"pc : {place}",
        f"lr : {values['x30']:#x}",
        f"sp : {values['sp']:016x}",
    )
    return "\n".join([*head, *_rows(values)])


def _flags(pstate: int) -> str:
    letters = [name if pstate >> bit & 1 else name.lower() for bit, name in _FLAGS]
    extensions = [f"{'+' if pstate >> bit & 1 else '-'}{name}" for bit, name in _EXTENSIONS]
    kind = f"BTYPE={_BRANCH_TYPES[pstate >> 10 & 3]}"
    return " ".join(["".join(letters[:4]), "".join(letters[4:]), *extensions, kind])


def _rows(values: Mapping[str, int]) -> Iterator[str]:
    for last in range(_LAST, 0, -3):
        yield " ".join(f"x{n:<2}: {values[f'x{n}']:016x}" for n in range(last, last - 3, -1))


_WORD = 8
_IN_REGISTERS = 16


def passed(sizes: Sequence[int]) -> list[Passed]:
    """Return where each argument is, by their sizes in bytes."""
    free, stack, found = list(ARGUMENTS), 0, list[Passed]()
    for size in sizes:
        is_address = size > _IN_REGISTERS
        words = 1 if is_address else -(-size // _WORD)
        if words <= len(free):
            found.append(Passed(registers=tuple(free[:words]), is_address=is_address))
            del free[:words]
        else:
            # C.13: what does not fit leaves no register to those after it.
            free.clear()
            found.append(Passed(stack=stack, is_address=is_address))
            stack += words * _WORD
    return found
