"""Fields that the records of return probes have beside what their definitions fetch."""

from dataclasses import dataclass

DURATION = "duration"
EXIT = "exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Which of them are wanted, of every return probe.

    Attributes:
        duration: the ns from the entry of the call to its return.
        exit: the instruction by which the function was left.
    """

    duration: bool = False
    exit: bool = False


NO_EXTRAS = Extras()

INSTEAD = {
    DURATION: "here `p FUNCTION` and `r FUNCTION` give the times of both, by task",
    EXIT: "here `p FUNCTION+OFFSET` probes each of its returns, which `kprobe xray` shows",
}
"""What to do for each on this machine's own kernel, which has no such fields."""
