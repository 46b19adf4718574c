"""Triggers of this machine's events: lines of the ``trigger`` files of our instance.

Documentation/trace/events.rst, 6. Each probe is an event of its own here, and has the triggers of
its definition's event; what names that event names all of its probes'. The kernel's triggers see
the hits of every task: which are chosen stands in their filters.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress

from msgspec import Struct

from kprobes.errors import NotSupportedError, RefusedError
from kprobes.host.events import HostFiles
from kprobes.host.prepare import HostProbe
from kprobes.model.definition import Definition
from kprobes.model.options import Wanted
from kprobes.model.trigger import (
    OF_HOSTS,
    OF_TARGETS,
    OF_TRACING,
    Command,
    Trigger,
    of_hosts,
)

_LISTED = re.compile(r"(?P<head>.+?):(?:unlimited|count=(?P<left>-?\d+))(?: if .*)?")
_STOP_S = 0.05
"""Between looks whether a trigger ``stop`` has been there."""


def check_triggers(wanted: Wanted, version: tuple[int, int]) -> None:
    """Raise NotSupportedError for triggers that this machine's kernel has not, by its version."""
    triggers = wanted.triggers
    other = next((each.command for each in triggers if each.command not in OF_HOSTS), None)
    if other is not None:
        known = ", ".join(each for each in Command if each in OF_HOSTS)
        raise NotSupportedError(
            f"a trigger {other} is for guests; with this machine's own kernel there are {known}"
        )
    if triggers and wanted.options.tasks.follow:
        raise NotSupportedError(
            "this machine's own kernel would let hits of every task trigger, not only those of the "
            "command: say --all-tasks, and name tasks with --comm if need be"
        )
    if any(map(_has_two_of_tracing, wanted.definitions)):
        raise NotSupportedError(
            "a trigger stop is this machine's traceoff, of which an event has one: take the other "
            "away, or give it to another event"
        )
    if any(each.command not in of_hosts(version) for each in triggers):
        raise NotSupportedError(
            "before Linux 5.18, a trigger that turns tracing on or off does so for every tracer of "
            "this machine"
        )


def _has_two_of_tracing(definition: Definition) -> bool:
    return sum(each.command in OF_TRACING for each in definition.triggers) > 1


class _Line(Struct, frozen=True, kw_only=True):
    # What is written: how often it may do it, None without an end.
    head: str
    count: int | None
    filter: str

    def text(self, left: int | None) -> str:
        count = "" if left is None else f":{left}"
        return f"{self.head}{count}" + (f" if {self.filter}" if self.filter else "")


class HostTriggers:
    """The triggers that the events of one session have in its instance."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self.forget()

    def forget(self) -> None:
        """Know of none: the instance is new."""
        self._probes: Mapping[int, HostProbe] = {}
        self._lines: dict[int, tuple[_Line, ...]] = {}
        self._last: dict[int, int] = {}
        self._has_stopped = False
        self._next_stop_s = 0.0

    def end(self) -> None:
        """Note what is left of each: tracing is off, and all of them go.

        Raises:
            TracefsError: the instance is gone.
        """
        triggers = [each for probe in self._probes.values() for each in probe.triggers]
        self._last = self._left(triggers)
        self._has_stopped = self._has_stopped or self._looks_stopped()
        self._probes, self._lines = {}, {}

    def change(self, probes: Mapping[int, HostProbe], undo: ExitStack) -> None:
        """Let events have these triggers, which are defined, and those that go none.

        Args:
            probes: by event id, that are wanted, also those that are not enabled.
            undo: is given what has all as before.

        Raises:
            RefusedError: the kernel refuses one.
            TracefsError: the instance is gone.
        """
        old = self._probes, self._lines
        lines = {n: tuple(self._lines_of(each, probes.values())) for n, each in probes.items()}
        undo.callback(self._take_back, *old)
        # One of a kind must go before another one of it comes, which goes on with its count.
        went: dict[tuple[int, str, int | None], int] = {}
        for number, line in _without(self._lines, lines):
            probe = self._probes[number]
            left = self._listed(probe).get(line.head) if line.count is not None else None
            undo.callback(self._restore, probe, line.text(left))
            self._files.add_trigger(probe, f"!{line.head}")
            if left is not None:
                went[number, line.head, line.count] = left
        for number, line in _without(lines, self._lines):
            undo.callback(self._restore, probes[number], f"!{line.head}")
            left = went.get((number, line.head, line.count), line.count)
            self._files.add_trigger(probes[number], line.text(left))
        self._probes, self._lines = dict(probes), lines

    @property
    def has_stopped(self) -> bool:
        """Whether a trigger ``stop`` was seen in this recording, or the last one."""
        return self._has_stopped

    def check_stop(self) -> None:
        """See whether a trigger ``stop`` has been there; called often.

        Raises:
            TracefsError: the instance is gone.
        """
        now = time.monotonic()
        if not self._has_stopped and now >= self._next_stop_s:
            self._next_stop_s = now + _STOP_S
            self._has_stopped = self._looks_stopped()

    def left(self, triggers: Iterable[Trigger]) -> dict[int, int]:
        """Return how often triggers with a count may still do something, by their numbers.

        Each of a definition's probes counts for itself: of these the one with the least.

        Raises:
            TracefsError: the instance is gone.
        """
        return self._last | self._left(triggers)

    def _left(self, triggers: Iterable[Trigger]) -> dict[int, int]:
        counted = [each for each in triggers if each.count is not None]
        more = {e.number: e.count - 1 for e in counted if e.count and e.command is Command.STOP}
        return {n: each + more.get(n, 0) for n, each in self._least(counted).items()}

    def _looks_stopped(self) -> bool:
        found = (each for probe in self._probes.values() for each in probe.triggers)
        stops = [each for each in found if each.command is Command.STOP and each.count != 0]
        return 0 in self._least(stops).values()

    def _take_back(
        self, probes: Mapping[int, HostProbe], lines: dict[int, tuple[_Line, ...]]
    ) -> None:
        self._probes, self._lines = probes, lines

    def _restore(self, probe: HostProbe, text: str) -> None:
        # What was not written yet needs no undoing.
        with suppress(RefusedError):
            self._files.add_trigger(probe, text)

    def _lines_of(self, probe: HostProbe, others: Collection[HostProbe]) -> Iterator[_Line]:
        # The kernel lists the newest first, as we do.
        for each in reversed(probe.triggers):
            for head in self._heads(each, others):
                yield _Line(head=head, count=_count(each), filter=each.filter)

    def _heads(self, trigger: Trigger, others: Collection[HostProbe]) -> list[str]:
        # What its lines begin with: one for each event that it is about.
        if trigger.command not in OF_TARGETS:
            return [Command.TRACEOFF if trigger.command is Command.STOP else trigger.command]
        targets = (each for each in others if each.soft_enable == trigger.soft_enable)
        names = (self._files.name_of(each).replace("/", ":") for each in targets)
        return [f"{trigger.command}:{name}" for name in names]

    def _least(self, triggers: Iterable[Trigger]) -> dict[int, int]:
        # What the kernel lists as left of those with a count, by their numbers.
        heads = {each.number: self._heads(each, self._probes.values()) for each in triggers}
        found: dict[int, int] = {}
        for probe in self._probes.values():
            own = [each.number for each in probe.triggers if each.number in heads]
            listed = self._listed(probe) if own else {}
            for number in own:
                for left in (listed[head] for head in heads[number] if head in listed):
                    found[number] = min(left, found.get(number, left))
        return found

    def _listed(self, probe: HostProbe) -> dict[str, int]:
        # Two CPUs may count down at once: what is below 0 the kernel takes for no count at all.
        found = map(_LISTED.fullmatch, self._files.triggers(probe))
        return {each["head"]: max(int(each["left"] or 0), 0) for each in found if each}


def _without(
    some: Mapping[int, tuple[_Line, ...]], others: Mapping[int, tuple[_Line, ...]]
) -> list[tuple[int, _Line]]:
    return [
        (n, each) for n, lines in some.items() for each in lines if each not in others.get(n, ())
    ]


def _count(trigger: Trigger) -> int | None:
    # Whether ``stop`` was there is seen by what is left of it.
    is_stop = trigger.command is Command.STOP
    return 1 if is_stop and trigger.count != 0 else trigger.count
