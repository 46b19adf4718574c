"""Handlers with a function's own signature, as the old jprobes had: checked, and called by name.

Functions to registered probes, for decorators.
"""

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any, TypedDict

from msgspec import Struct

from kprobes.errors import UsageError
from kprobes.handlers.arguments import RETVAL, declaration
from kprobes.handlers.calling import USERS
from kprobes.handlers.probe import (
    FaultHandler,
    Handler,
    Instance,
    Kprobe,
    Kretprobe,
    PostHandler,
    Probe,
    ReturnHandler,
)
from kprobes.handlers.registers import Registers
from kprobes.handlers.registry import Registry
from kprobes.model.kernel import Prototype

SYNTHETIC_FIELDS = ("probe", "regs")
"""What a handler may take besides, by keywords of its own: ``def handler(dfd, *, regs)``."""

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Signature(Struct, frozen=True, kw_only=True):
    """What a handler takes.

    Attributes:
        handler: the user's.
        by_position: names of what it gets by position.
        by_keyword: names of what it gets by keyword.
        synthetic_fields: which of SYNTHETIC_FIELDS it takes.
    """

    handler: Callable[..., object]
    by_position: Sequence[str]
    by_keyword: Sequence[str]
    synthetic_fields: Sequence[str]

    @property
    def names(self) -> tuple[str, ...]:
        """All that it gets of the function."""
        return (*self.by_position, *self.by_keyword)

    def call(self, values: Callable[[str], Any], probe: Probe, regs: Registers) -> None:
        """Call the handler with the values of what it takes."""
        if not self.by_keyword and not self.synthetic_fields:
            self.handler(*map(values, self.by_position))
            return
        own: dict[str, Any] = {"probe": probe, "regs": regs}
        keywords = {name: values(name) for name in self.by_keyword}
        keywords |= {name: own[name] for name in self.synthetic_fields}
        self.handler(*map(values, self.by_position), **keywords)

    def name(self, made: Callable[..., object]) -> None:
        """Have what calls the handler look like it, also to whoever tells of its errors."""
        setattr(made, USERS, self.handler)
        made.__name__ = getattr(self.handler, "__name__", made.__name__)


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
    signature = _match(handler, prototype, names)

    def pre_handler(probe: Kprobe, regs: Registers) -> None:
        signature.call(regs.args.__getitem__, probe, regs)

    signature.name(pre_handler)
    return pre_handler


def with_return_signature(
    handler: Callable[..., object], prototype: Prototype, names: Sequence[str]
) -> tuple[ReturnHandler, ReturnHandler | None]:
    """Return a handler of returns that calls a handler with what it names, and an entry_handler.

    It may take ``retval``, what the function returns, before the arguments that ``with_signature``
    gives. These are as they were at the entry: where there are any, the entry_handler keeps them.

    Raises:
        UsageError: the handler takes something else; with the true prototype.
    """
    known = [RETVAL, *(name for name in names if name != RETVAL)]
    signature = _match(handler, prototype, known)
    kept = [name for name in signature.names if name != RETVAL]

    def entry_handler(instance: Instance, regs: Registers) -> None:
        args = regs.args
        instance.arguments = {name: args[name] for name in kept}

    def return_handler(instance: Instance, regs: Registers) -> None:
        def value(name: str) -> Any:
            return regs.retval if name == RETVAL else instance.arguments[name]

        signature.call(value, instance.probe, regs)

    signature.name(entry_handler)
    signature.name(return_handler)
    return return_handler, entry_handler if kept else None


def _match(handler: Callable[..., object], prototype: Prototype, names: Sequence[str]) -> Signature:
    signature = inspect.signature(handler)
    synthetic_fields = [
        each.name for each in signature.parameters.values() if _is_extra(each, names)
    ]
    by_position, by_keyword = _wanted(handler, prototype, names)
    try:
        signature.bind(*by_position, **dict.fromkeys([*by_keyword, *synthetic_fields]))
    except TypeError as error:
        raise _error(handler, prototype, f"cannot be called: {error}") from error
    return Signature(
        handler=handler,
        by_position=by_position,
        by_keyword=by_keyword,
        synthetic_fields=synthetic_fields,
    )


def _is_extra(parameter: Parameter, names: Sequence[str]) -> bool:
    is_keyword = parameter.kind is Parameter.KEYWORD_ONLY
    return is_keyword and parameter.name in SYNTHETIC_FIELDS and parameter.name not in names


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
    return UsageError(f"{name} {what}: {declaration(prototype)}")


AsKprobe = Callable[[Handler], Kprobe]
AsEntry = Callable[[Callable[..., object]], Kprobe]
AsReturn = Callable[[Callable[..., object]], Kretprobe]


class Others(TypedDict, total=False):
    """What a ``Kprobe`` has besides its place and its pre_handler."""

    post_handler: PostHandler | None
    fault_handler: FaultHandler | None
    timeout_s: float


class ReturnOthers(TypedDict, total=False):
    """What a ``Kretprobe`` has besides its place and its handlers."""

    maxactive: int
    timeout_s: float


def kprobe(registry: Registry, place: str, others: Others) -> AsKprobe:
    """Return what makes a pre_handler a registered probe."""
    _check_place(place, "kprobe")

    def decorate(handler: Handler) -> Kprobe:
        probe = Kprobe(symbol_name=place, pre_handler=handler, **others)
        registry.register([probe])
        return probe

    return decorate


def entry(registry: Registry, place: str, others: Others) -> AsEntry:
    """Return what makes a function that takes a kernel function's arguments a registered probe."""
    _check_place(place, "entry")

    def decorate(handler: Callable[..., object]) -> Kprobe:
        where = registry.find_place(place)
        names = list(where.arguments(registry.live))
        pre_handler = with_signature(handler, where.prototype(registry.live), names)
        return kprobe(registry, place, others)(pre_handler)

    return decorate


def returns(registry: Registry, place: str, others: ReturnOthers) -> AsReturn:
    """Return what makes a function that takes a returned value a registered return probe."""
    _check_place(place, "returns")

    def decorate(handler: Callable[..., object]) -> Kretprobe:
        where = registry.find_place(place)
        where.check_entry()
        names = list(where.arguments(registry.live))
        made = with_return_signature(handler, where.prototype(registry.live), names)
        handler, entry_handler = made
        probe = Kretprobe(symbol_name=place, handler=handler, entry_handler=entry_handler, **others)
        registry.register([probe])
        return probe

    return decorate


def _check_place(place: object, word: str) -> None:
    # Without this a decorator without its parentheses would register nothing, and say nothing.
    if not isinstance(place, str):
        raise UsageError(
            f"{word} takes the name of a kernel function, or an address as text: "
            f'@kernel.{word}("vfs_read"), not {place!r}'
        )
