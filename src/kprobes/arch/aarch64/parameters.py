"""Where a function's arguments are when it is entered: AAPCS64, 6.8.2 "Parameter passing rules".

The kernel has no floating-point ones. A struct of up to 16 bytes is in one or two registers, or
wholly on the stack; of a larger one the caller has made a copy, and passes its address: whose
size is that of a pointer here, as what is at the address is for the reader to follow.
"""

from collections.abc import Sequence

from kprobes.arch.aarch64.registers import ARGUMENTS
from kprobes.arch.facts import Passed

_WORD = 8
_IN_REGISTERS = 16


def passed(sizes: Sequence[int]) -> list[Passed]:
    """Return where each argument is, or where the address of its copy is, by sizes in bytes."""
    free, stack, found = list(ARGUMENTS), 0, list[Passed]()
    for size in sizes:
        words = 1 if size > _IN_REGISTERS else -(-size // _WORD)
        if words <= len(free):
            found.append(Passed(registers=tuple(free[:words])))
            del free[:words]
        else:
            # C.11, C.15: what does not fit leaves no register to those behind it.
            free.clear()
            found.append(Passed(stack=stack))
            stack += words * _WORD
    return found
