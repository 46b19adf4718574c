"""The engine for this machine's kernel: definitions to enabled events, and everything back."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from kprobes.drain import hits_of
from kprobes.errors import TargetError, TracefsError
from kprobes.host.events import HostFiles
from kprobes.host.machine import HostMachine
from kprobes.host.owner import forget, new_owner, note
from kprobes.host.prepare import HostProbe, Tasks, prepare
from kprobes.model.definition import Definition
from kprobes.model.events import Counts, Hits, HostReader
from kprobes.units import KIB, MIB

DEFAULT_RING = 4 * MIB
DEFAULT_CLOCK = "local"
"""What the kernel's own traces are stamped with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How this machine's kernel records.

    Attributes:
        ring: bytes of each CPU's ring.
        clock: of the time stamps, by the kernel's name: local, global, mono, boot, tai, ...
    """

    ring: int = DEFAULT_RING
    clock: str = DEFAULT_CLOCK


NO_COUNTS = Counts(recorded={}, missed={}, lost=0, damaged=0)

OpenReader = Callable[[HostMachine, HostFiles, Sequence[HostProbe]], HostReader]
"""Opens what takes the records out of a session's instance, whose events are defined."""


class HostDriver:
    """Arms and disarms probes in the kernel that this machine runs.

    Attributes:
        machine: whose kernel it is.
        options: how it records.
        probes: what is or will be armed.
        tasks: whose hits are recorded; for ``prepare``.
        reader: of its records, while something is armed or being drained; else None.
    """

    def __init__(self, machine: HostMachine, options: HostOptions, open_reader: OpenReader) -> None:
        self.machine = machine
        self.probes: Sequence[HostProbe] = ()
        self.tasks = Tasks()
        self.reader: HostReader | None = None
        self.options = options
        self._open_reader = open_reader
        self._owner = new_owner()
        self._files = HostFiles(machine.tracefs, self._owner)
        self._counts = NO_COUNTS
        self._is_on = False
        self._recorded: Sequence[HostProbe] = ()
        self._missed: dict[str, int] = {}

    def prepare(self, definitions: Sequence[Definition]) -> Sequence[HostProbe]:
        """Resolve and spell, without touching the kernel.

        Raises:
            DefinitionError: a definition names what this kernel has not, or cannot record.
            RefusedError: a function cannot be probed.
        """
        self.probes = prepare(self.machine, definitions, self.tasks)
        return self.probes

    def arm(self) -> HostReader:
        """Define what was prepared and enable it: all of it, or nothing.

        Raises:
            DefinitionError: the kernel refuses a probe; nothing is left of the others.
            TargetError: it is out of memory.
        """
        self.close()
        with ExitStack() as undo:
            # Before the act: taking away what is not there yet is harmless.
            undo.callback(self.close)
            self._missed, self._counts, self._recorded = {}, NO_COUNTS, self.probes
            note(self._owner)
            options = self.options
            self._files.make_instance(buffer_kib=-(-options.ring // KIB), clock=options.clock)
            for each in self.probes:
                self._files.define(each)
                self._files.set_filter(each)
            self.reader = self._open_reader(self.machine, self._files, self.probes)
            self._is_on = True
            if not self.tasks.follow:
                self._files.enable()
            undo.pop_all()
            return self.reader

    def follow(self, pid: int) -> None:
        """Record what a task does that waits to begin, and what descends from it.

        Without any there are no events: an empty list of pids would mean everybody.
        """
        if self._is_on:
            self._files.follow(pid)
            self._files.enable()

    def disarm(self) -> None:
        """Disable the events; what was recorded can still be drained.

        Raises:
            TargetError: somebody took our events or our instance away meanwhile.
        """
        if not self._is_on:
            return
        self._is_on = False
        try:
            self._files.disable()
            self._missed = self._files.missed()
        except TracefsError as error:
            raise TargetError(
                f"somebody else took this session's events away while they recorded ({error})"
            ) from error

    def close(self) -> None:
        """Take away everything of ours.

        Raises:
            TracefsError: somebody uses it; ``kprobe restore`` tries again.
        """
        with suppress(TargetError):
            self.disarm()
        self._let_go()
        self._files.remove()
        forget(self._owner)

    def counts(self) -> Counts:
        """Return what was counted so far, or in the last recording."""
        if self.reader is not None:
            self._counts = self._count(self.reader)
        return self._counts

    def hits(self) -> list[Hits]:
        """Return what the last recording counted of every probe; of newer ones nothing yet."""
        fresh = [each.resolved for each in self.probes]
        return hits_of([each.resolved for each in self._recorded], fresh, self.counts())

    def _count(self, reader: HostReader) -> Counts:
        layouts = [(each.resolved.layout.event_id, each.name) for each in self._recorded]
        return Counts(
            recorded=dict(reader.recorded),
            missed={event_id: self._missed.get(name, 0) for event_id, name in layouts},
            lost=reader.lost,
            damaged=0,
        )

    def _let_go(self) -> None:
        reader = self.reader
        if reader is None:
            return
        with suppress(TargetError):
            self.counts()
        # The instance cannot go while its rings are open.
        self.reader = None
        reader.close()
