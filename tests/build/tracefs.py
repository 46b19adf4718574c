"""A tracefs that is not there: as much of the kernel as the driver of this machine needs."""

import errno
from dataclasses import dataclass, field
from pathlib import Path

from kprobes.errors import TracefsError
from kprobes.transport.tracefs import Tracefs

_EMPTY = {"filter": "none\n", "trigger": "# Available triggers:\n# traceon traceoff\n"}
_LOG = "[    1.000000] trace_kprobe: error: {text}\n  Command: {line}\n{caret}^\n"


@dataclass
class Instance:
    """One tracing instance.

    Attributes:
        files: what was written to its files, by their names.
        is_open: whether somebody reads its rings.
    """

    files: dict[str, str] = field(default_factory=dict[str, str])
    is_open: bool = False


class FakeTracefs(Tracefs):
    """Probe events and instances in memory.

    Attributes:
        lines: of ``dynamic_events``; in ``kprobe_events`` are those that are no tracepoint's.
        instances: by name.
        refused: words of lines that the kernel refuses, to its text and where the caret stands.
        failing: names of files that cannot be written, to the errno.
        log: ``error_log``.
        written: every write, in order.
        misses: of every event, by its name.
    """

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
        self.lines: list[str] = []
        self.instances: dict[str, Instance] = {}
        self.refused: dict[str, tuple[str, int]] = {}
        self.failing: dict[str, int] = {}
        self.log = ""
        self.written: list[tuple[str, str]] = []
        self.misses: dict[str, int] = {}

    def read(self, name: str) -> str:
        match name:
            case "kprobe_events":
                return "".join(f"{line}\n" for line in self._probes())
            case "dynamic_events":
                return "".join(f"{line}\n" for line in self.lines)
            case "kprobe_profile":
                return "".join(self._profile(line) for line in self._probes())
            case "error_log":
                return self.log
            case _:
                own = name.split("/", 2)[2]
                files = self._instance(name).files
                if own.endswith("/enable"):
                    return self._enabled(name, files, own)
                return files.get(own, _EMPTY.get(own.rpartition("/")[2], "")) or files[own]

    def write(self, name: str, text: str) -> None:
        self.written.append((name, text))
        for word, number in self.failing.items():
            if word in name:
                raise TracefsError(name, number, verb="write")
        if name in ("kprobe_events", "dynamic_events"):
            line = text.rstrip("\n")
            assert name == "dynamic_events" or not self._is_tracepoint(line)
            self._define(line)
        else:
            instance, own = self._instance(name), name.split("/", 2)[2]
            instance.files[own] = self._written(name, text)
            group = own.split("/")[1] if own.startswith("events/") else ""
            if group and group != "task" and not self._of_group(group):
                raise TracefsError(name, errno.ENOENT, verb="write")
            if own == f"events/{group}/enable":
                for event in self._events(group):
                    instance.files[f"events/{group}/{event}/enable"] = text

    def _written(self, name: str, text: str) -> str:
        if not name.endswith("/trigger"):
            return text
        # As event_trigger_print() lists it, the newest first.
        command, has_filter, rest = text.rstrip("\n").removeprefix("!").partition(" if ")
        head, _, count = command.rpartition(":")
        head, left = (head, f"count={count}") if count.isdigit() else (command, "unlimited")
        kept = [e for e in self.read(name).splitlines() if not e.startswith((f"{head}:", "#"))]
        if not text.startswith("!"):
            kept.insert(0, f"{head}:{left}{has_filter}{rest}")
        return "".join(f"{line}\n" for line in kept)

    def has(self, name: str) -> bool:
        if name.startswith("instances/"):
            parts = name.split("/", 2)
            return parts[1] in self.instances
        return name in ("kprobe_events", "dynamic_events", "instances")

    def names(self, directory: str) -> list[str]:
        assert directory == "instances"
        return sorted(self.instances)

    def make(self, directory: str) -> None:
        if "instances" in self.failing:
            raise TracefsError(directory, self.failing["instances"], verb="make")
        self.instances[directory.removeprefix("instances/")] = Instance()

    def remove(self, directory: str) -> None:
        name = directory.removeprefix("instances/")
        if self.instances[name].is_open:
            raise TracefsError(directory, errno.EBUSY, verb="remove")
        del self.instances[name]

    def _instance(self, name: str) -> Instance:
        found = self.instances.get(name.split("/")[1])
        if found is None:
            raise TracefsError(name, errno.ENOENT, verb="open")
        return found

    def _define(self, line: str) -> None:
        if line.startswith("-:"):
            kept = [each for each in self.lines if each.split()[0].partition(":")[2] != line[2:]]
            if kept == self.lines:
                raise TracefsError("kprobe_events", errno.ENOENT, verb="write")
            self.lines = kept
            return
        for word, (text, column) in self.refused.items():
            if word in line:
                self.log += _LOG.format(text=text, line=line, caret=" " * (11 + column))
                raise TracefsError("kprobe_events", errno.EINVAL, verb="write")
        self.lines.append(line)

    def _probes(self) -> list[str]:
        return [line for line in self.lines if not line.startswith("t")]

    def _is_tracepoint(self, line: str) -> bool:
        # The other file knows of no such event, nor how to take one away.
        names = [each.split()[0].partition(":")[2] for each in self.lines if each.startswith("t")]
        return line.startswith("t") or line.removeprefix("-:") in names

    def _profile(self, line: str) -> str:
        name = line.split(maxsplit=1)[0].rpartition("/")[2]
        return f"  {name:<44} {7:>15} {self.misses.get(name, 0):>15}\n"

    def _enabled(self, name: str, files: dict[str, str], own: str) -> str:
        _, group, *event = own.split("/")[:-1]
        found = [each for each in self._events(group) if event in ([], [each])]
        if not found:
            raise TracefsError(name, errno.ENOENT, verb="open")
        states = {files.get(f"events/{group}/{each}/enable", "0") for each in found}
        return states.pop() if len(states) == 1 else "X"

    def _events(self, group: str) -> list[str]:
        return [line.split()[0].rpartition("/")[2] for line in self._of_group(group)]

    def _of_group(self, group: str) -> list[str]:
        return [line for line in self.lines if f":{group}/" in line]
