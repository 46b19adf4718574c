"""The engine for this machine's kernel: definitions to enabled events, and everything back."""

import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kprobes.drain import Drain, DrainThread, hits_of
from kprobes.errors import (
    DefinitionError,
    NotSupportedError,
    RefusedError,
    TargetError,
    TracefsError,
)
from kprobes.guest.call import Functions
from kprobes.host.events import HostFiles
from kprobes.host.machine import HostMachine
from kprobes.host.owner import forget, new_owner, note
from kprobes.host.prepare import HostPlaces, HostPreparer, HostProbe
from kprobes.host.triggers import HostTriggers, check_triggers
from kprobes.lang.parser import each_statement
from kprobes.model.definition import Definition, Statement
from kprobes.model.events import NO_COUNTS, Counts, Events, Hits, HostEvent, Loads
from kprobes.model.kernel import Kernel, place_of
from kprobes.model.options import Options, Wanted
from kprobes.model.resolved import RecordLayout
from kprobes.model.trigger import SoftEnable, Trigger
from kprobes.recording_writer import RecordingWriter
from kprobes.sinks.names import TraceSource
from kprobes.units import KIB, MIB

DEFAULT_RING = 4 * MIB
DEFAULT_CLOCK = "local"
"""What the kernel's own traces are stamped with."""
_COUNTERS = ("counter", "uptime", "x86-tsc")
"""Clocks of which the kernel prints numbers as they are."""
_NO_HISTS = (
    "hist triggers of events are of guests: `kprobe count -t host` and `kprobe hist -t host` count "
    "this machine's events, and `kprobe report --hist` those of a recording"
)
_CHECK_S = 1.0
"""Between looks whether others have changed what is recorded."""
_TRAMPOLINES = ("arch_rethook_trampoline", "__kretprobe_trampoline", "kretprobe_trampoline")


class HostOptions(Struct, frozen=True, kw_only=True):
    """How this machine's kernel records.

    Attributes:
        ring: bytes of each CPU's ring.
        clock: of the time stamps, by the kernel's name: local, global, mono, boot, tai, ...
    """

    ring: int = DEFAULT_RING
    clock: str = DEFAULT_CLOCK


class HostReader(Protocol):
    """Takes a tracing instance's records out of its rings."""

    @property
    def recorded(self) -> Mapping[int, int]:
        """Events read so far, by their layouts' event ids."""
        ...

    @property
    def lost(self) -> int:
        """Events that the kernel dropped or overwrote before they were read."""
        ...

    def add(self, events: Sequence[HostEvent]) -> None:
        """Expect records of more events, which are not recorded yet."""
        ...

    def write_to(self, writer: RecordingWriter) -> None:
        """Have a writer get the rings' pages from now on; then there are no events.

        Raises:
            KprobesError: it cannot write.
        """
        ...

    def drain(self) -> Events:
        """Return what is safe to show of all that the kernel has recorded, oldest first.

        Raises:
            RingError: pages that no kernel wrote.
            TargetError: the instance is gone.
        """
        ...

    def rest(self) -> Iterator[Events]:
        """Yield everything that is left; the events are disabled."""
        ...

    def close(self) -> None:
        """Let go of the instance, which could not be removed before."""
        ...


OpenReader = Callable[[HostMachine, HostFiles, Sequence[HostProbe]], HostReader]
"""Opens what takes the records out of a session's instance, whose events are defined."""
ReadEvents = Callable[[HostMachine, HostFiles, Sequence[HostProbe]], Sequence[HostEvent]]
"""Reads what records of events look like that are defined later."""


class HostDriver:
    """Arms and disarms probes in the kernel that this machine runs.

    Attributes:
        machine: whose kernel it is.
        options: how it records.
        wanted: what is recorded now.
        reader: of its records, while something is armed or being drained; else None.
    """

    def __init__(
        self,
        machine: HostMachine,
        options: HostOptions,
        open_reader: OpenReader,
        read_events: ReadEvents,
    ) -> None:
        self.machine = machine
        self.wanted = Wanted()
        self.reader: HostReader | None = None
        self.options = options
        self._open_reader = open_reader
        self._read_events = read_events
        self._preparer = HostPreparer(machine)
        self._owner = new_owner()
        self._files = HostFiles(machine.tracefs, self._owner)
        self._triggers = HostTriggers(self._files)
        self._counts = NO_COUNTS
        self._is_on = self._is_enabled = False
        # What the kernel has of ours, by event id; and whether it was enabled, or disabled, last.
        self._defined: dict[int, HostProbe] = {}
        self._enabled: dict[int, SoftEnable] = {}
        self._recorded: dict[int, HostProbe] = {}
        self._missed: dict[str, int] = {}
        self._next_check_s = 0.0
        self._changing = threading.RLock()

    @property
    def kernel(self) -> Kernel:
        """What runs here: release, symbols, types."""
        return self.machine.kernel

    @property
    def target(self) -> str:
        """What it is called."""
        return "host"

    @property
    def cpus(self) -> int:
        """How many CPUs this machine may have."""
        return self.machine.cpus

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
            release=self.kernel.release,
            arch=self.kernel.arch,
        )

    @property
    def waiting(self) -> Sequence[Definition]:
        """Nothing: this kernel waits for modules itself."""
        return ()

    @property
    def layouts(self) -> Sequence[RecordLayout]:
        """Of the records of all that is defined."""
        return [probe.layout for probe in self._preparer.probes.values()]

    @property
    def left_out(self) -> Sequence[RefusedError]:
        """Nothing: it names what it does not probe."""
        return ()

    @property
    def is_paused(self) -> bool:
        """Never: we run on it."""
        return False

    @property
    def is_stopped(self) -> bool:
        """Whether a trigger ``stop`` has ended the recording; TargetError if it is gone."""
        # Who changes events, or ends it, looks too.
        if self._is_on and self._changing.acquire(blocking=False):
            try:
                with _telling_of_others():
                    self._triggers.check_stop()
            finally:
                self._changing.release()
        return self._triggers.has_stopped

    @property
    def pauses(self) -> None:
        """None: it is never paused."""
        return

    def parse(self, text: str) -> Iterator[Statement]:
        """Yield what the lines of a text say, or raise DefinitionError."""
        return each_statement(text, registers=self.machine.arch.registers)

    def first_kernel_error(self, error: DefinitionError) -> DefinitionError:
        """Return what the kernel finds first in a definition that has an error."""
        return HostPlaces(self.machine).first_kernel_error(error)

    def accept(self, options: Options) -> None:
        """Let these be the options from now on.

        Raises:
            NotSupportedError: processes are chosen, or how probes are placed, or overhead is
                limited, or its end is looked for.
        """
        if options.tasks.tgids:
            raise NotSupportedError(
                "this machine's own kernel filters by task, not by process: give pids"
            )
        has_pids = options.tasks.pids or options.tasks.follow
        if has_pids and not self.machine.has_kernels_pids:
            raise NotSupportedError(
                "the kernel numbers tasks otherwise than this container: choose them by name, with "
                "--comm, or all with --all-tasks, or start it with the machine's processes "
                "(--pid=host)"
            )
        if options.hang_timeout_s is not None or options.until_shutdown:
            raise NotSupportedError("the kernel that runs this tracer cannot be traced to its end")
        if options.limits.max_overhead < math.inf:
            raise NotSupportedError(
                "this machine's own kernel does not tell what hits take; a limit of hits a second "
                "can be kept"
            )
        if options.trigger:
            raise NotSupportedError("this machine's own kernel does not count by our hist triggers")
        if options.strategy is not None or options.return_method is not None:
            raise NotSupportedError("this machine's own kernel places its probes itself")

    @property
    def functions(self) -> Functions:
        """Raise NotSupportedError."""
        raise NotSupportedError(
            "functions are called, and calls skipped, in guests only: kprobes does not patch this "
            "machine's own kernel; its fail_function (CONFIG_FAIL_FUNCTION) skips calls"
        )

    def prepare(self, wanted: Wanted) -> Sequence[HostProbe]:
        """Resolve and spell, without touching the kernel.

        Raises:
            DefinitionError: a definition names what this kernel has not, or cannot record.
            RefusedError: a function cannot be probed.
            NotSupportedError: a trigger is one that only guests have.
        """
        tasks = wanted.options.tasks
        with self._changing:
            self._preparer.compare_without(wanted.deleted)
            check_triggers(wanted, self.kernel.version)
            prepared = (self._preparer.prepare(each, tasks) for each in wanted.definitions)
            probes = (probe for some in prepared for probe in some)
            return [probe for probe in probes if _id(probe) not in wanted.over_limit]

    def forget(self, definition: Definition, *, is_new: bool = False) -> None:
        """Let a definition go that will not be wanted again; its event goes at the end."""
        self._preparer.forget(definition, is_new=is_new)

    def replace_definition(self, old: Definition, new: Definition) -> None:
        """Take a definition for another one, which differs in its filter or its triggers."""
        self._preparer.replace_definition(old, new)

    def layout_of(self, definition: Definition, deleted: Sequence[Definition]) -> RecordLayout:
        """Raise NotSupportedError: there are no hist triggers that could ask for it."""
        del definition, deleted
        raise NotSupportedError(_NO_HISTS)

    def left(self, triggers: Iterable[Trigger]) -> dict[int, int]:
        """Return how often triggers with a count may still do something, by their numbers.

        Raises:
            TargetError: the recording is gone.
        """
        with self._changing, _telling_of_others():
            return self._triggers.left(triggers)

    def event_ids(self, definition: Definition) -> list[int]:
        """Return the numbers of a definition's events in what is counted."""
        return self._preparer.event_ids(definition)

    def apply(self, change: Callable[[Wanted], Wanted], *, begins: bool = False) -> None:
        """Record from now on what differs from what is recorded: all of it, or nothing.

        Args:
            change: what is recorded to what is wanted.
            begins: whether a recording begins with it.

        Raises:
            DefinitionError: the kernel refuses a probe; nothing is left of the others.
            NotSupportedError: it is to call Python.
            TargetError: it is out of memory.
        """
        with self._changing:
            wanted = change(self.wanted)
            probes = self.prepare(wanted)
            if begins:
                self._arm(probes, wanted)
            elif self._is_on:
                self._change(probes, wanted)
            self.wanted = wanted

    def end(self) -> None:
        """Record nothing any more; called again, take everything of ours away.

        Raises:
            TargetError: as for ``disarm``.
        """
        with self._changing:
            self.wanted = replace(self.wanted, definitions=())
            if self._is_on:
                self.disarm()
            else:
                # What was recorded has been drained.
                self.close()

    def drain(self, *, room: float, writer: RecordingWriter | None = None) -> Drain:
        """Drain what is recorded, to a writer if there is one; it began with ``apply``.

        Raises:
            KprobesError: that cannot write.
        """
        if self.reader is None:
            raise ValueError("nothing is recorded that could be drained")
        if writer is not None:
            self.reader.write_to(writer)
        return DrainThread(self.reader, room=room)

    @property
    def tables_size(self) -> int:
        """None of ours, as of ``histogram``."""
        return 0

    def histogram(self, number: int = 0) -> None:
        """None: hits are recorded, and counted from that."""
        del number

    def check(self) -> None:
        """Look once a second whether events are still recorded; called often.

        Raises:
            TargetError: somebody else has disabled some, or taken them away.
        """
        now = time.monotonic()
        # Who changes events at this moment looks at them, too.
        if now < self._next_check_s or not self._changing.acquire(blocking=False):
            return
        try:
            self._next_check_s = now + _CHECK_S
            self._check_recorded()
        finally:
            self._changing.release()

    def rest(self) -> Iterator[Events]:
        """Yield what was recorded and not drained; nothing is armed any more."""
        if self.reader is not None:
            yield from self.reader.rest()

    def _arm(self, probes: Sequence[HostProbe], wanted: Wanted) -> None:
        self.close()
        with ExitStack() as undo:
            # Before the act: taking away what is not there yet is harmless.
            undo.callback(self.close)
            self._missed, self._counts = {}, NO_COUNTS
            self._triggers.forget()
            note(self._owner)
            options = self.options
            self._files.make_instance(buffer_kib=-(-options.ring // KIB), clock=options.clock)
            self._define(probes)
            self._recorded = dict(self._defined)
            self.reader = self._open_reader(self.machine, self._files, probes)
            if not wanted.options.tracing_on:
                self._files.set_tracing(is_on=False)
            self._is_on = True
            self._triggers.change(self._defined, undo)
            self._enabled = _states(self._defined, wanted)
            if not wanted.options.tasks.follow:
                self._enable()
            undo.pop_all()

    def _define(self, probes: Sequence[HostProbe]) -> None:
        for each in probes:
            self._files.define(each)
            self._defined[_id(each)] = each
            if each.filter:
                self._files.set_filter(each)

    def _change(self, probes: Sequence[HostProbe], wanted: Wanted) -> None:
        armed = {_id(probe): probe for probe in probes}
        states = _states(armed, wanted)
        new = [probe for number, probe in armed.items() if number not in self._defined]
        filtered = [
            probe
            for number, probe in armed.items()
            if number in self._defined and self._defined[number].filter != probe.filter
        ]
        with ExitStack() as undo:
            for each in new:
                undo.callback(self._delete, each)
            self._define(new)
            for each in filtered:
                undo.callback(self._files.set_filter, self._defined[_id(each)])
                self._files.set_filter(each)
            if new and self.reader is not None:
                self.reader.add(self._read_events(self.machine, self._files, new))
            self._triggers.change(armed, undo)
            self._switch(states, undo)
            if self.wanted.checks_tracing_on and not wanted.checks_tracing_on:
                self._files.set_tracing(is_on=True)
            undo.pop_all()
        self._defined |= armed
        self._recorded |= armed
        self._enabled = states

    def _switch(self, states: Mapping[int, SoftEnable], undo: ExitStack) -> None:
        # What a trigger has enabled goes off with its last reason, whatever was said by hand.
        for number, probe in self._defined.items():
            before, after = self._enabled.get(number), states.get(number)
            if before != after:
                undo.callback(self._set_enabled, probe, is_enabled=bool(before and before[0]))
                self._set_enabled(probe, is_enabled=bool(after and after[0]))

    def _delete(self, probe: HostProbe) -> None:
        if self._defined.pop(_id(probe), None) is not None:
            self._files.delete(probe)

    def _set_enabled(self, probe: HostProbe, *, is_enabled: bool) -> None:
        if self._is_enabled:
            self._files.set_enabled(probe, is_enabled=is_enabled)

    def _enable(self) -> None:
        self._is_enabled = True
        on = [probe for number, probe in self._defined.items() if self._enabled[number][0]]
        if len(on) == len(self._defined) > 0:
            self._files.enable()
            return
        for each in on:
            self._files.set_enabled(each, is_enabled=True)

    def follow(self, pid: int) -> None:
        """Record what a task does that waits to begin, and what descends from it.

        Without any there are no events: an empty list of pids would mean everybody.
        """
        with self._changing:
            if self._is_on:
                self._files.follow(pid)
                self._enable()

    def disarm(self) -> None:
        """Disable the events; what was recorded can still be drained.

        Raises:
            TargetError: somebody took our events or our instance away meanwhile, or disabled some.
        """
        if not self._is_on:
            return
        try:
            self._check_recorded()
        finally:
            self._is_on = self._is_enabled = False
            with _telling_of_others():
                self._files.set_tracing(is_on=False)
                self._triggers.end()
                self._files.disable(has_events=bool(self._defined))
                self._missed = {name: n for name, (_, n) in self._files.profile().items()}

    def _check_recorded(self) -> None:
        if not self._is_enabled:
            return
        # Those that triggers may enable or disable are as they are.
        own = {n: probe for n, probe in self._defined.items() if not probe.soft_enable}
        on = [probe for n, probe in own.items() if self._enabled.get(n, _OFF)[0]]
        off = [probe for n, probe in own.items() if not self._enabled.get(n, _OFF)[0]]
        has_others = len(own) < len(self._defined)
        with _telling_of_others():
            if not self._files.is_recorded(on, off, has_others=has_others):
                raise TargetError("somebody else enabled or disabled this session's events")

    def close(self) -> None:
        """Take away everything of ours.

        Raises:
            TracefsError: somebody uses it; ``kprobe restore`` tries again.
        """
        with suppress(TargetError):
            self.disarm()
        self._let_go()
        self._defined, self._enabled = {}, {}
        self._files.remove()
        self._preparer.reuse_names()
        forget(self._owner)

    def counts(self) -> Counts:
        """Return what was counted so far, or in the last recording."""
        if self.reader is not None:
            self._counts = self._count(self.reader)
        return self._counts

    def hits(self) -> list[Hits]:
        """Return what the last recording counted of every probe; of newer ones nothing yet."""
        recorded = {number: each.resolved for number, each in self._recorded.items()}
        return hits_of({**recorded, **self._preparer.probes}, self.counts(), self.wanted.over_limit)

    def loads(self) -> Loads:
        """Return how often events were hit so far."""
        with self._changing:
            hits = np.zeros(max(self._defined, default=-1) + 1, np.uint64)
            profile = self._files.profile() if self._is_on else {}
            recorded: Mapping[int, int] = self.reader.recorded if self.reader else {}
            for number, each in self._defined.items():
                # The kernel counts no hits at tracepoints.
                known = recorded.get(number, 0) if each.is_tracepoint else 0
                hits[number] = profile.get(each.name, (known, 0))[0]
        return Loads(hits=hits)

    def _count(self, reader: HostReader) -> Counts:
        return Counts(
            recorded=dict(reader.recorded),
            missed={n: self._missed.get(each.name, 0) for n, each in self._recorded.items()},
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


@contextmanager
def _telling_of_others() -> Generator[None]:
    try:
        yield
    except TracefsError as error:
        raise TargetError(
            f"somebody else took this session's events away while they recorded ({error})"
        ) from error


_OFF: SoftEnable = False, 0


def _states(probes: Mapping[int, HostProbe], wanted: Wanted) -> dict[int, SoftEnable]:
    # Those that have no part in triggers are enabled as long as they are wanted.
    return {n: wanted.soft_enables.get(each.soft_enable, (True, 0)) for n, each in probes.items()}


def _id(probe: HostProbe) -> int:
    return probe.resolved.layout.event_id
