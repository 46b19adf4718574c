"""What all probes with Python handlers have in common: a place, and where they are registered."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from kprobes.errors import UsageError
from kprobes.handlers.live import LiveKernel

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
    """

    symbol_name: str = ""
    offset: int = 0
    addr: int | None = None
    timeout_s: float = TIMEOUT_S
    hits: int = field(default=0, init=False)
    errors: int = field(default=0, init=False)
    is_enabled: bool = field(default=True, init=False)
    _missed: int = field(default=0, init=False)
    _registration: Registration | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Refuse what is no place."""
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
