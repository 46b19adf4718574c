"""Hist triggers: hits are summed up by one to three keys, in a table of the trigger's own.

Each entry has how many hits there were, and sums of values. Documentation/trace/histogram.rst.
"""

from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum

from msgspec import Struct
from msgspec.structs import replace

from kprobes.model.filter import Header

MAX_KEYS = 3
MAX_VALS = 2
"""Values of a kernel's trigger, beside the hitcount."""
MAX_SORT_KEYS = 2
MAX_VARIABLES = 16
MAX_OPERATORS = 3
"""In one expression."""
MAX_FIELDS = 16
"""Keys and values together, those that no kernel has included."""
DEFAULT_SIZE = 1 << 11
LEAST_SIZE, LARGEST_SIZE = 1 << 7, 1 << 17
STACK = "stack"
"""Ours: a hit's stack, whole, where the kernel's ``common_stacktrace`` is cut."""
USER_STACK = "ustack"
"""Ours: the stack of the task's program."""
STACK_DEPTH = 16
"""Addresses of a stack that is a key of the kernel's: HIST_STACKTRACE_DEPTH."""
PROGRAM_SIZE, PROGRAM_SHIFT = 8, 32
"""Of a program: bytes of a number, which is the process's, and from a bit on how often that had
executed a program before (the kernel's ``self_exec_id``)."""
MAX_TEXT = 255
"""Bytes of a text that is a key: MAX_FILTER_STR_VAL without the NUL."""


IDLE = b"<idle>"
"""What kernels name the task that has no pid."""


class Special(StrEnum):
    """What is no field of an event; the value is the kernel's name, but for the last ones."""

    HITCOUNT = "hitcount"
    TIMESTAMP = "common_timestamp"
    CALLER = "__probe_ret_ip"
    FUNCTION = "function"
    """Ours: the probed function, by its address."""


class Operator(StrEnum):
    """How an expression's operands are made one number of 64 bits; the value is the kernel's."""

    PLUS = "+"
    MINUS = "-"
    TIMES = "*"
    OVER = "/"
    NEGATED = "-("
    """Of one operand."""


class NumericLiteral(Struct, frozen=True):
    """A number that is written in the trigger."""

    value: int


class Expression(Struct, frozen=True, kw_only=True):
    """A number that is computed of others at each hit: two, or one that is negated."""

    operator: Operator
    operands: tuple["HistField", ...]


HistSource = Header | Special | NumericLiteral | Expression | int
"""What a key or a value is taken from; an ``int`` is the index of an argument."""


class HistKind(Enum):
    """What a key or a value is."""

    NUMBER = "number"
    TEXT = "text"
    DURATION = "duration"
    """A number that is left out where it could not be measured."""
    STACK = "stack"


class Modifier(StrEnum):
    """How a key or a value is taken, or shown; the value is the kernel's word, but for the last."""

    HEX = "hex"
    SYM = "sym"
    SYM_OFFSET = "sym-offset"
    EXECNAME = "execname"
    SYSCALL = "syscall"
    LOG2 = "log2"
    BUCKETS = "buckets"
    USECS = "usecs"
    PERCENT = "percent"
    GRAPH = "graph"
    STACKTRACE = "stacktrace"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PERCENTILE = "pN"
    """With the number: ``p50``, ``p99.9``."""


EXTREMES = frozenset({Modifier.MIN, Modifier.MAX})
OWN_MODIFIERS = EXTREMES | {Modifier.AVG, Modifier.PERCENTILE}
"""Of values, which no kernel has."""
PERCENT = 100
"""A percentile is kept in hundredths of a percent."""
PARTS_BITS = 6
"""Bits of a number after the topmost one that tell by which bucket it is counted for percentiles:
a power of two has 64, and none is wider than 1/64 of what is in it."""


class HistField(Struct, frozen=True, kw_only=True):
    """One key or value.

    Attributes:
        name: the kernel's, as it is printed.
        source: of what is taken.
        kind: of it.
        is_signed: whether a number can be negative.
        modifier: how it is taken or shown, or None.
        width: of each bucket, with ``buckets``; of a stack, how many addresses count, 0 for all;
            of a percentile, hundredths of a percent.
        is_kept: whether it is bytes that are kept beside a guest's table: a string, or a stack.
        has_program: whether a stack's addresses come after the program that they are of.
    """

    name: str
    source: HistSource
    kind: HistKind = HistKind.NUMBER
    is_signed: bool = False
    modifier: Modifier | None = None
    width: int = 0
    is_kept: bool = False
    has_program: bool = False

    @property
    def text(self) -> str:
        """As the trigger's file shows it."""
        if isinstance(self.source, NumericLiteral):
            return str(self.source.value)
        match self.modifier:
            case None:
                return self.name
            case Modifier.BUCKETS:
                return f"{self.name}.{self.modifier}={self.width}"
            case Modifier.PERCENTILE:
                return f"{self.name}.p{self.width / PERCENT:g}"
            case _:
                return f"{self.name}.{self.modifier}"

    @property
    def leaves(self) -> tuple["HistField", ...]:
        """What it is computed of: no expressions, but itself where it is none."""
        if not isinstance(self.source, Expression):
            return (self,)
        return tuple(leaf for each in self.source.operands for leaf in each.leaves)


class HistVariable(Struct, frozen=True, kw_only=True):
    """A name for a number of each hit."""

    name: str
    field: HistField

    @property
    def text(self) -> str:
        """As the trigger's file shows it."""
        return f"{self.name}={self.field.text}"


class Handler(StrEnum):
    """When fields of a hit are kept: of those with the same keys; the value is the kernel's."""

    ON_MAX = "onmax"
    """It has a greater number than all before, and than 0."""
    ON_CHANGE = "onchange"
    """It has another number than the one before, of the first one than 0."""


class HistAction(Struct, frozen=True, kw_only=True):
    """Fields that each entry keeps, of one hit.

    Attributes:
        handler: says of which.
        variable: whose number it looks at.
        saved: what is kept, numbers all.
    """

    handler: Handler
    variable: HistVariable
    saved: tuple[HistField, ...]

    @property
    def text(self) -> str:
        """As the trigger's file shows it."""
        names = ",".join(each.text for each in self.saved)
        return f"{self.handler}(${self.variable.name}).save({names})"


class KnownFields(Struct, frozen=True, kw_only=True):
    """What a hist trigger of an event may name.

    Attributes:
        fields: by name, without modifiers.
        missing: by name, by modifier with its dot, or by what an action begins with, why others
            cannot be had.
    """

    fields: Mapping[str, HistField]
    missing: Mapping[str, str]


class SortKey(Struct, frozen=True, kw_only=True):
    """By what entries are sorted: 0 is the hitcount, then come the values, then the keys."""

    index: int = 0
    is_descending: bool = False


class HistTrigger(Struct, frozen=True, kw_only=True):
    """A hist trigger of one event.

    Attributes:
        keys: one to ``MAX_KEYS``.
        vals: beside the hitcount.
        variables: that it names.
        action: what entries keep beside, or None.
        sort: by what entries are sorted, the first first; one at least.
        size: how many entries the table has.
        name: what it shares its table by, or "".
        clock: of its time stamps.
        is_paused: whether it counts nothing.
        is_continued, is_cleared: that the one that is there counts again, or begins anew.
        has_hitcount: whether the hitcount is shown.
        filter: for which hits, in the kernel's language; or "".
    """

    keys: tuple[HistField, ...]
    vals: tuple[HistField, ...] = ()
    variables: tuple[HistVariable, ...] = ()
    action: HistAction | None = None
    sort: tuple[SortKey, ...] = (SortKey(),)
    size: int = DEFAULT_SIZE
    name: str = ""
    clock: str = "global"
    is_paused: bool = False
    is_continued: bool = False
    is_cleared: bool = False
    has_hitcount: bool = True
    filter: str = ""

    @property
    def is_change(self) -> bool:
        """Whether it says something of one that is there, and nothing without it."""
        return self.is_continued or self.is_cleared

    @property
    def identity(self) -> tuple[object, ...]:
        """What an event has once: hist_trigger_match(). With a name, what shares its table."""
        return self.name, *self.counted, self.filter

    @property
    def counted(self) -> tuple[object, ...]:
        """What must be the same of all that share a table by a name, wherever a record has it."""
        fields = tuple(replace(each, source=Special.HITCOUNT) for each in self.fields)
        variables = tuple(each.text for each in self.variables)
        return len(self.keys), fields, variables, self.action and self.action.text, self.sort

    @property
    def listed(self) -> str:
        """The line of the event's ``trigger`` file, and of the head of its ``hist`` file."""
        return f"{self.text} [{'paused' if self.is_paused else 'active'}]"

    @property
    def fields(self) -> tuple[HistField, ...]:
        """Values, then keys."""
        return *self.vals, *self.keys

    @property
    def tracked(self) -> tuple[HistField, ...]:
        """What is computed for the action: the number that it looks at, then what is saved."""
        return () if self.action is None else (self.action.variable.field, *self.action.saved)

    @property
    def percentiles(self) -> tuple[HistField, ...]:
        """The first percentile of each field that the values have some of."""
        found: dict[HistSource, HistField] = {}
        for val in self.vals:
            if val.modifier is Modifier.PERCENTILE:
                found.setdefault(val.source, val)
        return (*found.values(),)

    @property
    def columns(self) -> tuple[HistField, ...]:
        """What is kept of each entry for its values: sums, least and greatest numbers, each once.

        Percentiles are made of the least and the greatest number of each bucket.
        """
        found: dict[tuple[object, ...], HistField] = {}
        for val in self.vals:
            for each in _kept(val):
                found.setdefault(_column(each), each)
        return (*found.values(),)

    def columns_of(self, val: HistField) -> list[int]:
        """Return indices of ``columns``: of what is kept for a value, one or least and greatest."""
        known = [*map(_column, self.columns)]
        return [known.index(_column(each)) for each in _kept(val)]

    @property
    def room(self) -> int:
        """How many entries are kept: with percentiles each has one for each of its buckets.

        With percentiles of several fields that is one for each of the buckets' combinations.
        """
        count = len(self.percentiles)
        if not count:
            return self.size
        return max(self.size, min(_BUCKETS * self.size << count, _MOST_BUCKETS >> count))

    @property
    def form(self) -> tuple[object, ...]:
        """What a guest's table has: hits of events with another one are not counted in it."""
        return tuple(
            (each.kind, each.is_signed, each.is_kept, each.source is Header.COMM, each.has_program)
            for each in (*self.fields, *self.tracked)
        )

    @property
    def text(self) -> str:
        """The trigger as an event's ``trigger`` file lists it, but for whether it is paused."""
        vals = (["hitcount"] if self.has_hitcount else []) + [each.text for each in self.vals]
        parts = [
            "hist",
            *([f"name={self.name}"] if self.name else []),
            f"keys={','.join(each.text for each in self.keys)}",
            f"vals={','.join(vals)}",
            *([",".join(each.text for each in self.variables)] if self.variables else []),
            f"sort={','.join(map(self._sort_text, self.sort))}",
            f"size={self.size}",
            *([f"clock={self.clock}"] if self._has_time else []),
            *([] if self.has_hitcount else ["nohitcount"]),
            *([self.action.text] if self.action else []),
        ]
        return ":".join(parts) + (f" if {self.filter}" if self.filter else "")

    @property
    def _has_time(self) -> bool:
        named = (each.field for each in self.variables)
        saved = self.action.saved if self.action else ()
        leaves = (leaf for field in (*self.fields, *named, *saved) for leaf in field.leaves)
        return any(each.source is Special.TIMESTAMP for each in leaves)

    def _sort_text(self, key: SortKey) -> str:
        name = "hitcount" if key.index == 0 else self.fields[key.index - 1].text
        return f"{name}.descending" if key.is_descending else name


_BUCKETS, _MOST_BUCKETS = 2, 1 << 17
"""Entries for buckets: so many times those of a table, and twice that for each field; at most so
many, and half of that for each."""


DIVIDE_SHIFT = 20


def multiplier_of(constant: int) -> int | None:
    """Return what kernels multiply numbers with that they divide by a constant, or None.

    So they do with numbers below ``1 << DIVIDE_SHIFT``: what is left of the product is shifted
    away, and that is rounded up. None for a constant by which they divide all numbers, see
    hist_field_get_div_fn() and div_by_mult_and_shift() in kernel/trace/trace_events_hist.c.
    """
    is_power = not constant & (constant - 1)
    return None if is_power or constant >> DIVIDE_SHIFT else (1 << DIVIDE_SHIFT) // constant


def _kept(val: HistField) -> tuple[HistField, ...]:
    if val.modifier is not Modifier.PERCENTILE:
        return (val,)
    least, most = (replace(val, modifier=each, width=0) for each in (Modifier.MIN, Modifier.MAX))
    return least, most


def _column(val: HistField) -> tuple[object, ...]:
    # What is only shown otherwise is the same sum.
    is_own = val.modifier in EXTREMES or val.modifier is Modifier.USECS
    return val.source, val.modifier if is_own else None


# A trigger's table in a guest, one for each CPU:
#
#     0      8        16          64
#     [used] [dropped] [unmeasured] [entry 0] [entry 1] ... [entry slots - 1]
#
#     0      8          16
#     [mark] [hitcount] [key words ...] [buckets ...] [columns ...] [comm, with execname]
#         [version, with an action] [its number] [when] [saved ...]
#
# The version is odd while an action's words are written, and goes up by two each time.
# A bucket is there for each field with percentiles, and one more key: of negative numbers it is
# negative.
# After the last entry there may be an area for keys that are texts or stacks, drawn in
# codegen/runtime/keys.c: such a key's word is where its bytes are kept there.
#
# A hash with open addresses, never more than half full. The mark is 0 of a free entry, 1 while it
# is written, then the hash of the key. An interrupt that comes meanwhile takes another entry for
# the same key: they are one where they are read.
ENTRY_MARK, ENTRY_HITCOUNT, ENTRY_KEYS = 0, 8, 16
TABLE_USED, TABLE_DROPPED, TABLE_UNMEASURED = 0, 8, 16
TABLE_HEADER = 64
MARK_FREE, MARK_BUSY, MARK_LEAST = 0, 1, 2
TRACKED_NUMBER, TRACKED_WHEN, TRACKED_SAVED = 1, 2, 3
"""Words behind the version."""
AREA_PLACES = 8
KEPT_SIZE, KEPT_DATA = 8, 16
_WORD = 8
_COMM_WORDS = 2
_OF_TEXT, _OF_STACK = 128, 256
"""Bytes of an area for each entry."""


class HistTable(Struct, frozen=True, kw_only=True):
    """A hist trigger whose table is in a guest.

    Attributes:
        trigger: that fills it.
        number: of the table among a session's.
    """

    trigger: HistTrigger
    number: int

    @property
    def shape(self) -> tuple[object, ...]:
        """What machine code depends on."""
        trigger = self.trigger
        return (
            trigger.keys,
            trigger.columns,
            trigger.percentiles,
            trigger.tracked,
            trigger.size,
        )

    @property
    def slots(self) -> int:
        """How many entries there is room for, a power of two; half of them may be used."""
        return 2 * self.trigger.room

    def words(self, key: HistField) -> int:
        """Return how many words a key takes: a task's name two."""
        return _COMM_WORDS if key.kind is HistKind.TEXT and key.source is Header.COMM else 1

    @property
    def key_words(self) -> int:
        """How many all keys take, and the buckets."""
        return sum(map(self.words, self.trigger.keys)) + len(self.trigger.percentiles)

    @property
    def columns(self) -> int:
        """Where the trigger's columns begin in an entry."""
        return ENTRY_KEYS + _WORD * self.key_words

    @property
    def has_comm(self) -> bool:
        """Whether an entry keeps the name of the task that made it."""
        return any(key.modifier is Modifier.EXECNAME for key in self.trigger.keys)

    @property
    def comm(self) -> int:
        """Where that is in an entry."""
        return self.columns + _WORD * len(self.trigger.columns)

    @property
    def version(self) -> int:
        """Where the version of an action's words is in an entry."""
        return self.comm + (_WORD * _COMM_WORDS if self.has_comm else 0)

    @property
    def entry_size(self) -> int:
        """Bytes of an entry."""
        words = len(self.trigger.tracked)
        return self.version + (_WORD * (TRACKED_NUMBER + 1 + words) if words else 0)

    @property
    def area(self) -> int:
        """Where the area of kept keys is in a CPU's table."""
        return TABLE_HEADER + self.slots * self.entry_size

    @property
    def area_size(self) -> int:
        """Its bytes; 0 where no key is kept."""
        kept = [key for key in self.trigger.keys if key.is_kept]
        if not kept:
            return 0
        each = sum(_OF_STACK if key.kind is HistKind.STACK else _OF_TEXT for key in kept)
        return AREA_PLACES + _WORD * self.slots + each * self.trigger.size

    @property
    def size(self) -> int:
        """Bytes of one CPU's table."""
        return self.area + self.area_size


LARGE_SIZE = 1 << 14
"""Entries of a table whose size nobody has said."""
OF_FUNCTIONS = 1 << 16
"""Entries that are enough for all functions of a kernel that can be probed."""
_BY = {"func": "function", "pid": "common_pid", "cpu": "common_cpu"}


def trigger_text(
    keys: Iterable[str],
    vals: Iterable[str] = (),
    *,
    sort: str = "hitcount.descending",
    size: int = LARGE_SIZE,
) -> str:
    """Return the hist trigger for some keys, with a large table.

    Args:
        keys: names of fields, with modifiers or without; ``pid``, ``cpu`` and ``func`` are short.
        vals: of values, likewise.
        sort: by what entries are sorted.
        size: of the table.
    """
    values = ",".join(map(_long, vals))
    parts = ["hist", f"keys={','.join(map(_long, keys))}", *([f"vals={values}"] if values else [])]
    return ":".join([*parts, f"sort={_long(sort)}", f"size={size}"])


def _long(word: str) -> str:
    name, dot, modifier = word.partition(".")
    return _BY.get(name, name) + dot + modifier
