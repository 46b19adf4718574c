"""Functions to registered probes, for decorators."""

from collections.abc import Callable
from typing import TypedDict

from kprobes.handlers.kprobe import FaultHandler, Handler, Kprobe, PostHandler
from kprobes.handlers.kretprobe import Kretprobe
from kprobes.handlers.registry import Registry
from kprobes.handlers.signature import with_return_signature, with_signature

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

    def decorate(handler: Handler) -> Kprobe:
        probe = Kprobe(symbol_name=place, pre_handler=handler, **others)
        registry.register([probe])
        return probe

    return decorate


def entry(registry: Registry, place: str, others: Others) -> AsEntry:
    """Return what makes a function that takes a kernel function's arguments a registered probe."""

    def decorate(handler: Callable[..., object]) -> Kprobe:
        where = registry.find_place(place)
        names = [argument.name for argument in where.arguments(registry.live)]
        pre_handler = with_signature(handler, where.prototype(registry.live), names)
        return kprobe(registry, place, others)(pre_handler)

    return decorate


def returns(registry: Registry, place: str, others: ReturnOthers) -> AsReturn:
    """Return what makes a function that takes a returned value a registered return probe."""

    def decorate(handler: Callable[..., object]) -> Kretprobe:
        where = registry.find_place(place)
        where.check_entry()
        names = [argument.name for argument in where.arguments(registry.live)]
        made = with_return_signature(handler, where.prototype(registry.live), names)
        handler, entry_handler = made
        probe = Kretprobe(symbol_name=place, handler=handler, entry_handler=entry_handler, **others)
        registry.register([probe])
        return probe

    return decorate
