"""The options of a recording as one value, and all that is wanted of a driver as another one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kprobes.model.definition import Definition
from kprobes.model.override import Override
from kprobes.model.plan import ReturnMethod, Strategy
from kprobes.model.upcall import Upcall
from kprobes.units import Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Whose hits are recorded.

    Attributes:
        pids: of the tasks; none means any.
        comms: their names, or shell patterns; none means any.
        tgids: of the processes that they are threads of; none means any.
        follow: whether only commands that the session runs, and whatever descends from them.
    """

    pids: tuple[int, ...] = ()
    comms: tuple[str, ...] = ()
    tgids: tuple[int, ...] = ()
    follow: bool = False


def _ignore(words: str) -> None:
    del words


def _nothing() -> None:
    pass


def _always(addr: Addr) -> bool:
    del addr
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a recording.

    Attributes:
        strategy: that is forced on every probe, or None for the cheapest that is safe.
        return_method: that is forced on every return probe, or None for the cheapest one.
        tasks: whose hits are recorded, whatever the probe.
        warn: is given what goes wrong at times when no method could raise it, for people.
        checkpoint: called often while probes are planned and linked; it may raise to end that.
    """

    strategy: Strategy | None = None
    return_method: ReturnMethod | None = None
    tasks: Tasks = Tasks()
    warn: Callable[[str], None] = _ignore
    checkpoint: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """What is to be armed: a site is armed as long as something here is a reason for it.

    Attributes:
        definitions: whose events are recorded; what was wanted before is the same object.
        options: of the recording.
        deleted: definitions that are deleted with this change: new ones need not be like them.
        upcalls: what Python does before or after single instructions.
        return_upcalls: what it does at all returns of functions, by their entries.
        is_there: whether the place of an upcall still is: its module may have gone.
        overrides: what skips calls, after the probes of the same site and before Python; those of
            one function in the order in which they are asked.
    """

    definitions: Sequence[Definition] = ()
    options: Options = Options()
    deleted: Sequence[Definition] = ()
    upcalls: Sequence[Upcall] = ()
    return_upcalls: Sequence[Upcall] = ()
    is_there: Callable[[Addr], bool] = _always
    overrides: Sequence[Override] = ()
