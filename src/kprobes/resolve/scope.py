"""What all parts of resolving know of the definition at hand."""

from dataclasses import dataclass

from kprobes.arch.facts import Arch
from kprobes.errors import DefinitionError
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import Definition, Kind
from kprobes.model.kernel import Kernel
from kprobes.model.types import Prototype, Types


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One definition on one function.

    Attributes:
        definition: whose words errors point into.
        kernel: of the target.
        arch: its architecture.
        module: that the function is in, or "" for the kernel itself.
        is_entry: whether the probe is where a function begins, and named by a symbol: an
            address is nowhere in particular to the kernel.
    """

    definition: Definition
    kernel: Kernel
    arch: Arch
    module: str
    is_entry: bool

    @property
    def is_return(self) -> bool:
        """Whether the probe is at a function's return."""
        return self.definition.kind is Kind.RETURN and self.is_entry

    @property
    def types(self) -> Types | None:
        """The kernel's types, its module's included, or None when it carries none."""
        return self.kernel.types_for(self.module)

    @property
    def prototype(self) -> Prototype | None:
        """The function's, where the kernel's types have it."""
        symbol = self.definition.place.symbol
        return self.types.function(symbol) if self.types and symbol else None

    def error(self, code: Code, column: int, hint: str = "") -> DefinitionError:
        """Return the error whose caret stands at a column of the command."""
        return rejection(code, command=self.definition.command, column=column, hint=hint)
