"""Registers of x86-64: those of pt_regs, a stub's names of them, and a function's arguments.

struct pt_regs {    // arch/x86/include/asm/ptrace.h
    unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di;
    unsigned long orig_ax, ip, cs, flags, sp, ss;
};

Arguments are where the System V AMD64 ABI, section 3.2.3, has them when a function is entered; the
kernel has no floating-point ones. A struct of up to 16 bytes is in one or two registers, or
wholly on the stack; a larger one is on the stack.
"""

from collections.abc import Mapping, Sequence

from kprobes.arch.arch import Passed

_CALLEE_SAVED = ("r15", "r14", "r13", "r12", "bp", "bx")
_CALLER_SAVED = ("r11", "r10", "r9", "r8", "ax", "cx", "dx", "si", "di")
GENERAL = (*_CALLEE_SAVED, *_CALLER_SAVED)
"""In pt_regs order, the stack pointer left out."""
NAMES = (*GENERAL, "orig_ax", "ip", "cs", "flags", "sp", "ss")
"""Every register that ``%NAME`` may name, in pt_regs order."""

ARGUMENTS = ("di", "si", "dx", "cx", "r8", "r9")
"""Where the first six arguments of a kernel function are (System V AMD64 ABI)."""

KERNEL_CS = 0x10
KERNEL_SS = 0x18

STUB_NAMES = {
    **{name: name for name in NAMES if name[0] == "r"},
    **{name: f"r{name}" for name in ("bp", "bx", "ax", "cx", "dx", "si", "di", "ip", "sp")},
    "flags": "eflags",
    "cs": "cs",
    "ss": "ss",
}
"""pt_regs names to those of a gdb stub's target description; orig_ax has none."""

_SHOWN = (("ax", "bx", "cx"), ("dx", "si", "di"), ("bp", "r8", "r9"), ("r10", "r11", "r12"))


def show(values: Mapping[str, int], place: str) -> str:
    """Return registers as the kernel prints them: __show_regs() in process_64.c.

    Args:
        values: all of NAMES.
        place: ``ip`` as the kernel prints it.
    """
    head = (
        f"RIP: {values['cs']:04x}:{place}\n"
        f"RSP: {values['ss']:04x}:{values['sp']:016x} EFLAGS: {values['flags']:08x}"
        f" ORIG_RAX: {values['orig_ax']:016x}"
    )
    rows = (*_SHOWN, ("r13", "r14", "r15"))
    return "\n".join([head, *(" ".join(_shown(name, values) for name in row) for row in rows)])


def _shown(name: str, values: Mapping[str, int]) -> str:
    # "R08", as the kernel has it.
    label = f"R{name[1:].zfill(2)}" if name[0] == "r" else f"R{name.upper()}"
    return f"{label}: {values[name]:016x}"


_WORD = 8
_IN_REGISTERS = 16
_RETURN_ADDRESS = 8
"""Below the first argument on the stack."""


def passed(sizes: Sequence[int]) -> list[Passed]:
    """Return where each argument is, by their sizes in bytes."""
    free, stack, found = list(ARGUMENTS), _RETURN_ADDRESS, list[Passed]()
    for size in sizes:
        words = -(-size // _WORD)
        if size <= _IN_REGISTERS and words <= len(free):
            found.append(Passed(registers=tuple(free[:words])))
            del free[:words]
        else:
            found.append(Passed(stack=stack))
            stack += words * _WORD
    return found
