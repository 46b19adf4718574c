"""The options of a recording as one value, which drivers are given with its definitions."""

from collections.abc import Callable
from dataclasses import dataclass

from kprobes.model.plan import ReturnMethod, Strategy


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
