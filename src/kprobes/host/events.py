"""Instance and events of ours in this machine's tracefs: made, switched, and taken away again.

Where the kernel refuses a line, the last entry of its ``error_log`` says why:

    [  1234.567890] trace_kprobe: error: Invalid probed address or symbol
      Command: p:kprobes_1_2_3/open nothing
                                    ^
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from kprobes.errors import DefinitionError, KprobesError, RefusedError, TargetError, TracefsError
from kprobes.host.owner import Owner, owner_of
from kprobes.host.prepare import HostProbe
from kprobes.model.codes import Code
from kprobes.model.resolved import KprobeEvent
from kprobes.transport.tracefs import Tracefs

_COMMAND = "  Command: "
_ENTRY = re.compile(r"^\[ *\d+\.\d+\] [\w ]+: error: (?P<text>.*)\n  Command: (?P<command>.*)\n")
_OURS = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.EPERM, errno.EACCES})
"""What has nothing to do with the line."""
_CODES = {code.text: code for code in Code}


def refusal(error: TracefsError, declaration: KprobeEvent, line: str, log: str) -> KprobesError:
    """Return the kernel's refusal of a line as the definition's error.

    Args:
        error: of the write.
        declaration: what was to be defined.
        line: that was written.
        log: the text of ``error_log`` afterwards.
    """
    if error.number in _OURS:
        return TargetError(f"the kernel defines no more probes: {os.strerror(error.number)}")
    found = last_answer(log, line)
    command = declaration.probe.definition.command
    if found is None:
        return RefusedError(
            f"{command}: the kernel refuses it without a reason "
            f"({os.strerror(error.number)}): {line}"
        )
    text, column = found
    code = _CODES.get(text)
    return DefinitionError(
        code.name if code is not None else "KERNEL",
        text,
        command=command,
        column=declaration.column(line, column),
        hint=f"the kernel was given: {line}",
    )


def last_answer(log: str, line: str) -> tuple[str, int] | None:
    """Return the words and the column of the last entry about a line, or None."""
    for entry in reversed(re.split(r"(?m)^(?=\[)", log)):
        found = _ENTRY.match(entry)
        if found is not None and found["command"].rstrip() == line:
            marked = entry[found.end() :].split("\n")[0]
            return found["text"], max(marked.find("^") - len(_COMMAND), 0)
    return None


def filter_refusal(declaration: KprobeEvent, text: str, shown: str) -> KprobesError:
    """Return the kernel's refusal of a filter.

    Args:
        declaration: whose event it is for.
        text: the filter that was written.
        shown: what the event's filter file says now: the filter, a caret, and the reason.
    """
    command = declaration.probe.definition.command
    lines = shown.rstrip("\n").split("\n")
    reason = lines[-1].removeprefix("parse_error: ")
    if len(lines) < 3:
        return RefusedError(f"{command}: the kernel refuses its filter {text!r}")
    column = max(lines[1].find("^"), 0)
    return DefinitionError("KERNEL", reason, command=text, column=column, hint=f"of {command}")


def trigger_refusal(error: TracefsError, declaration: KprobeEvent, line: str) -> KprobesError:
    """Return the kernel's refusal of a trigger.

    Args:
        error: of the write.
        declaration: whose event it is for.
        line: that was written.
    """
    command, why = declaration.probe.definition.command, os.strerror(error.number)
    return RefusedError(f"{command}: the kernel refuses its trigger {line!r} ({why})")


PROBES = "kprobe_events"
"""Where probes are defined and listed."""
_ANY = "dynamic_events"
"""Likewise, and what is at tracepoints."""
_TRACEPOINT = "t"
_PROFILE = "kprobe_profile"
_LOG = "error_log"
_ATTEMPTS = 5
_NO_FILTER = "0"
"""Written to a filter file, takes the filter away."""


class HostFiles:
    """What one session has in tracefs. Nobody else's files are written.

    Attributes:
        instance: its directory, where its buffers are.
    """

    def __init__(self, tracefs: Tracefs, owner: Owner) -> None:
        self._tracefs = tracefs
        self._owner = owner
        self.instance = owner.instance

    def make_instance(self, *, buffer_kib: int, clock: str) -> None:
        """Make our instance.

        Args:
            buffer_kib: of each CPU's ring.
            clock: of its time stamps, by the kernel's name.

        Raises:
            TracefsError: there is no memory, or no such clock.
        """
        tracefs = self._tracefs
        tracefs.make(self.instance)
        tracefs.write(f"{self.instance}/tracing_on", "0")
        tracefs.write(f"{self.instance}/trace_clock", clock)
        tracefs.write(f"{self.instance}/buffer_size_kb", str(buffer_kib))

    def define(self, probe: HostProbe) -> None:
        """Write an event's line.

        Raises:
            DefinitionError: the kernel refuses it, and says where.
            RefusedError: it does not say why.
            TargetError: it is out of something.
        """
        line = probe.declaration.line(self._owner.group, probe.name)
        try:
            self._tracefs.write(_ANY if probe.is_tracepoint else PROBES, f"{line}\n")
        except TracefsError as error:
            raise refusal(error, probe.declaration, line, self._read_log()) from error

    def set_filter(self, probe: HostProbe) -> None:
        """Give an event its filter in our instance.

        Raises:
            DefinitionError: the kernel refuses it.
        """
        name = f"{self._event(probe)}/filter"
        try:
            self._tracefs.write(name, probe.filter or _NO_FILTER)
        except TracefsError as error:
            shown = self._tracefs.read(name)
            raise filter_refusal(probe.declaration, probe.filter, shown) from error

    def add_trigger(self, probe: HostProbe, line: str) -> None:
        """Give an event a trigger more in our instance, or with ``!`` before it one less.

        Raises:
            RefusedError: the kernel refuses it.
        """
        try:
            self._tracefs.write(f"{self._event(probe)}/trigger", f"{line}\n")
        except TracefsError as error:
            raise trigger_refusal(error, probe.declaration, line) from error

    def triggers(self, probe: HostProbe) -> list[str]:
        """Return an event's triggers in our instance, as the kernel lists them."""
        return _lines(self._tracefs.read(f"{self._event(probe)}/trigger"))

    def set_tracing(self, *, is_on: bool) -> None:
        """Record anything at all from now on, or nothing, in our instance."""
        self._tracefs.write(f"{self.instance}/tracing_on", str(int(is_on)))

    def name_of(self, probe: HostProbe) -> str:
        """Return the name of a probe's event, with its group."""
        return f"{self._owner.group}/{probe.name}"

    def name_tasks(self, events: Sequence[str]) -> None:
        """Record some of the kernel's own events in our instance, from now on, if it has them."""
        for event in events:
            name = f"{self.instance}/events/{event}/enable"
            if self._tracefs.has(name):
                self._tracefs.write(name, "1")
        self.set_tracing(is_on=True)

    def follow(self, pid: int) -> None:
        """Have our instance record a task and what descends from it, and no others."""
        self._tracefs.write(f"{self.instance}/options/event-fork", "1")
        self._tracefs.write(f"{self.instance}/set_event_pid", f"{pid}\n")

    def enable(self) -> None:
        """Record our events."""
        self._tracefs.write(f"{self.instance}/events/{self._owner.group}/enable", "1")

    def set_enabled(self, probe: HostProbe, *, is_enabled: bool) -> None:
        """Record one event from now on, or no more."""
        self._tracefs.write(f"{self._event(probe)}/enable", str(int(is_enabled)))

    def is_recorded(
        self, on: Sequence[HostProbe], off: Sequence[HostProbe], *, has_others: bool
    ) -> bool:
        """Whether some of our events are recorded, and some are not.

        Args:
            on: that should be.
            off: that should not be.
            has_others: whether there are more, of which nothing is said.

        Raises:
            TracefsError: one of them, or our instance, is not there any more.
        """
        if on and not (off or has_others):
            # One file for thousands.
            return self._reads(f"{self.instance}/events/{self._owner.group}", "1")
        wanted = [(probe, "1") for probe in on] + [(probe, "0") for probe in off]
        return all(self._reads(self._event(probe), state) for probe, state in wanted)

    def delete(self, probe: HostProbe) -> None:
        """Take an event away that is not recorded."""
        self._delete(self._owner.group, probe.name, is_tracepoint=probe.is_tracepoint)

    def disable(self, *, has_events: bool = True) -> None:
        """Record nothing more; a group without events has no file."""
        self.set_tracing(is_on=False)
        if has_events:
            self._tracefs.write(f"{self.instance}/events/{self._owner.group}/enable", "0")

    def profile(self) -> dict[str, tuple[int, int]]:
        """Return how many hits the kernel has counted, and missed, of our events, by their names.

        Those at tracepoints it does not count.

        Raises:
            TracefsError: others change their probes again and again while we look.
        """
        for _ in range(_ATTEMPTS):
            # The profile has no groups: its lines come in the order of the list.
            before = self._tracefs.read(PROBES)
            profile = [line.split() for line in _lines(self._tracefs.read(_PROFILE))]
            names = list(map(_name, _lines(before)))
            is_same = [name for _, name in names] == [each[0] for each in profile]
            if is_same and before == self._tracefs.read(PROBES):
                return {
                    name: (int(hits), int(misses))
                    for (group, name), (_, hits, misses) in zip(names, profile, strict=True)
                    if group == self._owner.group
                }
        raise TracefsError(_PROFILE, errno.EAGAIN, verb="read")

    def lines(self) -> list[str]:
        """Return what the kernel lists of our events."""
        return [line for line in _listed(self._tracefs) if _name(line)[0] == self._owner.group]

    def remove(self) -> None:
        """Take away everything of ours that is there.

        Raises:
            TracefsError: somebody has our instance open, or uses our events.
        """
        if self._tracefs.has(self.instance):
            # The kernel disables its events by itself.
            self._tracefs.remove(self.instance)
        for line in self.lines():
            group, name = _name(line)
            self._delete(group, name, is_tracepoint=line.startswith(_TRACEPOINT))

    def _delete(self, group: str, name: str, *, is_tracepoint: bool) -> None:
        try:
            self._tracefs.write(_ANY if is_tracepoint else PROBES, f"-:{group}/{name}\n")
        except TracefsError as error:
            # Somebody was quicker.
            if error.number != errno.ENOENT:
                raise

    def _reads(self, directory: str, state: str) -> bool:
        # A star follows where a trigger of somebody's keeps an event at work.
        return self._tracefs.read(f"{directory}/enable").startswith(state)

    def _event(self, probe: HostProbe) -> str:
        return f"{self.instance}/events/{self.name_of(probe)}"

    def _read_log(self) -> str:
        with suppress(TracefsError):
            return self._tracefs.read(_LOG)
        return ""


def owners(tracefs: Tracefs) -> Iterator[Owner]:
    """Yield whose instances and events of kprobe are there, each once."""
    found: dict[Owner, None] = {}
    groups = (_name(line)[0] for line in _listed(tracefs))
    for name in (*tracefs.names("instances"), *groups):
        owner = owner_of(name)
        if owner is not None:
            found[owner] = None
    yield from found


def _listed(tracefs: Tracefs) -> list[str]:
    # What the kernel has of ours and of others: probes, and events at tracepoints.
    found = _lines(tracefs.read(PROBES))
    if tracefs.has(_ANY):
        found += [line for line in _lines(tracefs.read(_ANY)) if line.startswith(_TRACEPOINT)]
    return found


def _lines(text: str) -> list[str]:
    # CONFIG_PROBE_EVENTS_DUMP_FETCHARG adds comments.
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


def _name(line: str) -> tuple[str, str]:
    # Group and event of a line such as "r10:GROUP/EVENT PLACE".
    group, _, event = line.split(" ", maxsplit=1)[0].partition(":")[2].partition("/")
    return group, event
