"""One probe with Python handlers: the kernel's ``struct kprobe``.

Written down in Documentation/trace/kprobes.rst and include/linux/kprobes.h.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kprobes.errors import MemoryFault, UsageError
from kprobes.handlers.arguments import Arguments
from kprobes.handlers.probe import Probe, check_handler
from kprobes.handlers.registers import Registers

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
