"""Everything that can go wrong in the world, as one tree.

    KprobesError                 exit 1
    ├── UsageError               exit 2: options that make no sense together
    │   └── NotSupportedError    what this kernel, or this way to reach it, cannot do
    ├── UnreachableError         exit 3: no QEMU, no kernel, port closed, stub busy
    ├── DefinitionError          exit 4: a probe definition is wrong; has code, text and span
    ├── StateError               a directory or file of our own cannot be used, or is not our own
    ├── FormatError              bytes that are not what they should be
    │   └── RingError            ring bytes that no writer of ours wrote
    └── TargetError              the guest, or its kernel, is not as we need it
        ├── MemoryFault          an address that is not mapped
        ├── UnknownSymbolError   no such symbol; carries near names
        ├── AmbiguousSymbolError several symbols of one name
        ├── UnknownTypeError     no such struct, member or function in the types
        ├── NoRoomError          the memory that was taken from a guest is full
        ├── RefusedError         exit 4: a probe that cannot be placed, with the reason
        ├── TracefsError         a file of this machine's tracefs cannot be read or written
        ├── GuestCrashedError    the guest panicked, or hangs; it is still there to be looked at
        │   ├── GuestShutDownError   or it shuts down
        │   └── GuestMigratedError   or it runs in another QEMU now
        └── GuestGoneError       the guest died or its stub hung up
            └── GuestReplacedError   it was rebooted, or restored to another state

``ValueError`` is our own bug and never one of these.
"""

import os

from kprobes.units import Addr


class KprobesError(Exception):
    """The world is not as it should be; the message is one line for the user."""

    exit_code = 1


class UsageError(KprobesError):
    """Options or arguments that make no sense."""

    exit_code = 2


class NotSupportedError(UsageError):
    """What this kernel, or the way in which it is reached, cannot do; says what would work."""


class UnreachableError(KprobesError):
    """A target, or a tool needed to start one, cannot be reached."""

    exit_code = 3


class DefinitionError(KprobesError):
    """A probe definition is wrong.

    Attributes:
        code: the kernel's name of the error, such as ``BAD_REG_NAME``.
        text: the kernel's wording for it.
        command: the definition with its words joined by single blanks.
        column: where the caret stands in ``command``, from 0.
        hint: what would work, or "".
    """

    exit_code = 4

    def __init__(self, code: str, text: str, *, command: str, column: int, hint: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.command = command
        self.column = column
        self.hint = hint

    def __str__(self) -> str:
        """Return the three lines of the kernel's error_log, and the hint."""
        lines = [
            f"error: {self.text}",
            f"  Command: {self.command}",
            " " * (11 + self.column) + "^",
        ]
        return "\n".join([*lines, f"  {self.hint}"] if self.hint else lines)


class StateError(KprobesError):
    """A directory or file of our own that cannot be used, or that others may have written."""


class FormatError(KprobesError):
    """Bytes from a file, a guest or a socket that are not what they should be."""


class RingError(FormatError):
    """Ring bytes that no writer of ours wrote."""


class TargetError(KprobesError):
    """The guest, or the kernel in it, is not as we need it."""


class MemoryFault(TargetError):  # noqa: N818 - the field's word for it
    """An address of the target that is not mapped or not RAM."""

    def __init__(
        self, addr: int, size: int, why: str = "not mapped", *, verb: str = "read"
    ) -> None:
        super().__init__(f"cannot {verb} {size} bytes at {addr:#x}: {why}")
        self.addr = addr
        self.size = size


class UnknownSymbolError(TargetError):
    """No symbol has this name."""

    def __init__(self, name: str, near: tuple[str, ...] = ()) -> None:
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        super().__init__(f"no symbol {name!r} in this kernel{hint}")
        self.name = name
        self.near = near


class AmbiguousSymbolError(TargetError):
    """Several symbols have this name."""

    def __init__(self, name: str, addresses: tuple[Addr, ...]) -> None:
        where = ", ".join(f"{addr:#x}" for addr in addresses[:4])
        super().__init__(f"{len(addresses)} symbols are named {name!r}: {where}")
        self.name = name
        self.addresses = addresses


class UnknownTypeError(TargetError):
    """The kernel's type information has no such struct, member or function."""


class RefusedError(TargetError):
    """A probe that cannot be placed safely; the message says why and what would work."""

    exit_code = 4


class NoRoomError(TargetError):
    """The memory that was taken from a guest is full."""


class NotLoadedError(RefusedError):
    """A probe in a module that is not loaded now.

    Attributes:
        module: its name.
    """

    def __init__(self, module: str) -> None:
        super().__init__(f"module {module} is not loaded; load it first")
        self.module = module


class GuestCrashedError(TargetError):
    """The guest panicked, or hangs. What it recorded, and its memory, can still be read."""


class GuestShutDownError(GuestCrashedError):
    """The guest shuts down, or reboots. All that it recorded can still be read."""


class GuestMigratedError(GuestCrashedError):
    """The guest runs in another QEMU now. All that it recorded until then can still be read."""


class GuestGoneError(TargetError):
    """The guest died, or its stub hung up."""


class GuestReplacedError(GuestGoneError):
    """The guest was rebooted, or restored to another state: nothing there may be touched."""


RESTORED = "the guest was restored to an earlier state"
"""The message of a GuestReplacedError after a monitor's ``loadvm``."""


class TracefsError(TargetError):
    """A file of this machine's own tracing system cannot be read or written.

    Attributes:
        name: of the file, below tracefs.
        number: the kernel's errno.
    """

    def __init__(self, name: str, number: int, *, verb: str) -> None:
        super().__init__(f"cannot {verb} {name} of tracefs: {os.strerror(number)}")
        self.name = name
        self.number = number
