"""One return probe with Python handlers: the kernel's ``struct kretprobe``.

Written down in Documentation/trace/kprobes.rst and include/linux/kprobes.h.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kprobes.errors import UsageError
from kprobes.handlers.instances import Instance, Instances
from kprobes.handlers.probe import Probe, check_handler
from kprobes.handlers.registers import Registers

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
