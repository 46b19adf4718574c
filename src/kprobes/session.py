"""Text in, events out: a session with one kernel owns everything between the two."""

import logging
import math
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar, Unpack

from msgspec.structs import replace

from kprobes.counting import LiveHistogram, with_trigger
from kprobes.drain import ROOM, Drain, batches_of, finish, timer
from kprobes.driver import Driver, until_stopped
from kprobes.errors import NotSupportedError, UsageError
from kprobes.event_table import EventTable, TraceProbe
from kprobes.event_triggers import with_synthetic_fields
from kprobes.function_access import FunctionAccess
from kprobes.guest.call import Functions
from kprobes.handlers import signature
from kprobes.handlers.breakpoints import Breakpoint
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.probe import Probe
from kprobes.handlers.registers import Registers
from kprobes.handlers.registry import Registry
from kprobes.limits import LimitThread, LoadWindow
from kprobes.model.definition import Definition, SyntheticFields, SyntheticFieldWords
from kprobes.model.events import Counts, Event, Hits, each_event
from kprobes.model.kernel import Kernel
from kprobes.model.options import MAX_PAUSE_S, Limits, Options, Tasks
from kprobes.open_recording import read_events
from kprobes.ports import Sink
from kprobes.recording_writer import RecordingWriter, begin, ended, opener
from kprobes.sinks.names import TraceSource
from kprobes.trace import Trace
from kprobes.transport.agent import Command, Commands, Finished, Job

if TYPE_CHECKING:
    # It is not everybody's.
    from kprobes.gdbserver.server import GdbServer

NO_DEBUGGER = "a debugger joins guests: this machine's own kernel cannot be stopped"
NO_HANDLERS = (
    "Python cannot run inside the kernel that runs this Python: take events one by one, "
    "`for event in kernel.events(): ...`, or boot a guest for handlers: kprobes.boot()"
)
_AnyProbe = TypeVar("_AnyProbe", bound=Probe)
_Driver_co = TypeVar("_Driver_co", bound=Driver, covariant=True)
_Commands_co = TypeVar("_Commands_co", bound=Commands, covariant=True)


class Session(FunctionAccess, Generic[_Driver_co, _Commands_co]):
    """One kernel that can be probed: of a guest that was booted, or attached to, or this machine's.

    What a kernel cannot do is a ``NotSupportedError``.

    Attributes:
        driver: of the kernel.
        machine: what runs commands there: the guest that we booted, or this machine; else None.
    """

    def __init__(
        self,
        driver: _Driver_co,
        resources: ExitStack,
        machine: _Commands_co | None = None,
        handlers: Callable[[], Registry] | None = None,
        gdbserver: Callable[[str, Callable[[str], None]], "GdbServer"] | None = None,
    ) -> None:
        self.driver = driver
        self.machine = machine
        self._events = EventTable(driver)
        self.options = Options(warn=logging.getLogger("kprobes").warning)
        self._make_handlers = handlers
        self._make_gdbserver = gdbserver
        self._handlers: Registry | None = None
        self._making = threading.Lock()
        self._resources = resources
        self._is_closed = False

    def __repr__(self) -> str:
        """Return what it is: which kernel, and whether it can still be probed."""
        state = ", closed" if self._is_closed else ""
        return f"<Session with Linux {self.kernel.release} ({self.kernel.arch}){state}>"

    @property
    def kernel(self) -> Kernel:
        """What runs there: release, symbols, types."""
        return self.driver.kernel

    @property
    def source(self) -> TraceSource:
        """What sinks need to know of it."""
        return self.driver.source

    @property
    def definitions(self) -> list[Definition]:
        """All that is defined, oldest first."""
        return self._events.definitions

    @property
    def options(self) -> Options:
        """How is recorded, from the next recording, or change of one, on; another may be set.

        Raises:
            NotSupportedError: it asks for what this kernel cannot do.
        """
        return self._events.options

    @options.setter
    def options(self, options: Options) -> None:
        self.driver.accept(options)
        self._events.options = options

    @property
    def handlers(self) -> Registry:
        """Probes with Python handlers, or NotSupportedError where there can be none."""
        if self._make_handlers is None:
            raise NotSupportedError(NO_HANDLERS)
        # Threads may ask for it at once.
        with self._making:
            if self._handlers is None:
                self._handlers = self._make_handlers()
        return self._handlers

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What has Python handlers, oldest first."""
        return () if self._handlers is None else self._handlers.probes

    @property
    def live(self) -> LiveKernel:
        """The memory, names and types as they are now, or NotSupportedError without handlers."""
        return self.handlers.live

    def probe(
        self,
        text: str,
        *,
        filter: str | None = None,
        triggers: Sequence[str] = (),
        enabled: bool = True,
        **fields: Unpack[SyntheticFieldWords],
    ) -> TraceProbe:
        """Define events, which recordings arm as long as they are enabled, and return them.

        ``kernel.probe("r:read vfs_read got=$retval:s64", filter="got < 0", duration=True)``

        A text is what is written to the kernel's ``kprobe_events``: a definition may join an event
        that is there already, and then is enabled as that is, and ``-:EVENT`` takes one away. If
        anything is wrong, all stays. While a recording runs this changes what is recorded.

        Args:
            text: definitions and deletions, one per line.
            filter: what hits must be like to be recorded, as in the kernel's event filters:
                ``count > 100 && comm != "cat"``; "" for all, by default that of their event.
            triggers: what hits do, as in its ``trigger`` files: ``traceoff:1 if count > 4096``.
            enabled: whether their events are enabled at once.
            fields: that events have besides: of returns ``duration``, the ns of the call, and
                with ``exits`` ``exit``, the instruction by which it was left; of all with ``tgid``
                ``common_tgid``, the pid of the task's process, with ``stacktrace`` and
                ``userstacktrace`` ``common_stacktrace`` of the kernel, ``common_userstacktrace``
                of the program.

        Raises:
            DefinitionError: one is wrong, or names what this kernel has not.
            RefusedError: a function cannot be probed, or what goes is being recorded (EBUSY).
        """
        self._check_open()
        wanted = SyntheticFields(**fields)
        statements = with_synthetic_fields(self.driver.parse(text), wanted, triggers)
        return self._events.define(statements, is_enabled=enabled, filter=filter, triggers=triggers)

    def select(self, pattern: str = "*") -> TraceProbe:
        """Return events by a shell pattern of their names: ``EVENT`` or ``GROUP/EVENT``.

        ``kernel.select("read*").disable()``

        Raises:
            UsageError: there is no such event.
        """
        return self._events.select(pattern)

    def describe(self, number: int) -> str:
        """Return an event as a line: its definition, its state, its filter."""
        return self._events.describe(number)

    def choose_tasks(
        self,
        *,
        pids: Collection[int] = (),
        comms: Collection[str] = (),
        tgids: Collection[int] = (),
        follow: bool = False,
    ) -> None:
        """Record hits of some tasks only, from the next recording, or change of one, on.

        ``kernel.choose_tasks(comms=["ls", "cat*"])``, ``kernel.choose_tasks(follow=True)``

        Args:
            pids: of the tasks; none means any.
            comms: their names, or shell patterns; none means any.
            tgids: of the processes that they are threads of; none means any.
            follow: whether only commands that ``run`` and ``start`` run from now on, and whatever
                descends from them.

        Raises:
            NotSupportedError: this machine's kernel is to filter by ``tgids``.
        """
        tasks = Tasks(pids=tuple(pids), comms=tuple(comms), tgids=tuple(tgids), follow=follow)
        self.options = replace(self.options, tasks=tasks)

    def limit(
        self,
        *,
        max_rate: float = math.inf,
        max_overhead: float = math.inf,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        """Keep what events take within limits, from the next recording on: howto/limits.md.

        Args:
            max_rate: how often a second one may be hit, before it is disabled.
            max_overhead: the share of the CPUs' time, from 0 to 1, that all hits may take; of more,
                the dearest events are disabled.
            max_pause_s: how long a guest may stand still at once; ``math.inf`` for one pause.

        Raises:
            NotSupportedError: this machine's kernel is to limit the overhead.
        """
        limits = Limits(max_rate=max_rate, max_overhead=max_overhead, max_pause_s=max_pause_s)
        self.options = replace(self.options, limits=limits)

    @contextmanager
    def record(
        self, *probes: TraceProbe, timeout_s: float | None = None, path: str | Path | None = None
    ) -> Generator[Trace]:
        """Arm what is enabled, record until the block ends, and disarm.

        ``with kernel.record() as trace: kernel.run("ls /")``, and then ``print(trace)``.

        Inside the block the trace yields events as they come; after it, it has all of them, with a
        ``path`` from that file, which ``kprobes.load`` reads again.

        Args:
            probes: that are to be recorded, with what is defined or enabled meanwhile, or all.
            timeout_s: when iterating over it ends; None for as long as it is iterated.
            path: of a file that keeps them; one that is there becomes ``.old``.

        Raises:
            UsageError: this kernel is being recorded already, or nothing is defined.
            TargetError: it could not be armed, or the guest died.
        """
        is_over = timer(timeout_s)
        with ExitStack() as files:
            keep = None if path is None else opener(Path(path), files)
            # The trace keeps all events: it is no matter where they wait for it.
            drain = files.enter_context(self.recording(*probes, room=math.inf, keep=keep))
            batches = batches_of(drain, self.driver.check, until_stopped(self.driver, is_over))
            trace = Trace(self.source, batches, self.counts)
            yield trace
            batches.close()
            self._finish(drain, trace)
            self.driver.check()
        counts, hits = self.counts(), self.hits()
        rest = None if path is None else read_events(Path(path))
        trace.end(lambda: counts, lambda: hits, rest)

    @contextmanager
    def counting(self, trigger: str, *probes: TraceProbe) -> Generator[LiveHistogram]:
        """Arm what is enabled, count hits by a hist trigger until the block ends, and disarm.

        ``with kernel.counting("keys=comm") as counted: kernel.run("ls /"); print(counted.read())``

        Args:
            trigger: in the kernel's language, ``keys=comm,got.log2:vals=got if got > 0``.
            probes: whose hits are counted, as of ``record``.

        Raises:
            DefinitionError: it is wrong, with the caret. Others: as of ``record``.
        """
        before, ids = self.options, self._events.ids_of(probes)
        layouts = (each for each in self.driver.layouts if not ids or each.event_id in ids)
        self.options = with_trigger(before, trigger, self.driver, layouts)
        try:
            with self.recording(*probes, room=math.inf) as drain:
                yield (counted := LiveHistogram(self.driver, trigger, drain))
                counted.stop()
                self._finish(drain, counted)
                self.driver.check()
        finally:
            self.options = replace(self.options, trigger=before.trigger)

    def stream(
        self,
        sink: Sink,
        *,
        is_done: Callable[[], bool],
        keep: Callable[[], RecordingWriter] | None = None,
    ) -> Counts:
        """Arm what is enabled and write its events to a sink until ``is_done``; then disarm.

        When the guest dies, what it recorded before is written first.

        Args:
            sink: of the events.
            is_done: asked often.
            keep: see ``recording``; then the sink gets no events.

        Raises:
            TargetError: it could not be armed, or the guest died.
        """
        is_over = until_stopped(self.driver, is_done)
        with self.recording(keep=keep) as drain:
            try:
                for events in batches_of(drain, self.driver.check, is_over):
                    sink.write(events)
            finally:
                self._finish(drain, sink)
        return self.counts()

    def events(self, *, timeout_s: float | None = None) -> Iterator[Event]:
        """Arm what is enabled and yield its events one by one, until nobody asks for more.

        ``for event in kernel.events(timeout_s=10): print(event.comm, event["path"])``

        Args:
            timeout_s: how long to record; None for as long as the iterator is used.
        """
        is_over = timer(timeout_s)
        with self.recording() as drain:
            for events in batches_of(drain, self.driver.check, until_stopped(self.driver, is_over)):
                yield from each_event(events)
            rest = Trace(self.source)
            self._finish(drain, rest)
            yield from rest

    @contextmanager
    def recording(
        self,
        *probes: TraceProbe,
        room: float = ROOM,
        keep: Callable[[], RecordingWriter] | None = None,
    ) -> Generator[Drain]:
        """Keep probes armed and their records flowing into what is yielded.

        Args:
            probes: see ``record``.
            room: bytes of events that may wait in it; what comes then is lost in the rings.
            keep: returns, when all is armed, what writes the rings' bytes to a file; then no events
                are yielded.
        """
        self._check_open()
        if not len(self._events) and not self.probes:
            raise UsageError("nothing to probe: no definition was given")
        with ExitStack() as written, ExitStack() as undo:
            self._events.begin(probes)
            # The first disarms; nobody drains any more when the second comes.
            undo.callback(self._events.end)
            undo.callback(self._events.end)
            writer = None if keep is None else keep()
            if writer is not None:
                begin(writer, self.kernel, self.source, self.driver.target)
                written.enter_context(ended(writer, self.driver))
            drain = self.driver.drain(room=room, writer=writer)
            undo.callback(drain.stop)
            if self.options.limits.counts_hits:
                window = LoadWindow(self.options.limits, self.source.cpus)
                undo.callback(LimitThread(self._events, window, self.options.warn).stop)
            yield drain

    def counts(self) -> Counts:
        """Return what was counted since the recording began, or in the last one."""
        return self.driver.counts()

    def hits(self) -> list[Hits]:
        """Return what the last recording counted of every probe; of newer ones nothing yet."""
        return self.driver.hits()

    def run(self, command: Command, timeout_s: float | None = None) -> Finished:
        """Run a command in a guest that we booted, or on this machine, to its end.

        ``kernel.run("ls / | wc -l").output``, ``kernel.run(["cat", name], timeout_s=5).status``

        Raises:
            NotSupportedError: nobody runs commands in this guest.
            UsageError: this machine has no such program.
            TargetError: it did not end in time; it is killed then.
        """
        if not self.options.tasks.follow:
            return self._commands.run(command, timeout_s)
        job = self.start(command)
        try:
            return job.wait(timeout_s)
        except BaseException:
            job.kill()
            raise

    def start(self, command: Command) -> Job:
        """Start a command in a guest that we booted, or on this machine; errors as for ``run``.

        ``job = kernel.start("sleep 10")``, and then ``job.wait()`` or ``job.kill()``.
        """
        if not self.options.tasks.follow:
            return self._commands.start(command)
        job = self._commands.start(command, is_held=True)
        try:
            self.driver.follow(job.pid)
        except BaseException:
            job.kill()
            raise
        finally:
            job.go()
        return job

    def register_kprobe(self, probe: _AnyProbe) -> _AnyProbe:
        """Arm a ``Kprobe`` or ``Kretprobe``; it is live until it is unregistered.

        Raises:
            DefinitionError, RefusedError: there is no such place, or no probe can be there.
        """
        self.register_kprobes([probe])
        return probe

    def register_kprobes(self, probes: Sequence[Probe]) -> None:
        """Arm several probes: all of them, or none; errors as for ``register_kprobe``."""
        self._registry.register(probes)

    def unregister_kprobe(self, probe: Probe) -> None:
        """Disarm a probe for good."""
        self.handlers.unregister(probe)

    def unregister_kprobes(self, probes: Sequence[Probe]) -> None:
        """Disarm several probes for good."""
        self.handlers.unregister(*probes)

    # The kernel has functions of these names, too.
    register_kretprobe = register_kprobe
    register_kretprobes = register_kprobes
    unregister_kretprobe = unregister_kprobe
    unregister_kretprobes = unregister_kprobes

    def kprobe(self, place: str, **handlers: Unpack[signature.Others]) -> signature.AsKprobe:
        """Register the function that is decorated as a pre_handler.

        ``@kernel.kprobe("vfs_read", post_handler=after)``; what it decorates becomes a ``Kprobe``.

        Args:
            place: a function, ``MODULE:FUNCTION``, ``FUNCTION+OFFSET`` or an address.
            handlers: ``post_handler``, ``fault_handler`` and ``timeout_s`` of the ``Kprobe``.
        """
        return signature.kprobe(self._registry, place, handlers)

    def entry(self, place: str, **handlers: Unpack[signature.Others]) -> signature.AsEntry:
        """Call the function that is decorated with a kernel function's arguments, typed.

        ``@kernel.entry("do_sys_openat2")`` over ``def opened(dfd, filename, how): ...``; what it
        decorates becomes a ``Kprobe``. The handler takes some of the arguments by their names, or
        all of them by position, and ``*, regs, probe`` if it likes.

        Raises:
            UsageError: the handler takes what the function has not.
        """
        return signature.entry(self._registry, place, handlers)

    def returns(self, place: str, **others: Unpack[signature.ReturnOthers]) -> signature.AsReturn:
        """Call the function that is decorated with what a kernel function returns, typed.

        ``@kernel.returns("vfs_read")`` over ``def done(retval, count): ...``; what it decorates
        becomes a ``Kretprobe``. The handler takes ``retval``, some of the arguments by their names,
        as they were when the function was entered, and ``*, regs, probe`` if it likes.

        Args:
            place: a function, or ``MODULE:FUNCTION``.
            others: ``maxactive`` and ``timeout_s`` of the ``Kretprobe``.

        Raises:
            UsageError: the handler takes what the function has not.
        """
        return signature.returns(self._registry, place, others)

    def breakpoint(
        self, place: str, condition: Callable[[Registers], object] | None = None
    ) -> Breakpoint:
        """Return a breakpoint, at which the guest is stopped when it is waited for.

        ``with kernel.breakpoint("vfs_write", lambda regs: regs.args.count > 100) as point:
        stop = point.wait(); print(stop.stack()); stop.go()``

        Args:
            place: as of ``kprobe``.
            condition: of a hit, asked with its registers; None for each.

        Raises:
            DefinitionError, RefusedError: there is no such place, or no probe can be there.
        """
        point = Breakpoint(self, self.live, place, condition, self.driver.check)
        self._resources.callback(point.close)
        return point

    def gdbserver(self, listen: str) -> "GdbServer":
        """Let a debugger join beside the probes, until the session ends: howto/gdb.md.

        ``with kernel.gdbserver("gdb.sock"), kernel.record() as trace: ...``

        Args:
            listen: the path of a socket, for this user alone, or ``HOST:PORT`` of this machine.

        Raises:
            NotSupportedError: it is this machine's own kernel.
            UsageError: nothing can be made or listened at there, or one can join already.
        """
        self._check_open()
        if self._make_gdbserver is None:
            raise NotSupportedError(NO_DEBUGGER)
        server = self._make_gdbserver(listen, self.options.warn)
        self._resources.callback(server.close)
        return server

    def close(self) -> None:
        """Put the kernel back as it was and let go of it."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed = True
        self._resources.__exit__(kind, error, trace)

    @property
    def _functions(self) -> Functions:
        self._check_open()
        return self.driver.functions

    @property
    def _registry(self) -> Registry:
        self._check_open()
        return self.handlers

    @property
    def _commands(self) -> Commands:
        self._check_open()
        if self.machine is None:
            raise NotSupportedError("commands can be run only in a guest that kprobes booted")
        return self.machine

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this session is closed: boot or attach again")

    def _finish(self, drain: Drain, sink: Sink) -> None:
        finish(drain, sink, self._events.end, self.driver.rest)
