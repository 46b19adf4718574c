"""One probe with Python handlers: the kernel's ``struct kprobe``.

Written down in Documentation/trace/kprobes.rst and include/linux/kprobes.h.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from kprobes.errors import MemoryFault, UsageError
from kprobes.handlers.arguments import Arguments
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.registers import Registers

Handler = Callable[["Kprobe", Registers], object]
PostHandler = Callable[["Kprobe", Registers, int], object]
FaultHandler = Callable[["Kprobe", Registers, MemoryFault], object]

TIMEOUT_S = 1.0


class Registrar(Protocol):
    """Where probes are registered: a session."""

    def register_kprobes(self, probes: "list[Kprobe]") -> None:
        """Arm probes: all of them, or none."""
        ...


class Registration(Protocol):
    """What a registered probe asks of where it is registered."""

    @property
    def live(self) -> LiveKernel:
        """The kernel."""
        ...

    def unregister(self, *probes: "Kprobe") -> None:
        """Take probes away."""
        ...

    def enable(self, probe: "Kprobe", *, is_enabled: bool) -> None:
        """Arm a probe, or disarm it and keep it."""
        ...

    def missed(self, probe: "Kprobe") -> int:
        """Return how often its handlers were due and were not run."""
        ...


@dataclass(eq=False, repr=False, kw_only=True)
class Kprobe:
    """A place in the kernel, and what Python does when it is hit.

    It is live from ``kernel.register_kprobe(probe)`` to ``probe.unregister()``, or to the end of a
    ``with`` block over it.

    Attributes:
        symbol_name: of the function; ``MODULE:FUNCTION`` names one in a module.
        offset: from there, bytes; 0 is the function's entry.
        addr: the place instead; of a probe that was registered, where it is.
        pre_handler: ``(probe, regs)``, called before the instruction. It may change registers. If
            it sets ``regs.ip`` and returns something true, the CPU goes on there and the
            instruction is not run; else it is run, whatever ``regs.ip`` says.
        post_handler: ``(probe, regs, flags)``, called after the instruction; flags are 0.
        fault_handler: ``(probe, regs, fault)``, called when a handler reads or writes memory that
            is not there; ``fault.addr`` says where. Something true means that all is well then;
            else it is an error of the handler. (The kernel had one for its own handlers' faults,
            and for the instruction's, up to 5.13.)
        timeout_s: how long the CPU waits for a handler. Then it goes on, and that is counted.
        hits: how often a handler was called.
        errors: how many calls ended in an exception; what they had changed was forgotten.
        is_enabled: whether handlers are called.
    """

    symbol_name: str = ""
    offset: int = 0
    addr: int | None = None
    pre_handler: Handler | None = None
    post_handler: PostHandler | None = None
    fault_handler: FaultHandler | None = None
    timeout_s: float = TIMEOUT_S
    hits: int = field(default=0, init=False)
    errors: int = field(default=0, init=False)
    is_enabled: bool = field(default=True, init=False)
    _missed: int = field(default=0, init=False)
    _registration: Registration | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Refuse what the kernel refuses, and handlers that cannot be called."""
        if bool(self.symbol_name) == (self.addr is not None):
            raise UsageError("a Kprobe has either a symbol_name or an addr")
        if self.pre_handler is None and self.post_handler is None:
            raise UsageError(f"the Kprobe on {self.place} has no pre_handler and no post_handler")
        _check(self.pre_handler, "pre_handler", ("probe", "regs"))
        _check(self.post_handler, "post_handler", ("probe", "regs", "flags"))
        _check(self.fault_handler, "fault_handler", ("probe", "regs", "fault"))

    @property
    def place(self) -> str:
        """Where it is, as a definition has it."""
        if not self.symbol_name:
            return f"{(self.addr or 0) + self.offset:#x}"
        return f"{self.symbol_name}{self.offset:+#x}" if self.offset else self.symbol_name

    @property
    def name(self) -> str:
        """What its handler is called in Python."""
        handler = self.pre_handler or self.post_handler
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

    def arguments(self, regs: Registers) -> Arguments:
        """Return the arguments of the function that is entered, by name, typed.

        Raises:
            UsageError: the probe is not at a function's entry, or its types are not known.
        """
        return regs.args

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
        return f"<Kprobe {self.name} at {self.place}: {hits}>"

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
            raise UsageError(f"the Kprobe on {self.place} is not registered")
        return self._registration


def _check(handler: Callable[..., object] | None, word: str, takes: tuple[str, ...]) -> None:
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
