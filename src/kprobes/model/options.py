"""The options of a recording as one value, and all that is wanted of a driver as another one."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from kprobes.errors import UsageError
from kprobes.model.definition import Definition
from kprobes.model.override import Override
from kprobes.model.plan import ReturnMethod, Strategy
from kprobes.model.trigger import OF_TRACING, SoftEnable, Trigger
from kprobes.model.upcall import Upcall
from kprobes.units import Addr


class Tasks(Struct, frozen=True, kw_only=True):
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


PAUSE_TIMEOUT_S = 60.0
"""How long a trigger stops a guest for a debugger, unless something else is said."""
MAX_PAUSE_S = 0.05
"""How long a guest stands still at once, unless something else is said."""


class Limits(Struct, frozen=True, kw_only=True):
    """What probes may take of a kernel; by default all of it, but no long pause.

    Attributes:
        max_rate: how often a second an event may be hit, hits that its filter rejects included; it
            is disabled when it is hit more often.
        max_overhead: the share of the CPUs' time, from 0 to 1, that hits may take in all; of more,
            the dearest events are disabled.
        max_pause_s: for how long a guest may stand still at once while probes are armed or
            disarmed: a change of many sites is made in several pauses then.
    """

    max_rate: float = math.inf
    max_overhead: float = math.inf
    max_pause_s: float = MAX_PAUSE_S

    def __post_init__(self) -> None:
        """Refuse what no probe could keep to."""
        if not all(each > 0 for each in (self.max_rate, self.max_overhead, self.max_pause_s)):
            raise UsageError("a limit must be more than 0")

    @property
    def counts_hits(self) -> bool:
        """Whether hits must be counted, and timed, where they happen."""
        return min(self.max_rate, self.max_overhead) < math.inf


def _ignore(words: str) -> None:
    del words


def _nothing() -> None:
    pass


def _always(addr: Addr) -> bool:
    del addr
    return True


class Options(Struct, frozen=True, kw_only=True):
    """Options of a recording.

    Attributes:
        strategy: that is forced on every probe, or None for the cheapest that is safe.
        return_method: that is forced on every return probe, or None for the cheapest one.
        tasks: whose hits are recorded, whatever the probe.
        warn: is given what goes wrong at times when no method could raise it, for people.
        limits: of what probes may take.
        hang_timeout_s: for how many seconds a CPU of a guest may have its interrupts off before it
            counts as hung; given, a hang or a panic ends the recording with GuestCrashedError.
            None: no crash is looked for.
        until_shutdown: whether a recording ends with GuestShutDownError when a guest shuts down or
            reboots, just before it does: every event is there then. Else with what it is then.
        checkpoint: called often while probes are planned and linked; it may raise to end that.
        tracing_on: whether recordings begin with tracing on: triggers ``traceon`` may turn it on.
        keeps_end: whether the end of recordings is kept, which triggers ``snapshot`` write.
        pause_timeout_s: for how many seconds a trigger ``pause`` stops a guest where no debugger
            joins that lets it run.
        trigger: a hist trigger that all hits are counted by, in place of being recorded, in one
            table; or "". Of guests.
    """

    strategy: Strategy | None = None
    return_method: ReturnMethod | None = None
    tasks: Tasks = Tasks()
    limits: Limits = Limits()
    hang_timeout_s: float | None = None
    until_shutdown: bool = False
    warn: Callable[[str], None] = _ignore
    checkpoint: Callable[[], None] = _nothing
    tracing_on: bool = True
    keeps_end: bool = False
    pause_timeout_s: float = PAUSE_TIMEOUT_S
    trigger: str = ""


class Wanted(Struct, frozen=True, kw_only=True, eq=False):
    """What is to be armed: a site is armed as long as something here is a reason for it.

    Attributes:
        definitions: whose events are recorded; what was wanted before is the same object.
        options: of the recording.
        deleted: definitions that are deleted with this change: new ones need not be like them.
        over_limit: ids of events that are not armed, as they have passed a limit.
        upcalls: what Python does before or after single instructions.
        return_upcalls: what it does at all returns of functions, by their entries.
        is_there: whether the place of an upcall still is: its module may have gone.
        overrides: what skips calls, after the probes of the same site and before Python; those of
            one function in the order in which they are asked.
        soft_enables: whether events in soft mode, which have triggers or are named by some, are
            enabled, by the numbers of their words.
    """

    definitions: Sequence[Definition] = ()
    options: Options = Options()
    deleted: Sequence[Definition] = ()
    over_limit: frozenset[int] = frozenset()
    upcalls: Sequence[Upcall] = ()
    return_upcalls: Sequence[Upcall] = ()
    is_there: Callable[[Addr], bool] = _always
    overrides: Sequence[Override] = ()
    soft_enables: Mapping[int, SoftEnable] = MappingProxyType({})

    @property
    def triggers(self) -> list[Trigger]:
        """All of its events, each once."""
        found = (trigger for each in self.definitions for trigger in each.triggers)
        return list({trigger.number: trigger for trigger in found}.values())

    @property
    def checks_tracing_on(self) -> bool:
        """Whether tracing may be off at times."""
        return not self.options.tracing_on or any(
            each.command in OF_TRACING for each in self.triggers
        )
