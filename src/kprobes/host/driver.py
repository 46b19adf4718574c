"""The engine for this machine's kernel: definitions to enabled events, and everything back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import SupportsIndex

from kprobes.drain import Drain, DrainThread, hits_of
from kprobes.errors import (
    DefinitionError,
    NotSupportedError,
    RefusedError,
    TargetError,
    TracefsError,
)
from kprobes.guest.override import Overrides
from kprobes.host.events import HostFiles
from kprobes.host.machine import HostMachine
from kprobes.host.owner import forget, new_owner, note
from kprobes.host.prepare import HostPlaces, HostProbe, prepare
from kprobes.lang.parser import parse_statements
from kprobes.model.definition import Definition, Statement
from kprobes.model.events import Counts, Events, Hits, HostReader
from kprobes.model.kernel import Kernel, place_of
from kprobes.model.options import Options, Tasks
from kprobes.sinks.names import TraceSource
from kprobes.units import KIB, MIB

DEFAULT_RING = 4 * MIB
DEFAULT_CLOCK = "local"
"""What the kernel's own traces are stamped with."""
_COUNTERS = ("counter", "uptime", "x86-tsc")
"""Clocks of which the kernel prints numbers as they are."""
_TRAMPOLINES = ("arch_rethook_trampoline", "__kretprobe_trampoline", "kretprobe_trampoline")


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
        reader: of its records, while something is armed or being drained; else None.
    """

    def __init__(self, machine: HostMachine, options: HostOptions, open_reader: OpenReader) -> None:
        self.machine = machine
        self.probes: Sequence[HostProbe] = ()
        self._tasks = Tasks()
        self.reader: HostReader | None = None
        self.options = options
        self._open_reader = open_reader
        self._owner = new_owner()
        self._files = HostFiles(machine.tracefs, self._owner)
        self._counts = NO_COUNTS
        self._is_on = False
        self._recorded: Sequence[HostProbe] = ()
        self._missed: dict[str, int] = {}

    @property
    def kernel(self) -> Kernel:
        """What runs here: release, symbols, types."""
        return self.machine.kernel

    @property
    def source(self) -> TraceSource:
        """What sinks need to know of it."""
        symbols = self.kernel.symbols
        found = (symbols.find(name) for name in _TRAMPOLINES)
        return TraceSource(
            version=self.kernel.version,
            cpus=self.machine.online,
            symbol_at=partial(place_of, symbols),
            trampoline=next((symbol.addr for symbol in found if symbol is not None), None),
            has_ns=self.options.clock not in _COUNTERS,
        )

    @property
    def recorded(self) -> Sequence[Definition]:
        """Nothing: definitions may come and go while events are recorded that were defined."""
        return ()

    @property
    def waiting(self) -> Sequence[Definition]:
        """Nothing: this kernel waits for modules itself."""
        return ()

    @property
    def left_out(self) -> Sequence[RefusedError]:
        """Nothing: it names what it does not probe."""
        return ()

    @property
    def is_paused(self) -> bool:
        """Never: we run on it."""
        return False

    @property
    def pauses(self) -> None:
        """None: it is never paused."""
        return

    def parse(self, text: str) -> Sequence[Statement]:
        """Return what a text says.

        Raises:
            DefinitionError: where the kernel finds something wrong first.
        """
        try:
            return parse_statements(text, registers=self.machine.arch.registers)
        except DefinitionError as error:
            raise HostPlaces(self.machine).first_kernel_error(error) from error

    def accept(self, options: Options) -> None:
        """Let these be the options from now on.

        Raises:
            NotSupportedError: processes are chosen, or how probes are placed.
        """
        if options.tasks.tgids:
            raise NotSupportedError(
                "this machine's own kernel filters by task, not by process: give pids"
            )
        if options.strategy is not None or options.return_method is not None:
            raise NotSupportedError("this machine's own kernel places its probes itself")
        self._tasks = options.tasks

    def call(
        self, function: str, arguments: Sequence[SupportsIndex], *, timeout_s: float
    ) -> int | bool | None:
        """Raise NotSupportedError."""
        del function, arguments, timeout_s
        raise NotSupportedError("functions are called in guests only, not in this machine's kernel")

    @property
    def overrides(self) -> Overrides:
        """Raise NotSupportedError."""
        raise NotSupportedError(
            "calls are skipped in guests only: kprobes does not patch this machine's own kernel; "
            "its fail_function (CONFIG_FAIL_FUNCTION) can"
        )

    def prepare(self, definitions: Sequence[Definition]) -> Sequence[HostProbe]:
        """Resolve and spell, without touching the kernel.

        Raises:
            DefinitionError: a definition names what this kernel has not, or cannot record.
            RefusedError: a function cannot be probed.
        """
        self.probes = prepare(self.machine, definitions, self._tasks)
        return self.probes

    def begin(self, definitions: Sequence[Definition], *, room: float) -> Drain:
        """Start a recording: define and enable definitions, and drain their records.

        Raises:
            DefinitionError: the kernel refuses a probe; nothing is left of the others.
            TargetError: it is out of memory.
        """
        self.prepare(definitions)
        return DrainThread(self.arm(), room=room)

    def check(self) -> None:
        """Do nothing: what takes events away meanwhile is noticed when they are disabled."""

    def rest(self) -> Iterator[Events]:
        """Yield what was recorded and not drained; nothing is armed any more."""
        if self.reader is not None:
            yield from self.reader.rest()

    def end(self) -> None:
        """Take away everything of ours; errors as for ``close``."""
        self.close()

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
            if not self._tasks.follow:
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
