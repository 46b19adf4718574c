"""The common part of all probes with Python handlers: a place, and where they are registered.

Calls in progress whose return a Python handler awaits: ``struct kretprobe_instance``.

They are kept here and not in the guest, by the place of their return address on their stack. A call
may have left by a jump into another function that comes back to this one: such calls have one
place, and the newest returns first.

One probe with Python handlers: the kernel's ``struct kprobe``.

Written down in Documentation/trace/kprobes.rst and include/linux/kprobes.h.

One return probe with Python handlers: the kernel's ``struct kretprobe``.

Written down in Documentation/trace/kprobes.rst and include/linux/kprobes.h.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple, Protocol, Self

from kprobes.errors import MemoryFault, UsageError
from kprobes.handlers.arguments import Arguments
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.registers import Registers

TIMEOUT_S = 1.0


class Registrar(Protocol):
    """Where probes are registered: a session."""

    def register_kprobes(self, probes: "list[Probe]") -> None:
        """Arm probes: all of them, or none."""
        ...


class Registration(Protocol):
    """What a registered probe asks of where it is registered."""

    @property
    def live(self) -> LiveKernel:
        """The kernel."""
        ...

    def unregister(self, *probes: "Probe") -> None:
        """Take probes away."""
        ...

    def enable(self, probe: "Probe", *, is_enabled: bool) -> None:
        """Arm a probe, or disarm it and keep it."""
        ...

    def missed(self, probe: "Probe") -> int:
        """Return how often its handlers were due and were not run."""
        ...


@dataclass(eq=False, repr=False, kw_only=True)
class Probe:
    """A place in the kernel that is live from its registration on.

    Attributes:
        symbol_name: of the function; ``MODULE:FUNCTION`` names one in a module.
        offset: from there, bytes; 0 is the function's entry.
        addr: the place instead; of a probe that was registered, where it is.
        timeout_s: how long the CPU waits for a handler. Then it goes on, and that is counted.
        hits: how often a handler was called.
        errors: how many calls ended in an exception; what they had changed was forgotten.
        is_enabled: whether handlers are called.
        clock: the seconds by which a handler takes too long.
    """

    symbol_name: str = ""
    offset: int = 0
    addr: int | None = None
    timeout_s: float = TIMEOUT_S
    hits: int = field(default=0, init=False)
    errors: int = field(default=0, init=False)
    is_enabled: bool = field(default=True, init=False)
    clock: Callable[[], float] = field(default=time.monotonic, init=False)
    _missed: int = field(default=0, init=False)
    _registration: Registration | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Refuse what is not a place."""
        if bool(self.symbol_name) == (self.addr is not None):
            raise UsageError(f"a {self.kind} has either a symbol_name or an addr")

    @property
    def kind(self) -> str:
        """What it is called."""
        return type(self).__name__

    @property
    def place(self) -> str:
        """Where it is, as a definition has it."""
        if not self.symbol_name:
            return f"{(self.addr or 0) + self.offset:#x}"
        return f"{self.symbol_name}{self.offset:+#x}" if self.offset else self.symbol_name

    @property
    def handlers(self) -> tuple[Callable[..., object] | None, ...]:
        """What Python does there; the first that there is names the probe."""
        return ()

    @property
    def name(self) -> str:
        """What its handler is called in Python."""
        handler = next(each for each in self.handlers if each is not None)
        return getattr(handler, "__name__", "") or type(handler).__name__

    @property
    def is_registered(self) -> bool:
        """Whether it is."""
        return self._registration is not None

    @property
    def kernel(self) -> LiveKernel:
        """The kernel that it is registered in: its memory, symbols and types."""
        return self._registered().live

    @property
    def nmissed(self) -> int:
        """How often handlers were due and were not run: one was slow, or nested in another."""
        registration = self._registration
        return self._missed if registration is None else registration.missed(self)

    def register(self, kernel: Registrar) -> Self:
        """Arm it; errors as for ``Session.register_kprobe``."""
        kernel.register_kprobes([self])
        return self

    def unregister(self) -> None:
        """Disarm it for good; it can be registered again."""
        self._registered().unregister(self)

    def enable(self) -> None:
        """Call its handlers again."""
        self._registered().enable(self, is_enabled=True)

    def disable(self) -> None:
        """Call its handlers no more; it stays registered."""
        self._registered().enable(self, is_enabled=False)

    def bind(self, registration: Registration | None, *, addr: int | None, missed: int = 0) -> None:
        """Note where it is registered now, or that it is no more, for whoever registers it.

        Args:
            registration: None when it is no more.
            addr: where it is; None to leave that as it is.
            missed: of a probe that is no more: how often it was.
        """
        self._registration, self._missed = registration, missed
        self.addr = self.addr if addr is None else addr

    def __repr__(self) -> str:
        hits = f"{self.hits} hits, {self.nmissed} missed, {self.errors} errors"
        return f"<{self.kind} {self.name} at {self.place}: {hits}>"

    def __enter__(self) -> Self:
        self._registered()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._registration is not None:
            self.unregister()

    def _registered(self) -> Registration:
        if self._registration is None:
            raise UsageError(f"the {self.kind} on {self.place} is not registered")
        return self._registration


def check_handler(handler: Callable[..., object] | None, word: str, takes: tuple[str, ...]) -> None:
    """Check that a handler can be called with so many things.

    Raises:
        UsageError: it cannot; ``word`` says which handler it is.
    """
    if handler is None:
        return
    try:
        inspect.signature(handler).bind(*takes)
    except TypeError as error:
        name = getattr(handler, "__name__", repr(handler))
        raise UsageError(f"{word} {name} must take ({', '.join(takes)}): {error}") from error
    except ValueError:
        # Some callables in C do not say what they take.
        return


_TASK = "task_struct"


class TaskName(NamedTuple):
    """A task for as long as it lives, and no other after it.

    Attributes:
        addr: of its ``task_struct``, which another may have later.
        pid: its number, 0 where the kernel's types are not known.
    """

    addr: int
    pid: int


class Instance(SimpleNamespace):
    """One call of a function. Handlers may give it attributes of their own.

    Attributes:
        probe: whose it is.
        data: ``data_size`` bytes for its handlers.
        arguments: of the call when the function was entered, by name: those that its handler
            takes by name.
    """

    probe: Any
    data: bytearray
    arguments: dict[str, Any]

    def __init__(self, probe: object, data_size: int) -> None:
        """Begin with zeros."""
        super().__init__(probe=probe, data=bytearray(data_size), arguments={})


class Instances:
    """Those of one probe.

    Attributes:
        limit: how many there can be at a time.
        missed: calls that found no room.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.missed = 0
        self._by_slot: dict[int, list[_Kept]] = {}

    def __len__(self) -> int:
        return sum(each.instance is not None for kept in self._by_slot.values() for each in kept)

    def start(self, limit: int) -> None:
        """Forget all."""
        self.limit, self.missed, self._by_slot = limit, 0, {}

    def has_room(self, is_gone: Callable[[TaskName], bool]) -> bool:
        """Whether one more call can be kept; those of tasks that are gone make room."""
        if len(self) >= self.limit:
            left = {
                slot: [each for each in kept if not is_gone(each.task)]
                for slot, kept in self._by_slot.items()
            }
            self._by_slot = {slot: kept for slot, kept in left.items() if kept}
        return len(self) < self.limit

    def begin(self, slot: int, task: TaskName, instance: Instance | None) -> None:
        """Keep a call, or None for one that is not to be told of when it returns."""
        # Only this task stands there: others have died.
        kept = [each for each in self._by_slot.pop(slot, ()) if each.task == task]
        if instance is not None or kept:
            self._by_slot[slot] = [*kept, _Kept(task, instance)]

    def end(self, slot: int, task: TaskName, *, is_last: bool) -> Instance | None:
        """Forget the newest call of a slot, and return it; None when it was not kept.

        Args:
            slot: of the call.
            task: that returns.
            is_last: whether no other call returns by this slot: what is kept of any is stale.
        """
        kept = self._by_slot.pop(slot, [])
        found = kept.pop() if kept else None
        if kept and not is_last:
            self._by_slot[slot] = kept
        return found.instance if found is not None and found.task == task else None


class _Kept(NamedTuple):
    task: TaskName
    instance: Instance | None


def name_task(live: LiveKernel, addr: int) -> TaskName:
    """Return the task that a vCPU runs."""
    types = live.guest.kernel.types_for("")
    if types is None:
        return TaskName(addr, 0)
    return TaskName(addr, live.read_u32(addr + types.offset(_TASK, "pid")))


def is_gone(live: LiveKernel, task: TaskName) -> bool:
    """Whether a task has ended, so that none of its calls will return."""
    types = live.guest.kernel.types_for("")
    if types is None:
        return False
    try:
        has_ended = live.read_u32(task.addr + types.offset(_TASK, "exit_state")) != 0
        return has_ended or name_task(live, task.addr) != task
    except MemoryFault:
        return True


Handler = Callable[["Kprobe", Registers], object]
PostHandler = Callable[["Kprobe", Registers, int], object]
FaultHandler = Callable[["Kprobe", Registers, MemoryFault], object]


@dataclass(eq=False, repr=False, kw_only=True)
class Kprobe(Probe):
    """A place in the kernel, and what Python does when it is hit.

    It is live from ``kernel.register_kprobe(probe)`` to ``probe.unregister()``, or to the end of a
    ``with`` block over it.

    Attributes:
        pre_handler: ``(probe, regs)``, called before the instruction. It may change registers. If
            it sets ``regs.ip`` and returns something true, the CPU goes on there and the
            instruction is not run; else it is run, whatever ``regs.ip`` says.
        post_handler: ``(probe, regs, flags)``, called after the instruction; flags are 0.
        fault_handler: ``(probe, regs, fault)``, called when a handler reads or writes memory that
            is not there; ``fault.addr`` says where. Something true means that all is well then;
            else it is an error of the handler. (The kernel had one for its own handlers' faults,
            and for the instruction's, up to 5.13.)
    """

    pre_handler: Handler | None = None
    post_handler: PostHandler | None = None
    fault_handler: FaultHandler | None = None

    def __post_init__(self) -> None:
        """Refuse what the kernel refuses, and handlers that cannot be called."""
        super().__post_init__()
        if self.pre_handler is None and self.post_handler is None:
            raise UsageError(f"the Kprobe on {self.place} has no pre_handler and no post_handler")
        check_handler(self.pre_handler, "pre_handler", ("probe", "regs"))
        check_handler(self.post_handler, "post_handler", ("probe", "regs", "flags"))
        check_handler(self.fault_handler, "fault_handler", ("probe", "regs", "fault"))

    @property
    def handlers(self) -> tuple[Callable[..., object] | None, ...]:
        """Before the instruction, and after it."""
        return self.pre_handler, self.post_handler

    def arguments(self, regs: Registers) -> Arguments:
        """Return the arguments of the function that is entered, by name, typed.

        Raises:
            UsageError: the probe is not at a function's entry, or its types are not known.
        """
        return regs.args


ReturnHandler = Callable[[Instance, Registers], object]

MAX_ACTIVE = 4096
MAX_DATA = 4096
_LEAST_ACTIVE = 10


@dataclass(eq=False, repr=False, kw_only=True)
class Kretprobe(Probe):
    """A function in the kernel, and what Python does when it returns.

    It is live from ``kernel.register_kretprobe(probe)`` to ``probe.unregister()``, or to the end of
    a ``with`` block over it.

    Attributes:
        handler: ``(instance, regs)``, called at every return. ``regs.retval`` is what is returned,
            ``regs.ip`` where to; both may be changed, as other registers.
        entry_handler: ``(instance, regs)``, called when the function is entered. If it returns
            something true, this call's return is not told of.
        maxactive: how many calls are kept for their return at a time; 0 is for the kernel's usual
            number, 10, or twice as many as CPUs. Counts only where something is kept: with an
            ``entry_handler`` or ``data_size``.
        data_size: bytes of every instance's ``data``.
        instances: calls in progress.
    """

    handler: ReturnHandler | None = None
    entry_handler: ReturnHandler | None = None
    maxactive: int = 0
    data_size: int = 0
    instances: Instances = field(default_factory=Instances, init=False)

    def __post_init__(self) -> None:
        """Refuse what the kernel refuses, and handlers that cannot be called."""
        super().__post_init__()
        if self.handler is None:
            raise UsageError(f"the Kretprobe on {self.place} has no handler")
        check_handler(self.handler, "handler", ("instance", "regs"))
        check_handler(self.entry_handler, "entry_handler", ("instance", "regs"))
        if not 0 <= self.maxactive <= MAX_ACTIVE:
            raise UsageError(f"a maxactive of {self.maxactive}: at most {MAX_ACTIVE}")
        if not 0 <= self.data_size <= MAX_DATA:
            raise UsageError(f"a data_size of {self.data_size} bytes: at most {MAX_DATA}")

    @property
    def handlers(self) -> tuple[Callable[..., object] | None, ...]:
        """At the return, and at the entry."""
        return self.handler, self.entry_handler

    @property
    def keeps(self) -> bool:
        """Whether calls are kept from their entry to their return."""
        return self.entry_handler is not None or self.data_size > 0

    @property
    def nmissed(self) -> int:
        """How often handlers were due and were not run: all instances were in use, or one slow."""
        return super().nmissed + self.instances.missed

    def start(self, cpus: int) -> None:
        """Forget all calls, for whoever registers it in a kernel with so many CPUs."""
        self.maxactive = self.maxactive or max(_LEAST_ACTIVE, 2 * cpus)
        self.instances.start(self.maxactive)
