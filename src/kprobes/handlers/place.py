"""Where a probe with handlers is, and what its function's types say."""

from collections.abc import Mapping
from dataclasses import dataclass

from kprobes.arch.facts import Arch
from kprobes.errors import RefusedError, UsageError
from kprobes.handlers.arguments import Argument, arguments_of, find_prototype
from kprobes.handlers.live import LiveKernel
from kprobes.model.symbol import Symbol
from kprobes.model.types import Prototype, Types
from kprobes.units import Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerPlace:
    """One address that has handlers.

    Attributes:
        addr: of the instruction.
        function: that it is in.
        is_entry: whether the function's arguments are still where its caller put them.
        behind: the address behind the instruction where that is all it does, as at an ftrace
            site; else None.
    """

    addr: Addr
    function: Symbol
    is_entry: bool
    behind: Addr | None

    @property
    def module(self) -> str:
        """Whose code it is, or ""."""
        return self.function.module

    def constants(self, arch: Arch) -> Mapping[str, int]:
        """Return the registers whose value is known here, as the kernel's own probes have it."""
        return arch.patch.constants if self.behind is None else arch.constants

    def check_entry(self) -> None:
        """Check that this is a function's entry, as a probe of its returns must be.

        Raises:
            RefusedError: it is not.
        """
        if not self.is_entry:
            where = self.function.place(self.addr)
            raise RefusedError(
                f"{where} is not where {self.function.name} is entered: returns are probed there"
            )

    def prototype(self, live: LiveKernel) -> Prototype:
        """Return the function's prototype.

        Raises:
            UsageError: it is not known, or this is not the function's entry.
        """
        if not self.is_entry:
            raise UsageError(
                f"{self.function.place(self.addr)} is not where {self.function.name} is entered: "
                "arguments are known only there"
            )
        return find_prototype(self._types(live), self.function.name)

    def known_prototype(self, live: LiveKernel) -> Prototype | None:
        """Return the function's prototype, or None where no types tell."""
        types = live.guest.kernel.types_for(self.module)
        return types.function(self.function.name) if types is not None else None

    def arguments(self, live: LiveKernel) -> tuple[Argument, ...]:
        """Return where the function's arguments are; errors as for ``prototype``."""
        prototype = self.prototype(live)
        return arguments_of(prototype, self._types(live), live.guest.arch)

    def _types(self, live: LiveKernel) -> Types:
        return live.types_for(self.module)
