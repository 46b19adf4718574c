"""Triggers: what a hit of an event does, whether it is recorded or not.

Documentation/trace/events.rst, 6; Documentation/trace/histogram.rst has the trigger ``hist``.
"""

from collections.abc import Hashable
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from kprobes.model.filter import Filter
from kprobes.model.hist import HistTable, HistTrigger


class Command(StrEnum):
    """What a trigger does; the value is the kernel's word, but for the last ones."""

    TRACEON = "traceon"
    TRACEOFF = "traceoff"
    SNAPSHOT = "snapshot"
    STACKTRACE = "stacktrace"
    ENABLE_EVENT = "enable_event"
    DISABLE_EVENT = "disable_event"
    HIST = "hist"
    ENABLE_HIST = "enable_hist"
    DISABLE_HIST = "disable_hist"
    STOP = "stop"
    """Ours: ends the recording."""
    PAUSE = "pause"
    """Ours: stops the guest for a debugger."""


OF_HISTS = frozenset({Command.ENABLE_HIST, Command.DISABLE_HIST})
"""Those that have an event's hist triggers count, or pause."""
OF_TARGETS = OF_HISTS | {Command.ENABLE_EVENT, Command.DISABLE_EVENT}
"""Those that name another event."""
OF_TRACING = frozenset({Command.TRACEON, Command.TRACEOFF, Command.STOP})
"""Those that say whether anything is recorded."""
OF_HOSTS = OF_TRACING | {Command.ENABLE_EVENT, Command.DISABLE_EVENT}
"""Those that a session with this machine's own kernel may have, if it is new enough."""
_OWN_TRACING_SINCE = (5, 18)
_POST = frozenset({Command.TRACEOFF, Command.STACKTRACE, Command.STOP, Command.PAUSE})


def of_hosts(version: tuple[int, int]) -> frozenset[Command]:
    """Return those that a session may have with this machine's own kernel of a version.

    Before 5.18, ``traceon`` and ``traceoff`` of an instance are of the whole machine's tracing:
    "tracing: Have traceon and traceoff trigger honor the instance".
    """
    return OF_HOSTS - OF_TRACING if version < _OWN_TRACING_SINCE else OF_HOSTS


class Trigger(Struct, frozen=True, kw_only=True):
    """A trigger of one event.

    Attributes:
        command: what it does.
        target: the event that is enabled or disabled, ``GROUP:EVENT``; else "".
        count: how often it does that at most, or None.
        filter: for which hits, in the kernel's language; or "".
        number: tells its count from those of a session's others.
        soft_enable: the number of its target's word; of a hist trigger of its own one, which says
            whether it counts.
        hists: the words of its target's hist triggers, where it is about these.
        text: what a hist trigger counts, as written.
        hist: that, as of the event's first probe.
        table: the number of the table that it counts in.
    """

    command: Command
    target: str = ""
    count: int | None = None
    filter: str = ""
    number: int = 0
    soft_enable: int = 0
    hists: tuple[int, ...] = ()
    text: str = ""
    hist: HistTrigger | None = None
    table: int = 0

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What an event has one of at most: its type to the kernel, and the target."""
        if self.hist is not None:
            return self.hist.identity
        if self.command in OF_TARGETS:
            return "hists" if self.command in OF_HISTS else "event", self.target
        is_tracing = self.command in (Command.TRACEON, Command.TRACEOFF)
        return ("tracing" if is_tracing else self.command,)

    @property
    def is_post(self) -> bool:
        """Whether it comes after the event: EVENT_CMD_FL_POST_TRIGGER."""
        return self.command in _POST

    @property
    def is_conditional(self) -> bool:
        """Whether it looks at the event: update_cond_flag()."""
        return self.is_post or bool(self.filter) or self.command is Command.HIST

    def listed(self, left: int | None) -> str:
        """Return the line of the event's ``trigger`` file: event_trigger_print().

        Args:
            left: how often it may still do it; None for its ``count``. Of a hist trigger, whether
                it counts.
        """
        if (hist := self.shown(left)) is not None:
            return hist.listed
        names = [self.command.value, *([self.target] if self.target else [])]
        count = (
            "unlimited" if self.count is None else f"count={self.count if left is None else left}"
        )
        return ":".join([*names, count]) + (f" if {self.filter}" if self.filter else "")

    def shown(self, left: int | None) -> HistTrigger | None:
        """Return what a hist trigger is now, by whether it counts; None for another one."""
        return self.hist and replace(self.hist, is_paused=not left)


SoftEnable = tuple[bool, int]
"""Whether an event is enabled, and how often that was said of it."""


class CompiledTrigger(Struct, frozen=True, kw_only=True):
    """A trigger of one probe.

    Attributes:
        trigger: what it does.
        filter: for which hits; None for all.
        hist: what it counts them in, or None.
    """

    trigger: Trigger
    filter: Filter | None = None
    hist: HistTable | None = None


# The words of a session's triggers in a guest, all u64; the page is the session's own:
#
#     0            8         16          24       32       40
#     [tracing_on] [stopped] [snapshots] [pauses] [paused] [gone on]
#
#     64                      64 + 8 * MOST
#     [soft enable 0, 1, ...] [left of 0, of 1, ...]
#
#     64 + 16 * MOST
#     [is there 0, 1, ...]
#
# ``tracing_on`` and a soft enable are 1 where events are recorded, and 0 where they are not: the
# latter is EVENT_FILE_FL_SOFT_DISABLED of one event. So has a hist trigger one, 0 while it is
# paused. A trigger that was taken away is not there, and its hist trigger's soft enable is 0: a
# call in progress may still return to code that has it.
#
# ``pauses`` is how often a guest was to be stopped, ``paused`` the trigger that wants it, and from
# bit 32 on its CPU: it waits until ``gone on`` is as much, or for long; then nobody waits any more
# until that is less again.
WORD_TRACING_ON, WORD_STOPPED, WORD_SNAPSHOTS = 0, 8, 16
WORD_PAUSES, WORD_PAUSED, WORD_GONE_ON = 24, 32, 40
PAUSED_CPU_SHIFT = 32
MOST = 252
"""Triggers of a session, and events in soft mode; number 0 is nobody's."""
_SOFT_ENABLES = 64
_LEFT = _SOFT_ENABLES + 8 * MOST
_IS_THERE = _LEFT + 8 * MOST
WORDS_SIZE = _IS_THERE + 8 * MOST


def soft_enable_offset(number: int) -> int:
    """Return where the soft enable of an event is among the words."""
    return _SOFT_ENABLES + 8 * number


def left_offset(number: int) -> int:
    """Return where the count of a trigger is among the words."""
    return _LEFT + 8 * number


def is_there_offset(trigger: Trigger) -> int:
    """Return where the words say whether a trigger does anything."""
    if trigger.command is Command.HIST:
        return soft_enable_offset(trigger.soft_enable)
    return _IS_THERE + 8 * trigger.number
