"""Handlers with a function's own signature, as the old jprobes had: checked, and called by name."""

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

from kprobes.errors import UsageError
from kprobes.handlers.arguments import spelled
from kprobes.handlers.kprobe import Handler, Kprobe
from kprobes.handlers.registers import Registers
from kprobes.handlers.report import USERS
from kprobes.model.types import Prototype

EXTRAS = ("probe", "regs")
"""What a handler may take besides, by keywords of its own: ``def handler(dfd, *, regs)``."""

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def with_signature(
    handler: Callable[..., object], prototype: Prototype, names: Sequence[str]
) -> Handler:
    """Return a pre_handler that calls a handler with the arguments that it names.

    Args:
        handler: its parameters are some of the function's, by name; or as many as the function
            has, by position, when no name is one of the function's.
        prototype: of the probed function.
        names: of its arguments.

    Raises:
        UsageError: the handler takes something else; with the true prototype.
    """
    signature = inspect.signature(handler)
    extras = [each.name for each in signature.parameters.values() if _is_extra(each, names)]
    by_position, by_keyword = _wanted(handler, prototype, names)
    try:
        signature.bind(*by_position, **dict.fromkeys([*by_keyword, *extras]))
    except TypeError as error:
        raise _error(handler, prototype, f"cannot be called: {error}") from error

    def pre_handler(probe: Kprobe, regs: Registers) -> None:
        args = regs.args
        own: dict[str, Any] = {"probe": probe, "regs": regs}
        keywords = {name: args[name] for name in by_keyword} | {name: own[name] for name in extras}
        handler(*(args[name] for name in by_position), **keywords)

    # Where it is, for whoever tells of its errors.
    setattr(pre_handler, USERS, handler)
    pre_handler.__name__ = getattr(handler, "__name__", pre_handler.__name__)
    return pre_handler


def _is_extra(parameter: Parameter, names: Sequence[str]) -> bool:
    is_keyword = parameter.kind is Parameter.KEYWORD_ONLY
    return is_keyword and parameter.name in EXTRAS and parameter.name not in names


def _wanted(
    handler: Callable[..., object], prototype: Prototype, names: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    # Names of the arguments that a handler gets by position, and by keyword.
    signature = inspect.signature(handler)
    taken = [each for each in signature.parameters.values() if not _is_extra(each, names)]
    kinds = {each.kind for each in taken}
    plain = [each for each in taken if each.kind is not Parameter.VAR_KEYWORD]
    known = [each.name for each in plain if each.name in names]
    is_positional = kinds <= {*_POSITIONAL} and not known and len(plain) == len(names)
    if Parameter.VAR_POSITIONAL in kinds or is_positional:
        return names, ()
    needed = [each.name for each in plain if each.default is Parameter.empty]
    unknown = [name for name in needed if name not in names]
    if unknown:
        what = f"takes {', '.join(unknown)}, which {prototype.name} has not"
        raise _error(handler, prototype, what)
    return (), names if Parameter.VAR_KEYWORD in kinds else known


def _error(handler: Callable[..., object], prototype: Prototype, what: str) -> UsageError:
    name = getattr(handler, "__name__", repr(handler))
    return UsageError(f"{name} {what}: {spelled(prototype)}")
