"""Names in the output of sinks: symbols of addresses, enumerators of numbers, contexts of hits.

A context is printed as by trace_print_lat_fmt in kernel/trace/trace_output.c and
tracing_gen_ctx_irq_test in trace.c. Lines are made of a window of events at once, in the order of
time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.events import Batch, Column, Events, addresses
from kprobes.model.hist import PROGRAM_SIZE, HistField
from kprobes.model.resolved import (
    CONTEXT_HARDIRQ,
    CONTEXT_IRQS_ON,
    CONTEXT_MIGRATE_SHIFT,
    CONTEXT_NEED_RESCHED,
    CONTEXT_NEED_RESCHED_LAZY,
    CONTEXT_NMI,
    CONTEXT_NO_PREEMPT_RESCHED,
    CONTEXT_PREEMPT,
    CONTEXT_SERVING_SOFTIRQ,
    CONTEXT_SOFTIRQ,
    MIGRATE_SINCE,
    Field,
)
from kprobes.model.strings import Strings
from kprobes.model.text_options import DEFAULTS, TextOptions
from kprobes.native.library import function_for
from kprobes.native.lines import Cells, Lines, Texts, in_order

BH_SINCE = (5, 18)
"""289e7b0f7eb4 (tracing: Account bottom half disabled sections): ``b`` and ``D``."""
LAZY_SINCE = (6, 13)
"""The lazy reschedule flag: ``B``, ``L``, ``b`` and ``l``."""
NEWEST = (99, 0)
"""Every column there is."""

_BH_OFF = CONTEXT_SOFTIRQ & ~CONTEXT_SERVING_SOFTIRQ

_RESCHED = {
    # (task's flag, the preempt count's, task's lazy flag)
    (True, True, True): "B",
    (True, True, False): "N",
    (False, True, True): "L",
    (True, False, True): "b",
    (True, False, False): "n",
    (False, True, False): "p",
    (False, False, True): "l",
    (False, False, False): ".",
}


def flags(context: int, version: tuple[int, int]) -> str:
    """Return the context column of a kernel version: five characters, four before 5.15."""
    depth = context & CONTEXT_PREEMPT
    first = _irqs(context, version) + _resched(context, version) + _interrupt(context)
    if version < MIGRATE_SINCE:
        return first + _hex(depth)
    migrate = context >> CONTEXT_MIGRATE_SHIFT & 0xF
    return first + _hex(min(depth, 0xF)) + _hex(migrate)


def _irqs(context: int, version: tuple[int, int]) -> str:
    is_off = not context & CONTEXT_IRQS_ON
    if version >= BH_SINCE and context & _BH_OFF:
        return "D" if is_off else "b"
    return "d" if is_off else "."


def _resched(context: int, version: tuple[int, int]) -> str:
    is_lazy = version >= LAZY_SINCE and bool(context & CONTEXT_NEED_RESCHED_LAZY)
    is_needed = bool(context & CONTEXT_NEED_RESCHED)
    return _RESCHED[is_needed, not context & CONTEXT_NO_PREEMPT_RESCHED, is_lazy]


def _interrupt(context: int) -> str:
    is_hard = bool(context & CONTEXT_HARDIRQ)
    if context & CONTEXT_NMI:
        return "Z" if is_hard else "z"
    if is_hard:
        return "H" if context & CONTEXT_SERVING_SOFTIRQ else "h"
    return "s" if context & CONTEXT_SERVING_SOFTIRQ else "."


def _hex(number: int) -> str:
    return f"{number:x}" if number else "."


WINDOW = 1 << 12
"""Events formatted at once, some 3 ms of work: whoever drains the rings meanwhile waits that long
for Python's lock, which nobody gives up in the middle of a ``list(map(...))``."""
LARGE_WINDOW = 1 << 14
"""Where C formats them, for which Python's lock is given up."""

Format = Callable[[Batch], Lines]
"""A batch to one line per row, newlines included."""

Shown = tuple[bytes, Sequence[Cells]]
"""A %-format, and one column for each of its conversions."""


def shown_texts(column: Column | Strings, show: Callable[[bytes | None], bytes]) -> Cells:
    """Return what is shown of texts, new.

    Args:
        column: shape (n,), only read.
        show: of strings, it is asked of each different one once.
    """
    if not isinstance(column, Strings):
        return list(map(show, column.tolist()))
    codes, table = column.coded
    return Texts(codes=codes, table=list(map(show, table)))


def shown_strings(
    field: Field, column: Column | Strings, show: Callable[[bytes | None], bytes], row: bytes
) -> Shown:
    """Return how a field of texts is shown, new.

    Args:
        field: from the layout.
        column: shape (n,), or (n, elements) for an array, only read.
        show: as that of ``shown_texts``.
        row: the %-format of an array's elements, which are joined by commas.
    """
    if field.count is None:
        return b"%b", [shown_texts(column, show)]
    columns = [shown_texts(column[:, i], show) for i in range(field.count)]
    return row % b",".join([b"%b"] * field.count), columns


def write_in_order(out: BinaryIO, events: Events, form: Format) -> None:
    """Write the lines of events, oldest first.

    Args:
        out: a binary stream, which is not flushed.
        events: that are shown.
        form: how those of a batch are.
    """
    is_by_c = function_for(0, "lines", "lines_format", 5) is not None
    window = LARGE_WINDOW if is_by_c else WINDOW
    for start in range(0, len(events), window):
        which = events.batch[start : start + window]
        rows = events.row[start : start + window]
        present: list[int] = np.flatnonzero(np.bincount(which)).tolist()
        numbers = np.zeros(len(events.batches), np.uint16)
        numbers[present] = np.arange(len(present))
        lines = [form(events.batches[n].take(rows[which == n])) for n in present]
        out.writelines(in_order(lines, numbers[which]))


def _number(addr: int) -> str:
    return f"{addr:#x}"


def _unknown(number: int) -> str:
    del number
    return ""


def _nowhere(_pid: int, _addr: int) -> bytes | None:
    return None


class TraceSource(Struct, frozen=True, kw_only=True):
    """The traced kernel, as far as its trace file's looks depend on it.

    Attributes:
        version: major and minor of its release.
        cpus: how many it has online.
        entries: how many events there will be, or None while they are still coming.
        symbol_at: an address to what ``%pS`` prints for it, ``sym+0x1/0x40 [mod]``; as a
            number when no symbols are known.
        program_at: (pid, address of its program) to what is shown of that; None where no file is
            mapped, or that is not known.
        system_call: the number of a system call to its name, ``sys_openat``, or "".
        trampoline: where functions return to that the guest's own return probes have taken over,
            where its trace file has no name for that; else None.
        has_ns: whether times are nanoseconds, as all clocks of guests have them; else they are
            whatever the clock counts, and shown as they are.
        has_wide_numbers: whether JSON has numbers of 64 bits as numbers and not as strings.
        has_enum_names: whether enums are shown by name, where the kernel shows numbers.
        texts: strings of the kernel, by their addresses, which records have in their place.
        release, arch: of the kernel, as of ``model.kernel.Kernel``; "" where they are not known.
        is_rebooted: whether the output has the events of this guest's last boot already.
        options: how text is printed.
    """

    version: tuple[int, int]
    cpus: int
    entries: int | None = None
    symbol_at: Callable[[int], str] = _number
    program_at: Callable[[int, int], bytes | None] = _nowhere
    system_call: Callable[[int], str] = _unknown
    trampoline: int | None = None
    has_ns: bool = True
    has_wide_numbers: bool = False
    has_enum_names: bool = False
    release: str = ""
    arch: str = ""
    is_rebooted: bool = False
    texts: Mapping[int, bytes] = {}
    options: TextOptions = DEFAULTS


_REMEMBERED = 1 << 14
_TAKEN_OVER = b"[unknown/kretprobe'd]"
_CALLED_BY = b" <- "

Name = Callable[[int], bytes]
"""A number to what is shown in its place."""

EnumName = Callable[[int], bytes | None]
"""A number to its enumerator, or None for one that has none, such as several bits at once."""


class Names:
    """How the fields of a run are named; what was looked up is remembered."""

    def __init__(self, source: TraceSource) -> None:
        self._source = source
        self._symbols = _Symbols(source.symbol_at)
        self._callers = _Symbols(source.symbol_at)
        self._stacks: dict[bytes, tuple[bytes, ...]] = {}

    @property
    def has_wide_numbers(self) -> bool:
        """Whether numbers of 64 bits are numbers in JSON, too."""
        return self._source.has_wide_numbers

    def symbol(self, addr: int) -> bytes:
        """Return what the kernel's ``%pS`` prints for an address."""
        if len(self._symbols) > _REMEMBERED:
            self._symbols.clear()
        return self._symbols[addr]

    def stack(self, stack: bytes) -> tuple[bytes, ...]:
        """Return what the kernel's ``%pS`` prints for each address of a stack, innermost first.

        Args:
            stack: as a batch has it.
        """
        found = self._stacks.get(stack)
        if found is None:
            if len(self._stacks) > _REMEMBERED:
                self._stacks.clear()
            found = self._stacks[stack] = tuple(map(self.symbol, addresses(stack)))
        return found

    def stack_text(self, stack: bytes) -> bytes:
        """Return a stack as one text: ``vfs_read+0x0/0x170 <- ksys_read+0x6b/0xf0 <- ...``."""
        return _CALLED_BY.join(self.stack(stack))

    def key_stack(self, key: HistField, stack: bytes) -> tuple[bytes, ...]:
        """Return what is shown for each address of a stack that is a histogram's key."""
        return self.program_stack(stack) if key.has_program else self.stack(stack)

    def key_text(self, key: HistField, stack: bytes) -> bytes:
        """Return such a stack as one text; see ``stack_text``."""
        return _CALLED_BY.join(self.key_stack(key, stack))

    def program_stack(self, stack: bytes) -> tuple[bytes, ...]:
        """Return what is shown for each address of a program's stack, innermost first.

        Args:
            stack: as a histogram has it, the program first.
        """
        program, at = int.from_bytes(stack[:PROGRAM_SIZE], "little"), self._source.program_at
        addrs = addresses(stack[PROGRAM_SIZE:])
        return tuple(at(program, addr) or self.symbol(addr) for addr in addrs)

    def text_at(self, addr: int) -> bytes:
        """Return the kernel's string at an address, or the address where none is known."""
        text = self.known_text(addr)
        return b"%#x" % addr if text is None else text

    def known_text(self, addr: int) -> bytes | None:
        """Return the kernel's string at an address, or None where none is known."""
        return self._source.texts.get(addr)

    def callers(self, addrs: NDArray[np.uint64]) -> list[bytes]:
        """Return what the kernel prints for return addresses, shape (n,): seq_print_ip_sym()."""
        known = self._callers
        if len(known) > _REMEMBERED:
            known.clear()
        known[0] = b"0"
        if self._source.trampoline is not None:
            known[self._source.trampoline] = _TAKEN_OVER
        return list(map(known.__getitem__, addrs.tolist()))

    def enumerator_of(self, field: Field) -> EnumName | None:
        """Return how the numbers of an enum are named, or None when they are to be numbers."""
        if not self._source.has_enum_names or not field.enumerators:
            return None
        bits = 8 * field.size
        # By pattern: an enum of unsigned numbers is fetched as a signed one. The first of
        # several names of one number counts.
        names = {
            value & (1 << bits) - 1: name.encode(errors="surrogateescape")
            for value, name in reversed(field.enumerators)
        }
        return lambda number: names.get(number & (1 << bits) - 1)


class _Symbols(dict[int, bytes]):
    def __init__(self, symbol_at: Callable[[int], str]) -> None:
        super().__init__()
        self._symbol_at = symbol_at

    def __missing__(self, addr: int) -> bytes:
        text = self[addr] = self._symbol_at(addr).encode(errors="surrogateescape")
        return text
