"""What was counted of one probe's hits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """One probe's numbers.

    Attributes:
        event, function: names.
        recorded: hits that became events.
        missed: hits that did not, as another one was in progress in the same context there.
        unkept: calls whose return is not seen, as too many others were in progress.
    """

    event: str
    function: str
    recorded: int
    missed: int
    unkept: int = 0

    @property
    def nmissed(self) -> int:
        """What the kernel counts so: all hits that did not become events but should have."""
        return self.missed + self.unkept
