"""Where a function's arguments are when it is entered: AAPCS64, 6.8.2 "Parameter passing rules".

The kernel has no floating-point ones. A struct of up to 16 bytes is in one or two registers, or
wholly on the stack; of a larger one the caller has made a copy, and passes its address.
"""

from collections.abc import Sequence

from kprobes.arch.aarch64.registers import ARGUMENTS
from kprobes.arch.facts import Passed

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
            # C.13: what does not fit leaves no register to those behind it.
            free.clear()
            found.append(Passed(stack=stack, is_address=is_address))
            stack += words * _WORD
    return found
