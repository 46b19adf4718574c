"""Overrides: calls of a kernel function that return a given value, and its code does not run.

How the kernel's own fault injection says what a function may be made to return.

The words of one override in the guest, which its code counts in:

    struct override {
        u64 hits;      // calls that came to it
        u64 passed;    // those that its filter let pass; only where that is asked for
        u64 skipped;   // those that returned the value
        u64 missed;    // those that our own code made while it read memory: they are not skipped
        u64 reserved[4];
    };
"""

from enum import StrEnum
from typing import TypedDict

from msgspec import Struct

from kprobes.errors import UsageError
from kprobes.model.resolved import Resolved

OVERRIDE_HITS, OVERRIDE_PASSED, OVERRIDE_SKIPPED, OVERRIDE_MISSED = 0, 8, 16, 24
OVERRIDE_SIZE = 64
"""A cache line: CPUs that count in one do not wait for those that count in another."""
MAX_OVERRIDES = 512
"""Of a session, deleted ones included."""
MAX_ERRNO = 4095
"""include/linux/err.h."""
ALWAYS = 1 << 64


class ErrorType(StrEnum):
    """What a function may be made to return: include/asm-generic/error-injection.h."""

    NULL = "NULL"
    """Only NULL."""
    ERRNO = "ERRNO"
    """A negative errno."""
    ERRNO_NULL = "ERRNO_NULL"
    """A negative errno, or NULL."""
    TRUE = "TRUE"
    """Only true."""

    def allows(self, value: int) -> bool:
        """Whether callers expect this of a failure: adjust_error_retval() in the kernel."""
        is_errno = -MAX_ERRNO <= value < 0
        match self:
            case ErrorType.NULL:
                return value == 0
            case ErrorType.ERRNO:
                return is_errno
            case ErrorType.ERRNO_NULL:
                return is_errno or value == 0
            case ErrorType.TRUE:
                return value == 1


class OverrideOptions(Struct, frozen=True, kw_only=True):
    """Which calls are skipped; of several conditions in this order, as in the kernel's should_fail.

    Attributes:
        filter: that a call must pass, in the language of the kernel's event filters.
        every: of the calls that pass it, each so-manieth.
        probability: of those, from 0 to 1; None for each of them.
        times: how many are skipped at most, in all; None for any number.
        force: whether functions, and values, are allowed that the kernel does not list.
    """

    filter: str = ""
    every: int = 1
    probability: float | None = None
    times: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse conditions that no call can be counted by."""
        if not 1 <= self.every < ALWAYS:
            raise UsageError(f"every {self.every} calls: must be 1 or more")
        if self.probability is not None and not 0 <= self.probability <= 1:
            raise UsageError(f"a probability of {self.probability:g}: must be from 0 to 1")
        if self.times is not None and not 0 <= self.times < ALWAYS:
            raise UsageError(f"{self.times} times: must be 0 or more")


class OverrideWords(TypedDict, total=False):
    """``OverrideOptions`` as keywords."""

    filter: str
    every: int
    probability: float | None
    times: int | None
    force: bool


def errno_value(errno: int) -> int:
    """Return what a function returns that fails with an errno, given with or without a minus."""
    if not 1 <= abs(errno) <= MAX_ERRNO:
        raise UsageError(f"{errno} is not an errno: must be from 1 to {MAX_ERRNO}")
    return -abs(errno)


def with_comm(options: OverrideWords, comm: str) -> OverrideWords:
    """Return options by which only tasks of such a name are chosen, if it is not empty.

    Args:
        options: as they were.
        comm: a name, or a pattern.

    Raises:
        UsageError: filters cannot express it.
    """
    if not comm:
        return options
    if '"' in comm and "'" in comm:
        raise UsageError(f"comm {comm!r}: a filter's text has one kind of quotes at most")
    quote = "'" if '"' in comm else '"'
    own, by_name = options.get("filter"), f"comm ~ {quote}{comm}{quote}"
    return {**options, "filter": f"{by_name} && ({own})" if own else by_name}


class Override(Struct, frozen=True, kw_only=True):
    """One override at the entry of one function.

    Attributes:
        number: of its words in the session's memory.
        probe: the function, and the filter with what it reads; it records nothing.
        value: what is returned, as the 64 bits of a register.
        every, times: as in ``OverrideOptions``.
        chance: of 2^64 numbers, how many skip a call; ALWAYS for all of them.
        seed: of these numbers.
    """

    number: int
    probe: Resolved
    value: int
    every: int = 1
    times: int | None = None
    chance: int = ALWAYS
    seed: int = 0

    @property
    def shape(self) -> tuple[object, ...]:
        """What its machine code depends on, its number and its function's address left aside."""
        chosen = self.probe.fetches, self.probe.filter
        return (*chosen, self.value, self.every, self.times, self.chance, self.seed)


class OverrideCounts(Struct, frozen=True, kw_only=True):
    """What one override has counted.

    Attributes:
        hits: calls that came to it.
        skipped: those that returned its value.
        missed: those that our own code made while it read memory: they were not skipped.
    """

    hits: int = 0
    skipped: int = 0
    missed: int = 0
