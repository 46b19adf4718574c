"""What a session gives to handlers: registering them, and the kernel's memory, names and types."""

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeVar, Unpack

from kprobes.handlers import decorate
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.memory import MAX_STRING
from kprobes.handlers.probe import Probe
from kprobes.handlers.registry import Registry

_AnyProbe = TypeVar("_AnyProbe", bound=Probe)


class HandlersFace:
    """A kernel whose hits Python can look at.

    Attributes:
        handlers: probes with Python handlers.
        live: its memory, names and types as they are now.
    """

    handlers: Registry
    live: LiveKernel

    def register_kprobe(self, probe: _AnyProbe) -> _AnyProbe:
        """Arm a ``Kprobe`` or ``Kretprobe``; it is live until it is unregistered.

        Raises:
            DefinitionError: there is no such place.
            RefusedError: no probe can be there, or Python cannot be asked in this guest.
        """
        self.handlers.register([probe])
        return probe

    def register_kprobes(self, probes: Sequence[Probe]) -> None:
        """Arm several probes: all of them, or none; errors as for ``register_kprobe``."""
        self.handlers.register(probes)

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

    def kprobe(self, place: str, **handlers: Unpack[decorate.Others]) -> decorate.AsKprobe:
        """Register the function that is decorated as a pre_handler.

        ``@kernel.kprobe("vfs_read", post_handler=after)``; what it decorates becomes a ``Kprobe``.

        Args:
            place: a function, ``MODULE:FUNCTION``, ``FUNCTION+OFFSET`` or an address.
            handlers: ``post_handler``, ``fault_handler`` and ``timeout_s`` of the ``Kprobe``.
        """
        return decorate.kprobe(self.handlers, place, handlers)

    def entry(self, place: str, **handlers: Unpack[decorate.Others]) -> decorate.AsEntry:
        """Call the function that is decorated with a kernel function's arguments, typed.

        ``@kernel.entry("do_sys_openat2")`` over ``def opened(dfd, filename, how): ...``; what it
        decorates becomes a ``Kprobe``. The handler takes some of the arguments by their names, or
        all of them by position, and ``*, regs, probe`` if it likes.

        Raises:
            UsageError: the handler takes what the function has not.
        """
        return decorate.entry(self.handlers, place, handlers)

    def returns(self, place: str, **others: Unpack[decorate.ReturnOthers]) -> decorate.AsReturn:
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
        return decorate.returns(self.handlers, place, others)

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
