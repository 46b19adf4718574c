"""Where a function's arguments are when it is entered: System V AMD64 ABI, section 3.2.3.

The kernel has no floating-point ones. A struct of up to 16 bytes is in one or two registers, or
wholly on the stack; a larger one is on the stack.
"""

from collections.abc import Sequence

from kprobes.arch.facts import Passed
from kprobes.arch.x86_64.registers import ARGUMENTS

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
