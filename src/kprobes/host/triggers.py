"""Triggers of this machine's events: lines of the ``trigger`` files of our instance.

Documentation/trace/events.rst, 6. Each probe is an event of its own here, and has the triggers of
its definition's event; what names that event names all of its probes'. The kernel's triggers see
the hits of every task: which are chosen stands in their filters.
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack

from kprobes.errors import NotSupportedError
from kprobes.host.events import HostFiles
from kprobes.host.prepare import HostProbe
from kprobes.model.options import Wanted
from kprobes.model.trigger import OF_HOSTS, OF_TARGETS, OF_TRACING, Command, Trigger
from kprobes.units import U64

_OWN_TRACING = (5, 18)
"""Before, ``traceon`` and ``traceoff`` of an instance are of the whole machine's tracing:
"tracing: Have traceon and traceoff trigger honor the instance"."""
_LEFT = re.compile(r"(?P<head>.+?):count=(?P<left>\d+)(?: if .*)?")
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
    if version < _OWN_TRACING and any(each.command in OF_TRACING for each in triggers):
        raise NotSupportedError(
            "before Linux 5.18, a trigger that turns tracing on or off does so for every tracer of "
            "this machine"
        )


class HostTriggers:
    """The triggers that the events of one session have in its instance."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self.forget()

    def forget(self) -> None:
        """Know of none: the instance is gone, or new."""
        self._probes: Mapping[int, HostProbe] = {}
        self._lines: dict[int, tuple[str, ...]] = {}
        self._last: dict[int, int] = {}
        self._is_stopped = False
        self._next_stop_s = 0.0

    def end(self) -> None:
        """Note how often each may still do something: nothing is recorded any more.

        Raises:
            TracefsError: the instance is gone.
        """
        self._last = self._left([t for probe in self._probes.values() for t in probe.triggers])
        self._probes, self._lines = {}, {}

    def change(self, probes: Mapping[int, HostProbe], undo: ExitStack) -> None:
        """Let events have these triggers, which are defined, and those that go none.

        Args:
            probes: by event id, that are wanted, also those that are not enabled.
            undo: is given what has all as before.

        Raises:
            RefusedError: the kernel refuses one.
        """
        lines = {number: self._lines_of(each, probes.values()) for number, each in probes.items()}
        known = {**self._probes, **probes}
        undo.callback(self._take_back, self._probes, self._lines)
        # One of a kind must go before another one of it comes.
        for number, old in self._lines.items():
            for line in old:
                if line not in lines.get(number, ()):
                    undo.callback(self._files.add_trigger, known[number], line)
                    self._files.add_trigger(known[number], f"!{line}")
        for number, new in lines.items():
            for line in new:
                if line not in self._lines.get(number, ()):
                    self._files.add_trigger(known[number], line)
                    undo.callback(self._files.add_trigger, known[number], f"!{line}")
        self._probes, self._lines = probes, lines

    @property
    def is_stopped(self) -> bool:
        """Whether a trigger ``stop`` has been there; asked often.

        Raises:
            TracefsError: the instance is gone.
        """
        now = time.monotonic()
        if not self._is_stopped and now >= self._next_stop_s:
            self._next_stop_s = now + _STOP_S
            found = (t for probe in self._probes.values() for t in probe.triggers)
            stops = [each for each in found if each.command is Command.STOP and each.count != 0]
            self._is_stopped = 0 in self._listed(stops).values()
        return self._is_stopped

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
        return {n: each + more.get(n, 0) for n, each in self._listed(counted).items()}

    def _take_back(
        self, probes: Mapping[int, HostProbe], lines: dict[int, tuple[str, ...]]
    ) -> None:
        self._probes, self._lines = probes, lines

    def _lines_of(self, probe: HostProbe, others: Collection[HostProbe]) -> tuple[str, ...]:
        # The kernel lists the newest first, as we do.
        found = (self._lines_of_trigger(each, others) for each in reversed(probe.triggers))
        return tuple(line for lines in found for line in lines)

    def _lines_of_trigger(self, trigger: Trigger, others: Collection[HostProbe]) -> list[str]:
        count = _count(trigger)
        text = "" if count is None else f":{count}"
        text += f" if {trigger.filter}" if trigger.filter else ""
        return [f"{head}{text}" for head in self._heads(trigger, others)]

    def _heads(self, trigger: Trigger, others: Collection[HostProbe]) -> list[str]:
        # What its lines begin with: one for each event that it is about.
        if trigger.command not in OF_TARGETS:
            return [Command.TRACEOFF if trigger.command is Command.STOP else trigger.command]
        targets = (each for each in others if each.soft_enable == trigger.soft_enable)
        names = (self._files.name_of(each).replace("/", ":") for each in targets)
        return [f"{trigger.command}:{name}" for name in names]

    def _listed(self, triggers: Iterable[Trigger]) -> dict[int, int]:
        # What the kernel lists as left, by triggers' numbers.
        heads = {each.number: self._heads(each, self._probes.values()) for each in triggers}
        found: dict[int, int] = {}
        for probe in self._probes.values():
            own = [each.number for each in probe.triggers if each.number in heads]
            lines = map(_LEFT.fullmatch, self._files.triggers(probe) if own else ())
            left = {line["head"]: int(line["left"]) for line in lines if line}
            for number in own:
                counts = (left[head] for head in heads[number] if head in left)
                found[number] = min(*counts, found.get(number, U64))
        return found


def _count(trigger: Trigger) -> int | None:
    # Whether ``stop`` was there is seen by what is left of it.
    is_stop = trigger.command is Command.STOP
    return 1 if is_stop and trigger.count != 0 else trigger.count
