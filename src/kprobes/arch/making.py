"""What an architecture makes of a body of compiled code: the forms of its functions for that."""

from collections.abc import Collection
from enum import StrEnum
from typing import Protocol

from kprobes.model.plan import Displaced
from kprobes.units import Addr


class Restored(StrEnum):
    """What of the flags register is given back behind a body that was called."""

    ALL = "all"
    """Everything: what the body calls may have changed any."""
    ARITHMETIC = "arithmetic"
    """What instructions compute: the body calls nothing of the guest's."""


class MakeEntry(Protocol):
    """What an ftrace site calls."""

    def __call__(
        self,
        place: Addr,
        body: Addr,
        /,
        *,
        flags: Restored = Restored.ALL,
        reads: Collection[str] | None = None,
    ) -> bytes:
        """Return code for ``place`` that calls a body with the registers saved, and returns.

        Args:
            place: where it will be.
            body: what it calls.
            flags: what of them the body may have changed.
            reads: of CallFacts.saved what the body reads; None for any.
        """
        ...


class MakeDetour(Protocol):
    """Where a patch leads."""

    def __call__(
        self, place: Addr, body: Addr, displaced: Displaced, /, *, flags: Restored = Restored.ALL
    ) -> bytes:
        """See ``PatchFacts.detour``."""
        ...


class MakeTrampoline(Protocol):
    """Where a function returns to."""

    def __call__(self, place: Addr, body: Addr, /, *, flags: Restored = Restored.ALL) -> bytes:
        """See ``ReturnFacts.trampoline``."""
        ...


class MakeBranchDetour(Protocol):
    """Where a patched conditional jump leads."""

    def __call__(
        self,
        place: Addr,
        probes_body: Addr | None,
        tail_body: Addr,
        displaced: Displaced,
        /,
        *,
        flags: Restored = Restored.ALL,
    ) -> bytes:
        """See ``ReturnFacts.branch_detour``."""
        ...
