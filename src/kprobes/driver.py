"""The verbs of drivers: ``guest.driver`` probes a guest, ``host.driver`` this machine's kernel."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from kprobes.drain import Drain
from kprobes.errors import DefinitionError, RefusedError
from kprobes.guest.call import Functions
from kprobes.histogram import Histogram
from kprobes.model.definition import Definition, Statement
from kprobes.model.events import Counts, Events, Hits, Loads
from kprobes.model.kernel import Kernel
from kprobes.model.options import Options, Wanted
from kprobes.model.resolved import RecordLayout
from kprobes.model.trigger import Trigger
from kprobes.recording_writer import RecordingWriter
from kprobes.sinks.names import TraceSource


class HistDriver(Protocol):
    """What counts hits by hist triggers."""

    def histogram(self, number: int = 0) -> Histogram | None:
        """Return what a hist trigger has counted in the kernel so far; None where there is none.

        Args:
            number: of its table; 0 of that which hits are counted in instead of being recorded.
        """
        ...


class EventDriver(HistDriver, Protocol):
    """What an event table needs of a driver."""

    def first_kernel_error(self, error: DefinitionError) -> DefinitionError:
        """Return what the kernel finds first in a definition that has an error."""
        ...

    def prepare(self, wanted: Wanted) -> object:
        """Resolve and plan, without touching the kernel."""
        ...

    def apply(self, change: Callable[[Wanted], Wanted], *, begins: bool = False) -> None:
        """Arm and disarm what differs: all of it, or nothing."""
        ...

    def end(self) -> None:
        """Record nothing more; what was recorded can be drained until this is called again."""
        ...

    def forget(self, definition: Definition, *, is_new: bool = False) -> None:
        """Let a definition go that will not be wanted again; a new one never was."""
        ...

    def replace_definition(self, old: Definition, new: Definition) -> None:
        """Take a definition for one with another filter, or triggers; it goes on counting."""
        ...

    def left(self, triggers: Iterable[Trigger]) -> Mapping[int, int]:
        """Return how often triggers that have a count may still do something, by their numbers.

        Of a hist trigger, whether it counts.
        """
        ...

    def layout_of(self, definition: Definition, deleted: Sequence[Definition]) -> RecordLayout:
        """Return the layout of a definition's records, of its first place.

        Args:
            definition: whose.
            deleted: definitions that it need not be like, as they are deleted with the same change.
        """
        ...

    def event_ids(self, definition: Definition) -> Collection[int]:
        """Return the numbers of a definition's events in what is counted."""
        ...

    def counts(self) -> Counts:
        """Return what was counted since the recording began, or in the last one."""
        ...

    def hits(self) -> list[Hits]:
        """Return what the last recording counted of every probe; of newer ones nothing yet."""
        ...

    def loads(self) -> Loads:
        """Return what hits have taken so far, while limits ask for it."""
        ...


class CountingDriver(HistDriver, Protocol):
    """What counting hits by a hist trigger needs of a driver."""

    @property
    def target(self) -> str:
        """Where the kernel is, as ``--target`` names it."""
        ...

    @property
    def source(self) -> TraceSource:
        """What sinks need to know of it."""
        ...


class Driver(EventDriver, CountingDriver, Protocol):
    """What probes one kernel. Every method leaves it running, if it ran."""

    @property
    def tables_size(self) -> int:
        """Bytes of the kernel's memory that hits are counted in now; 0 where none are."""
        ...

    @property
    def kernel(self) -> Kernel:
        """What runs there: release, symbols, types."""
        ...

    @property
    def cpus(self) -> int:
        """How many CPUs the kernel may have."""
        ...

    @property
    def waiting(self) -> Sequence[Definition]:
        """What is defined and waits for modules that are not loaded."""
        ...

    @property
    def layouts(self) -> Sequence[RecordLayout]:
        """Of the records of all that is defined and can be probed."""
        ...

    @property
    def left_out(self) -> Sequence[RefusedError]:
        """Why functions that patterns match are not probed."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether the kernel stands still, and probes are armed when it goes on."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether a trigger ``stop`` has ended the recording."""
        ...

    @property
    def pauses(self) -> tuple[float, int] | None:
        """For how many seconds it was paused in all, and how often; None for what never is."""
        ...

    def parse(self, text: str) -> Iterator[Statement]:
        """Yield what the lines of a text say, or raise DefinitionError."""
        ...

    def accept(self, options: Options) -> None:
        """Check options that recordings are to have, or raise NotSupportedError."""
        ...

    def drain(self, *, room: float, writer: RecordingWriter | None = None) -> Drain:
        """Begin to drain what is recorded, to a writer or with so many bytes that may wait."""
        ...

    def check(self) -> None:
        """Raise what ended the recording, if something did; to be called often."""
        ...

    def disarm(self) -> None:
        """Have no more hits recorded; what was can still be drained."""
        ...

    def rest(self) -> Iterator[Events]:
        """Yield what was recorded and not drained; nothing is armed any more."""
        ...

    def follow(self, pid: int) -> None:
        """Have a task that is held followed, and what descends from it."""
        ...

    @property
    def functions(self) -> Functions:
        """What is done to functions besides probing them, or NotSupportedError."""
        ...


def until_stopped(driver: Driver, is_over: Callable[[], bool]) -> Callable[[], bool]:
    """Return what tells that a recording is over, or that a trigger has stopped it."""
    return lambda: is_over() or driver.is_stopped
