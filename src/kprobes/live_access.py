"""The part of a session that only looks: at memory, names, types, the log; without any probe."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from kprobes.handlers.live import LiveKernel
from kprobes.handlers.memory import MAX_STRING
from kprobes.image.log import LogRecord

if TYPE_CHECKING:
    # An extra.
    from drgn import Program


class LiveAccess:
    """Looks at a guest's kernel; of this machine's own all of it is a NotSupportedError."""

    @property
    @abstractmethod
    def live(self) -> LiveKernel:
        """The memory, names and types as they are now, or NotSupportedError without handlers."""

    @property
    def drgn(self) -> "Program":
        """The kernel as a Program of drgn's, whose helpers and scripts take it: howto/drgn.md.

        ``[task.comm.string_() for task in for_each_task(kernel.drgn)]``

        Raises:
            UsageError: drgn is not installed, or the kernel has no types.
        """
        return self.live.program()

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

    def log(self, since: int = 0) -> Sequence[LogRecord]:
        """Return the kernel's own log from message number ``since`` on, also of a dead guest.

        ``for each in kernel.log(): print(each.ts_ns, each.text)``

        Raises:
            TargetError: it cannot be found.
        """
        return self.live.log(since)

    def symbol(self, addr: SupportsIndex) -> str:
        """Return an address as ``%pS`` prints it: ``vfs_read+0x1a/0x2d0``."""
        return self.live.symbol(addr)

    def address(self, name: str) -> int:
        """Return where a symbol is; UnknownSymbolError when there is none."""
        return self.live.address(name)

    def object(self, type_: str, addr: SupportsIndex) -> Any:
        """Return what is at an address: ``kernel.object("struct file", addr).f_mode``."""
        return self.live.object(type_, addr)
