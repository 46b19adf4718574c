"""Everything that a tracer has from a guest and must give back: memory, the state of its pages.

The log is kept beside the patches in the journal: a line before each call of a guest's function,
and one with its result. After a tracer was killed it tells what is still allocated, which call
was under way, and where return addresses on stacks may lead into this memory.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from kprobes.errors import RESTORED, GuestReplacedError
from kprobes.model.plan import InstanceTable
from kprobes.ports import Text
from kprobes.units import Addr


class Kind(StrEnum):
    """What was allocated; how it is freed follows from it."""

    DATA = "data"
    CODE = "code"
    ROX = "seal"
    """Pages of code that were made executable and read-only."""
    PER_CPU = "per_cpu"
    NOTIFIER = "catcher"
    """A place in the guest's chain of callbacks for exceptions."""
    TRACEPOINT = "tracepoint"
    """A tracepoint that calls a function of ours."""


class Allocation(Struct, frozen=True, kw_only=True):
    """One thing that was allocated in a guest.

    Attributes:
        addr, size: where, in bytes; a per-CPU offset for PER_CPU. Of a TRACEPOINT the address of
            its struct, and of the function.
    """

    kind: Kind
    addr: int
    size: int


class Call(Struct, frozen=True, kw_only=True):
    """A call of a guest's function, which may allocate or free something.

    Attributes:
        frame: on the task's stack: where the function returns, a word above.
        trap: the address that it returns to.
        number: of the call in this log; None in journals of older versions.
        allocates: what it allocates; the function's result is its address when that is 0.
        returns: what it frees.
    """

    frame: int
    trap: int
    number: int | None = None
    allocates: Allocation | None = None
    returns: Allocation | None = None


def _ignore(line: dict[str, Any]) -> None:
    del line


def nothing() -> None:
    """Check nothing, or tell nobody."""


def _raise_restored() -> None:
    raise GuestReplacedError(RESTORED)


class AllocationLog:
    """Everything that is allocated in one guest.

    Attributes:
        live: in the order in which they were made.
        calls: how many were begun.
        call: the one that is under way, or None.
        instances: of calls whose return addresses may be ours, in memory that is allocated.
        check: raises GuestReplacedError unless it is still the same guest.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None] = _ignore) -> None:
        """Begin an empty log; every change is given to ``write`` before it is made."""
        self.live: tuple[Allocation, ...] = ()
        self.calls = 0
        self.call: Call | None = None
        self.instances: tuple[InstanceTable, ...] = ()
        self.check: Callable[[], None] = nothing
        self._write = write

    def note_restored(self) -> None:
        """Have each check from now on raise that the guest was restored to an earlier state."""
        self.check = _raise_restored

    @property
    def is_empty(self) -> bool:
        """Whether the guest has everything back."""
        return not self.live and self.call is None

    @property
    def has_notifier(self) -> bool:
        """Whether the guest calls us at breakpoints, or may, as far as is known."""
        return any(allocation.kind is Kind.NOTIFIER for allocation in self.live)

    @property
    def code(self) -> list[Text]:
        """Where the code is that was allocated for."""
        found = (each for each in self.live if each.kind is Kind.CODE)
        return [(Addr(each.addr), Addr(each.addr + each.size)) for each in found]

    @property
    def memory(self) -> int:
        """Bytes that are allocated, per-CPU memory not counted."""
        return sum(
            allocation.size for allocation in self.live if allocation.kind in (Kind.DATA, Kind.CODE)
        )

    def begin(self, call: Call) -> None:
        """Note a call that is about to be made."""
        self._write({"begin": _line_of(call)})
        self._begin(call)

    def end(self, result: int) -> None:
        """Note what the call returned; 0 also when nobody knows."""
        self._write({"end": result})
        self._end(result)

    def cancel(self) -> None:
        """Note that the call which was begun was not made."""
        self._write({"cancel": True})
        self._cancel()

    def drop(self, allocation: Allocation) -> None:
        """Note that the guest has something back, which no single call returned."""
        self._write({"drop": asdict(allocation)})
        self._drop(allocation)

    def keep_instances(self, instances: Sequence[InstanceTable]) -> None:
        """Note where calls will be that return to us, instead of where they were before."""
        self._write({"frames": [asdict(each) for each in instances]})
        self.instances = tuple(instances)

    @classmethod
    def replayed(cls, lines: Iterable[dict[str, Any]]) -> "AllocationLog":
        """Return the log of a journal's lines."""
        allocations = cls()
        for line in lines:
            allocations.replay(line)
        return allocations

    def replay(self, line: dict[str, Any]) -> None:
        """Take over a line of another log.

        Raises:
            KeyError, TypeError, ValueError: no log has such a line.
        """
        if "begin" in line:
            self._begin(_call_of(line["begin"]))
        if "end" in line:
            self._end(int(line["end"]))
        if "cancel" in line:
            self._cancel()
        if "drop" in line:
            self._drop(_allocation_of(line["drop"]))
        if "frames" in line:
            self.instances = tuple(_instances_of(item) for item in line["frames"])

    def _begin(self, call: Call) -> None:
        self.calls += 1
        self.call = call
        if call.allocates is not None and call.allocates.addr:
            self.live += (call.allocates,)

    def _end(self, result: int) -> None:
        call, self.call = self.call, None
        if call is None:
            return
        self._drop(call.returns)
        if call.allocates is not None and not call.allocates.addr and result:
            self.live += (replace(call.allocates, addr=result),)

    def _drop(self, allocation: Allocation | None) -> None:
        self.live = tuple(each for each in self.live if each != allocation)

    def _cancel(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            self._drop(call.allocates)


def _line_of(call: Call) -> dict[str, Any]:
    return {
        "frame": call.frame,
        "landing": call.trap,
        "number": call.number,
        "lends": None if call.allocates is None else asdict(call.allocates),
        "returns": None if call.returns is None else asdict(call.returns),
    }


def _call_of(item: dict[str, Any]) -> Call:
    return Call(
        frame=int(item["frame"]),
        trap=int(item["landing"]),
        number=None if item.get("number") is None else int(item["number"]),
        allocates=_allocation_of(item["lends"]),
        returns=_allocation_of(item["returns"]),
    )


def _instances_of(item: dict[str, Any]) -> InstanceTable:
    return InstanceTable(
        addr=Addr(int(item["addr"])),
        count=int(item["count"]),
        stride=int(item["stride"]),
        trampoline=Addr(int(item["trampoline"])),
    )


def _allocation_of(item: dict[str, Any] | None) -> Allocation | None:
    if item is None:
        return None
    return Allocation(kind=Kind(item["kind"]), addr=int(item["addr"]), size=int(item["size"]))
