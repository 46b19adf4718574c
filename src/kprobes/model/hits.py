"""What was counted of a run, and of one probe's hits."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a run counted.

    Attributes:
        recorded: events read, by event id.
        missed: hits that were not recorded, by event id: another hit of the same context was
            in progress on their CPU.
        lost: records dropped because a ring was full.
        damaged: places in the rings that held no record of ours.
        unkept: calls whose return is not seen, by event id: as many of the function were in
            progress as there was room for.
    """

    recorded: dict[int, int]
    missed: dict[int, int]
    lost: int
    damaged: int
    unkept: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """One probe's numbers.

    Attributes:
        event: its name.
        function: what it probes, as it was given; of a pattern, one of its functions.
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
