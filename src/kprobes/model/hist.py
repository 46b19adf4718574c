"""Hist triggers: hits are summed up by one to three keys, in a table of the trigger's own.

Each entry has how many hits there were, and sums of values. Documentation/trace/histogram.rst.
"""

from collections.abc import Iterable
from enum import Enum, StrEnum

from msgspec import Struct

from kprobes.model.filter import Header

MAX_KEYS = 3
MAX_VALS = 2
"""Values of a kernel's trigger, beside the hitcount."""
MAX_SORT_KEYS = 2
DEFAULT_SIZE = 1 << 11
LEAST_SIZE, LARGEST_SIZE = 1 << 7, 1 << 17
MAX_TEXT = 255
"""Bytes of a text that is a key: MAX_FILTER_STR_VAL without the NUL."""


class Special(StrEnum):
    """What is no field of an event; the value is the kernel's name, but for the last ones."""

    HITCOUNT = "hitcount"
    TIMESTAMP = "common_timestamp"
    STACK = "common_stacktrace"
    CALLER = "__probe_ret_ip"
    FUNCTION = "function"
    """Ours: the probed function, by its address."""


HistSource = Header | Special | int
"""What a key or a value is taken from; a number is the index of an argument."""


class HistKind(Enum):
    """What a key or a value is."""

    NUMBER = "number"
    TEXT = "text"
    DURATION = "duration"
    """A number that is left out where it could not be measured."""


class Modifier(StrEnum):
    """How a key or a value is taken, or shown; the value is the kernel's word, but for the last."""

    HEX = "hex"
    SYM = "sym"
    SYM_OFFSET = "sym-offset"
    EXECNAME = "execname"
    SYSCALL = "syscall"
    STACKTRACE = "stacktrace"
    LOG2 = "log2"
    BUCKETS = "buckets"
    USECS = "usecs"
    PERCENT = "percent"
    GRAPH = "graph"
    AVG = "avg"
    MIN = "min"
    MAX = "max"


OWN_MODIFIERS = frozenset({Modifier.AVG, Modifier.MIN, Modifier.MAX})
"""Of values, which no kernel has."""


class HistField(Struct, frozen=True, kw_only=True):
    """One key or value.

    Attributes:
        name: the kernel's, as it is printed.
        source: of what is taken.
        kind: of it.
        is_signed: whether a number can be negative.
        modifier: how it is taken or shown, or None.
        width: of each bucket, with ``buckets``.
    """

    name: str
    source: HistSource
    kind: HistKind = HistKind.NUMBER
    is_signed: bool = False
    modifier: Modifier | None = None
    width: int = 0

    @property
    def text(self) -> str:
        """As the trigger's file shows it."""
        shown = self.name if self.modifier is None else f"{self.name}.{self.modifier}"
        return f"{shown}={self.width}" if self.modifier is Modifier.BUCKETS else shown


class SortKey(Struct, frozen=True, kw_only=True):
    """By what entries are sorted: 0 is the hitcount, then come the values, then the keys."""

    index: int = 0
    is_descending: bool = False


class HistTrigger(Struct, frozen=True, kw_only=True):
    """A hist trigger of one event.

    Attributes:
        keys: one to ``MAX_KEYS``.
        vals: beside the hitcount.
        sort: by what entries are sorted, the first first; one at least.
        size: how many entries the table has.
        name: what it shares its table by, or "".
        clock: of its time stamps.
        is_paused: whether it counts nothing.
        has_hitcount: whether the hitcount is shown.
        filter: for which hits, in the kernel's language; or "".
    """

    keys: tuple[HistField, ...]
    vals: tuple[HistField, ...] = ()
    sort: tuple[SortKey, ...] = (SortKey(),)
    size: int = DEFAULT_SIZE
    name: str = ""
    clock: str = "global"
    is_paused: bool = False
    has_hitcount: bool = True
    filter: str = ""

    @property
    def fields(self) -> tuple[HistField, ...]:
        """Values, then keys."""
        return *self.vals, *self.keys

    @property
    def text(self) -> str:
        """The trigger as an event's ``trigger`` file lists it, but for whether it is paused."""
        vals = (["hitcount"] if self.has_hitcount else []) + [each.text for each in self.vals]
        parts = [
            "hist",
            *([f"name={self.name}"] if self.name else []),
            f"keys={','.join(each.text for each in self.keys)}",
            f"vals={','.join(vals)}",
            f"sort={','.join(map(self._sort_text, self.sort))}",
            f"size={self.size}",
            *([f"clock={self.clock}"] if self._has_time else []),
            *([] if self.has_hitcount else ["nohitcount"]),
        ]
        return ":".join(parts) + (f" if {self.filter}" if self.filter else "")

    @property
    def _has_time(self) -> bool:
        return any(each.source is Special.TIMESTAMP for each in self.fields)

    def _sort_text(self, key: SortKey) -> str:
        name = "hitcount" if key.index == 0 else self.fields[key.index - 1].text
        return f"{name}.descending" if key.is_descending else name


_BY = {"func": "function", "pid": "common_pid", "cpu": "common_cpu"}


def trigger_text(keys: Iterable[str], *, sort: str = "hitcount.descending") -> str:
    """Return the hist trigger for some keys, with the largest table.

    Args:
        keys: names of fields, with modifiers or without; ``pid``, ``cpu`` and ``func`` are short.
        sort: by what entries are sorted.
    """
    names = (key.partition(".") for key in keys)
    words = ",".join(_BY.get(name, name) + dot + modifier for name, dot, modifier in names)
    return f"hist:keys={words}:sort={sort}:size={LARGEST_SIZE}"
