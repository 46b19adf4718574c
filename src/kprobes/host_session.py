"""Text in, events out, on the kernel that this machine runs."""

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import NoReturn, Self

from kprobes.drain import ROOM, Drain, DrainThread
from kprobes.errors import DefinitionError, UsageError
from kprobes.host.driver import HostDriver, HostOptions
from kprobes.host.machine import open_machine
from kprobes.host.obstacles import check_possible
from kprobes.host.prepare import NO_HANDLERS, HostPlaces, tasks_of
from kprobes.host.reader import open_instance_reader
from kprobes.lang.append import apply
from kprobes.lang.parser import parse_statements
from kprobes.model.definition import Definition, Statement, SyntheticFields
from kprobes.model.events import Counts, Event, Hits, each_event
from kprobes.model.kernel import Kernel, place_of
from kprobes.ports import Sink
from kprobes.sinks.names import TraceSource
from kprobes.trace import Trace
from kprobes.transport.agent import Child, Command, Finished, start

_TICK_S = 0.05
_COUNTERS = ("counter", "uptime", "x86-tsc")
"""Clocks of which the kernel prints numbers as they are."""
_TRAMPOLINES = ("arch_rethook_trampoline", "__kretprobe_trampoline", "kretprobe_trampoline")


class HostSession:
    """This machine's kernel, with the face of a guest's session.

    Attributes:
        driver: of it.
        definitions: all that ``probe`` was given.
    """

    def __init__(self, driver: HostDriver) -> None:
        self.driver = driver
        self.definitions: list[Definition] = []
        self._is_closed = False

    def __repr__(self) -> str:
        """Return what it is: which kernel."""
        state = ", closed" if self._is_closed else ""
        return f"<HostSession with Linux {self.kernel.release} ({self.kernel.arch}){state}>"

    @property
    def kernel(self) -> Kernel:
        """What runs here: release, symbols, types."""
        return self.driver.machine.kernel

    @property
    def source(self) -> TraceSource:
        """What sinks need to know of it."""
        symbols = self.kernel.symbols
        found = (symbols.find(name) for name in _TRAMPOLINES)
        trampoline = next((symbol.addr for symbol in found if symbol is not None), None)
        return TraceSource(
            version=self.kernel.version,
            cpus=self.driver.machine.online,
            symbol_at=partial(place_of, symbols),
            trampoline=trampoline,
            has_ns=self.driver.options.clock not in _COUNTERS,
        )

    def probe(
        self, text: str, *, filter: str = "", duration: bool = False, exits: bool = False
    ) -> None:
        """Add the definitions in a text; as for a guest's session.

        Raises:
            DefinitionError: one is wrong, names what this kernel has not, or what its release
                cannot record.
            RefusedError: a function cannot be probed.
        """
        self._check_open()
        synthetic_fields = SyntheticFields(duration=duration, exit=exits)
        statements = [
            replace(each, filter=filter, synthetic_fields=synthetic_fields)
            if isinstance(each, Definition)
            else each
            for each in self._parse(text)
        ]
        definitions = apply(statements, existing=tuple(self.definitions))
        self.driver.prepare(definitions)
        self.definitions = [*definitions]

    def choose_tasks(
        self,
        *,
        pids: Collection[int] = (),
        comms: Collection[str] = (),
        tgids: Collection[int] = (),
        follow: bool = False,
    ) -> None:
        """Record hits of some tasks only, from the next recording on; as for a guest's session.

        Raises:
            UsageError: processes are chosen, which this kernel's filters do not know.
        """
        if tgids:
            raise UsageError("this machine's own kernel filters by task, not by process: give pids")
        self.driver.tasks = tasks_of(pids, comms, follow=follow)

    @contextmanager
    def record(self) -> Generator[Trace]:
        """Arm what was added, record until the block ends, and disarm.

        Raises:
            DefinitionError: the kernel refuses a probe.
            TargetError: it could not be armed, or somebody took it away meanwhile.
        """
        trace = Trace(self.source)
        # The trace keeps all events: it is no matter where they wait for it.
        with self.recording(room=math.inf) as drain:
            yield trace
            self._finish(drain, trace)
        trace.counts, trace.hits = self.counts(), self.hits()

    def stream(self, sink: Sink, *, is_done: Callable[[], bool]) -> Counts:
        """Arm what was added and write its events to a sink until ``is_done``; then disarm."""
        with self.recording() as drain:
            try:
                while not is_done():
                    events = drain.take(_TICK_S)
                    if events is not None:
                        sink.write(events)
            finally:
                self._finish(drain, sink)
        return self.counts()

    def events(self, *, timeout_s: float | None = None) -> Iterator[Event]:
        """Arm what was added and yield its events one by one, until nobody asks for more.

        Args:
            timeout_s: how long to record; None for as long as the iterator is used.
        """
        with self.recording() as drain:
            until = None if timeout_s is None else time.monotonic() + timeout_s
            while until is None or time.monotonic() < until:
                events = drain.take(_TICK_S)
                if events is not None:
                    yield from each_event(events)
            rest = Trace(self.source)
            self._finish(drain, rest)
            yield from rest

    @contextmanager
    def recording(self, *, room: float = ROOM) -> Generator[Drain]:
        """Keep probes armed and their records flowing into the pump that is yielded.

        Args:
            room: bytes of events that may wait in it; what comes then is lost in the rings.
        """
        self._check_open()
        if not self.definitions:
            raise UsageError("nothing to probe: no definition was given")
        self.driver.prepare(self.definitions)
        try:
            drain = DrainThread(self.driver.arm(), room=room)
            try:
                yield drain
            finally:
                drain.stop()
        finally:
            self.driver.close()

    def counts(self) -> Counts:
        """Return what the last recording counted."""
        return self.driver.counts()

    def hits(self) -> list[Hits]:
        """Return what was counted of every probe, in the order of definitions."""
        return self.driver.hits()

    def run(self, command: Command, timeout_s: float | None = None) -> Finished:
        """Run a command on this machine, as a child of this process.

        Raises:
            UsageError: there is no such program.
            TargetError: it did not end in time; it is killed then.
        """
        child = self.start(command)
        try:
            return child.wait(timeout_s)
        except BaseException:
            child.kill()
            raise

    def start(self, command: Command) -> Child:
        """Start a command on this machine, as a child of this process; errors as for ``run``."""
        if not self.driver.tasks.follow:
            return start(command)
        child = start(command, is_held=True)
        try:
            self.driver.follow(child.pid)
        except BaseException:
            child.kill()
            raise
        finally:
            child.go()
        return child

    def register_kprobe(self, *probes: object, **handlers: object) -> NoReturn:
        """Refuse, as everything does that takes handlers: see ``NO_HANDLERS``."""
        del probes, handlers
        raise UsageError(NO_HANDLERS)

    # All that a guest's session takes handlers by.
    register_kprobes = register_kretprobe = register_kretprobes = register_kprobe
    kprobe = entry = returns = register_kprobe

    def close(self) -> None:
        """Put the kernel back as it was."""
        self._is_closed = True
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _parse(self, text: str) -> Sequence[Statement]:
        machine = self.driver.machine
        try:
            return parse_statements(text, registers=machine.arch.registers)
        except DefinitionError as error:
            raise HostPlaces(machine).first_kernel_error(error) from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this session is closed: call kprobes.host() again")

    def _finish(self, drain: Drain, sink: Sink) -> None:
        try:
            self.driver.disarm()
        finally:
            drain.stop()
            while (events := drain.take(0)) is not None:
                sink.write(events)
            if self.driver.reader is not None:
                for events in self.driver.reader.rest():
                    sink.write(events)


def host(options: HostOptions | None = None) -> HostSession:
    """Return a session with the kernel that this machine runs; it needs root.

    Args:
        options: how it records.

    Raises:
        UnreachableError: it cannot be probed; says why, and what to do.
    """
    check_possible()
    driver = HostDriver(open_machine(), options or HostOptions(), open_instance_reader)
    return HostSession(driver)
