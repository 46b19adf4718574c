"""Text in, events out: a session with one kernel owns everything between the two."""

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, SupportsIndex, TypeVar, Unpack

from kprobes.drain import ROOM, Drain
from kprobes.errors import DefinitionError, RefusedError, UsageError
from kprobes.guest import prepare
from kprobes.guest.arena import ArenaSize
from kprobes.guest.attach import Access
from kprobes.guest.driver import GuestDriver
from kprobes.guest.kernel_abi import kretprobe_trampoline
from kprobes.guest.open import open_driver
from kprobes.guest.places import places_of
from kprobes.guest.recorder import open_drain
from kprobes.handlers import signature
from kprobes.handlers.engine import GuestEngine
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.memory import MAX_STRING
from kprobes.handlers.probe import Probe
from kprobes.handlers.registry import Registry
from kprobes.lang.append import apply
from kprobes.lang.filter import task_filter
from kprobes.lang.parser import parse_statements
from kprobes.model.definition import Definition, Statement, SyntheticFields
from kprobes.model.events import Counts, Event, Events, Hits, each_event
from kprobes.model.kernel import Kernel, place_of
from kprobes.ports import Sink
from kprobes.sinks.names import TraceSource
from kprobes.trace import Trace
from kprobes.transport.agent import Command, Finished, Running
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions

_TICK_S = 0.05
_STUB_CHECK_S = 0.25
_AnyProbe = TypeVar("_AnyProbe", bound=Probe)


def _ignore(words: str) -> None:
    del words


class Session:
    """One kernel that can be probed: a guest that was booted, or attached to.

    Attributes:
        driver: of the guest.
        machine: the guest that we booted, or None.
        definitions: all that ``probe`` was given.
        handlers: probes with Python handlers.
        live: its memory, names and types as they are now.
    """

    def __init__(self, driver: GuestDriver, resources: ExitStack, machine: Machine | None) -> None:
        self.driver = driver
        self.machine = machine
        self.definitions: list[Definition] = []
        self.live = LiveKernel(lambda: driver.guest)
        self._engine = GuestEngine(driver)
        self.handlers = Registry(self._engine, self.live)
        self._resources = resources
        self._is_following = False
        self._is_closed = False

    def __repr__(self) -> str:
        """Return what it is: which kernel, and how many definitions it has."""
        how = "booted" if self.machine is not None else "attached to"
        state = ", closed" if self._is_closed else ""
        return f"<Session with Linux {self.kernel.release} ({self.kernel.arch}), {how}{state}>"

    @property
    def kernel(self) -> Kernel:
        """What runs there: release, symbols, types."""
        return self.driver.guest.kernel

    @property
    def source(self) -> TraceSource:
        """What sinks need to know of it."""
        return TraceSource(
            version=self.kernel.version,
            cpus=self.driver.cpus,
            symbol_at=partial(place_of, self.kernel.symbols),
            trampoline=kretprobe_trampoline(self.kernel),
        )

    def probe(
        self, text: str, *, filter: str = "", duration: bool = False, exits: bool = False
    ) -> None:
        """Add the definitions in a text, which ``record`` or ``stream`` will arm.

        A text is what is written to the kernel's ``kprobe_events``: a definition may join an event
        that is there already, and ``-:EVENT`` takes one away. If anything is wrong, all stays.

        Args:
            text: definitions and deletions, one per line.
            filter: what hits of these must be like to be recorded, in the language of the
                kernel's event filters: ``count > 100 && comm != "cat"``.
            duration: whether events of returns have a field ``duration``, the ns of the call.
            exits: whether they have a field ``exit``, the instruction by which it was left.

        Raises:
            DefinitionError: one is wrong, or names what this kernel has not.
            RefusedError: a function cannot be probed, or what goes is being recorded.
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
        if busy := [each for each in self._engine.recorded if each not in definitions]:
            # As the kernel's EBUSY for an event that is switched on.
            raise RefusedError(
                f"{busy[0].event} is being recorded: Device or resource busy; it can be taken away "
                "when the recording has ended"
            )
        with self._engine.resting():
            self.driver.prepare(definitions)
        self.definitions = [*definitions]

    def _parse(self, text: str) -> Sequence[Statement]:
        guest = self.driver.guest
        try:
            return parse_statements(text, registers=guest.arch.registers)
        except DefinitionError as error:
            raise places_of(guest).first_kernel_error(error) from error

    def choose_tasks(
        self,
        *,
        pids: Collection[int] = (),
        comms: Collection[str] = (),
        tgids: Collection[int] = (),
        follow: bool = False,
    ) -> None:
        """Record hits of some tasks only, from the next recording on.

        Args:
            pids: of the tasks; none means any.
            comms: their names, or shell patterns; none means any.
            tgids: of the processes that they are threads of; none means any.
            follow: whether only commands that ``run`` and ``start`` run from now on, and whatever
                descends from them, are recorded.
        """
        self.driver.tasks = task_filter(pids, comms, tgids=tgids, follow=follow)
        self._is_following = follow

    @contextmanager
    def record(self) -> Generator[Trace]:
        """Arm what was added, record until the block ends, and disarm.

        Raises:
            TargetError: it could not be armed, or the guest died.
        """
        trace = Trace(self.source)
        # The trace keeps all events: it is no matter where they wait for it.
        with self.recording(room=math.inf) as drain:
            yield trace
            self._finish(drain, trace)
            self.driver.check()
        trace.counts, trace.hits = self.counts(), self.hits()

    def stream(self, sink: Sink, *, is_done: Callable[[], bool]) -> Counts:
        """Arm what was added and write its events to a sink until ``is_done``; then disarm.

        When the guest dies, what it recorded before is written first.

        Raises:
            TargetError: it could not be armed, or the guest died.
        """
        with self.recording() as drain:
            try:
                self._pass_on(drain, sink, is_done)
            finally:
                self._finish(drain, sink)
        return self.counts()

    def events(self, *, timeout_s: float | None = None) -> Iterator[Event]:
        """Arm what was added and yield its events one by one, until nobody asks for more.

        Args:
            timeout_s: how long to record; None for as long as the iterator is used.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self.recording() as drain:
            for events in self._batches(drain, lambda: time.monotonic() >= until):
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
        if not self.definitions and not self.handlers.probes:
            raise UsageError("nothing to probe: no definition was given")
        with ExitStack() as undo:
            undo.callback(self._engine.resume)
            # Handlers have been live since they were registered.
            self.driver.disarm()
            self.driver.prepare(self.definitions)
            recorder = self.driver.arm()
            self._engine.recorded = self.definitions
            undo.callback(self.driver.disarm)
            drain = open_drain(recorder, self.driver.guest, self.driver.free_dead_calls, room=room)
            undo.callback(drain.stop)
            yield drain

    def counts(self) -> Counts:
        """Return what was counted since the first probe was armed."""
        return self.driver.counts()

    def hits(self) -> list[Hits]:
        """Return what the last recording counted of every probe; of newer ones nothing yet."""
        return self.driver.hits()

    def run(self, command: Command, timeout_s: float | None = None) -> Finished:
        """Run a command in a guest that we booted.

        Raises:
            UsageError: the guest is somebody else's.
            TargetError: it did not end in time.
        """
        if not self._is_following:
            return self._own().run(command, timeout_s)
        running = self.start(command)
        try:
            return running.wait(timeout_s)
        except BaseException:
            running.kill()
            raise

    def start(self, command: Command) -> Running:
        """Start a command in a guest that we booted; errors as for ``run``."""
        if not self._is_following:
            return self._own().start(command)
        running = self._own().start(command, is_held=True)
        prepare.follow(self.driver.guest, running.pid)
        running.go()
        return running

    def register_kprobe(self, probe: _AnyProbe) -> _AnyProbe:
        """Arm a ``Kprobe`` or ``Kretprobe``; it is live until it is unregistered.

        Raises:
            DefinitionError: there is no such place.
            RefusedError: no probe can be there, or Python cannot be asked in this guest.
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

    def read(self, addr: SupportsIndex, size: int) -> bytes:
        """Return exactly ``size`` bytes of the kernel's memory, or raise MemoryFault."""
        return self.live.read(addr, size)

    def read_u64(self, addr: SupportsIndex) -> int:
        """Return the u64 at an address of the kernel, or raise MemoryFault."""
        return self.live.read_u64(addr)

    def string(self, addr: SupportsIndex, max_size: int = MAX_STRING) -> str:
        """Return the text at an address of the kernel, up to its NUL, or raise MemoryFault."""
        return self.live.string(addr, max_size)

    def write(self, addr: SupportsIndex, data: bytes) -> None:
        """Write the kernel's data; MemoryFault where that is impossible, RefusedError for code."""
        self.live.write(addr, data)

    def symbol(self, addr: SupportsIndex) -> str:
        """Return an address as ``%pS`` prints it: ``vfs_read+0x1a/0x2d0``."""
        return self.live.symbol(addr)

    def address(self, name: str) -> int:
        """Return where a symbol is; UnknownSymbolError when there is none."""
        return self.live.address(name)

    def object(self, type_: str, addr: SupportsIndex) -> Any:
        """Return what is at an address: ``kernel.object("struct file", addr).f_mode``."""
        return self.live.object(type_, addr)

    def close(self) -> None:
        """Put the kernel back as it was and let go of it."""
        self._is_closed = True
        self._resources.close()

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
    def _registry(self) -> Registry:
        self._check_open()
        return self.handlers

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this session is closed: boot or attach again")

    def _own(self) -> Machine:
        self._check_open()
        if self.machine is None:
            raise UsageError("commands can be run only in a guest that kprobes booted")
        return self.machine

    def _pass_on(self, drain: Drain, sink: Sink, is_done: Callable[[], bool]) -> None:
        for events in self._batches(drain, is_done):
            sink.write(events)

    def _batches(self, drain: Drain, is_done: Callable[[], bool]) -> Iterator[Events]:
        read_again = 0.0
        while not is_done():
            events = drain.take(_TICK_S)
            if events is not None:
                yield events
            self.driver.check()
            if time.monotonic() > read_again:
                # The guest's memory outlives it; only the stub tells that it is gone.
                self.driver.check_stub()
                self.driver.check_guest()
                read_again = time.monotonic() + _STUB_CHECK_S

    def _finish(self, drain: Drain, sink: Sink) -> None:
        drain.stop()
        try:
            self.driver.disarm()
        finally:
            while (events := drain.take(0)) is not None:
                sink.write(events)
            if self.driver.recorder is not None:
                for events in self.driver.recorder.rest():
                    sink.write(events)


def boot(
    options: MachineOptions | None = None,
    *,
    size: ArenaSize | None = None,
    access: Access | None = None,
    progress: Callable[[str], None] = _ignore,
) -> Session:
    """Boot a guest of our own and attach to it; it ends with the session.

    Raises:
        UnreachableError: no QEMU, no kernel, or the guest does not come up.
    """
    with ExitStack() as undo:
        machine = undo.enter_context(Machine.boot(options, progress=progress))
        progress("reading its kernel's symbols and types")
        target = str(machine.stub_address)
        return _session(undo, target, size, machine=machine, access=access)


def attach(target: str, *, size: ArenaSize | None = None, access: Access | None = None) -> Session:
    """Attach to a guest that runs already: ``HOST:PORT`` or ``/path.sock`` of its stub.

    Args:
        target: of a gdb stub, or of a monitor that can start one.
        size: of the memory that is taken from the guest.
        access: how it is looked at.

    Raises:
        UnreachableError: nothing answers there, or somebody else uses the stub.
        TargetError: no Linux that we understand runs there.
    """
    with ExitStack() as undo:
        return _session(undo, target, size, access=access)


def _session(
    undo: ExitStack,
    target: str,
    size: ArenaSize | None,
    *,
    machine: Machine | None = None,
    access: Access | None = None,
) -> Session:
    driver = open_driver(undo, target, size, is_ours=machine is not None, access=access)
    return Session(driver, undo.pop_all(), machine)
