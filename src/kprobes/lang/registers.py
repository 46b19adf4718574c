"""Register names that were not found: what was probably meant."""

from collections.abc import Collection
from difflib import get_close_matches


def near_register(name: str, registers: Collection[str]) -> str:
    """Return a hint for a wrong register name.

    pt_regs calls every register by its bare name (``di``), where people write the name that
    the assembler has for one of its widths (``rdi``, ``edi``, ``r8d``, ``al``).
    """
    lower = name.lower()
    guesses = (lower, lower[1:], lower[:-1], f"{lower[:-1]}x")
    close = get_close_matches(lower, sorted(registers), n=1)
    for guess in (*guesses, *close):
        if guess in registers:
            return f"did you mean %{guess}?"
    return f"registers: {' '.join(registers)}"
