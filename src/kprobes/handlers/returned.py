"""What a function returns, as its types say."""

from collections.abc import Mapping
from operator import index
from typing import Any, SupportsIndex

from kprobes.arch.facts import Passed, ReturnFacts
from kprobes.errors import UnknownTypeError
from kprobes.handlers.arguments import Argument, Arguments
from kprobes.handlers.values import Typed, load
from kprobes.model.types import Prototype, TypeKind

RETVAL = "retval"
_WORD = 8


def load_returned(
    facts: ReturnFacts, prototype: Prototype, registers: Mapping[str, int], typed: Typed
) -> Any:
    """Return the value that a function returns; None for nothing.

    Args:
        facts: of the architecture.
        prototype: of the function.
        registers: when it returns.
        typed: memory and types.
    """
    if prototype.returned == 0:
        return None
    ctype = typed.types.describe(prototype.returned)
    if ctype.kind is TypeKind.AGGREGATE and ctype.size > _WORD * len(facts.registers):
        # Its caller made room, and gets that back.
        return load(typed, prototype.returned, registers[facts.value])
    return _place(facts, prototype, dict(registers), typed)[RETVAL]


def store_returned(
    facts: ReturnFacts,
    prototype: Prototype,
    value: SupportsIndex,
    registers: dict[str, int],
    typed: Typed,
) -> None:
    """Have a function return a number.

    Raises:
        OverflowError: it does not fit.
        UnknownTypeError: the function returns no number.
    """
    if prototype.returned == 0:
        raise UnknownTypeError(f"{prototype.name} returns nothing")
    _place(facts, prototype, registers, typed)[RETVAL] = index(value)


def _place(
    facts: ReturnFacts, prototype: Prototype, registers: dict[str, int], typed: Typed
) -> Arguments:
    ctype = typed.types.describe(prototype.returned)
    words = max(1, -(-ctype.size // _WORD))
    argument = Argument(
        name=RETVAL,
        number=prototype.returned,
        ctype=ctype,
        passed=Passed(registers=facts.registers[:words]),
    )
    return Arguments((argument,), registers, typed)
