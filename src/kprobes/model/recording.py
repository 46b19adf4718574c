"""Facts in a recording beside the rings' bytes: all that is needed to print them anywhere.

Each is one frame of the file, docs/reference/formats/recording.md, in MessagePack: the names of
the members are what is written.
"""

from msgspec import Struct, field

from kprobes.model.clock import ClockValue
from kprobes.model.events import Counts, EventFormat, Hits, HostEvent
from kprobes.model.resolved import RecordLayout


class RecordedKernel(Struct, frozen=True, kw_only=True):
    """Whose events come now: the first frame, and again when a guest was rebooted.

    Attributes:
        release, arch, build_id, version: of the kernel, as of ``model.kernel.Kernel``.
        target: how it was reached.
        cpus: how many have rings.
        trampoline, has_ns: as of ``sinks.names.TraceSource``.
        real_ns: when it began, by this machine's CLOCK_REALTIME.
        writer: name and version of the program that wrote it.
    """

    release: str
    arch: str
    build_id: bytes
    version: tuple[int, int]
    target: str
    cpus: int
    trampoline: int | None
    has_ns: bool
    real_ns: int
    writer: str


class RecordedEvents(Struct, frozen=True, kw_only=True):
    """Events whose records may come from now on; one of a number that was there takes its place."""

    layouts: tuple[RecordLayout, ...]


class RecordedInstance(Struct, frozen=True, kw_only=True):
    """A tracing instance whose pages come: in place of rings of ours, and before all of them.

    Attributes:
        page_size, page_data, page_commit: as ``formats.ftrace.PageFormat`` has them.
        namings: formats of the events that tell names of tasks.
        comms: the names of those that ran when it began, by pid.
    """

    page_size: int
    page_data: int
    page_commit: int
    namings: tuple[EventFormat, ...]
    comms: dict[int, bytes]


class RecordedHostEvents(Struct, frozen=True, kw_only=True):
    """Events of this kernel's whose records may come from now on."""

    events: tuple[HostEvent, ...]


class SymbolPart(Struct, frozen=True, kw_only=True):
    """Names of the kernel, or of a module.

    Attributes:
        module: its name; "" for the kernel.
        addrs: u64 each, little endian, in the kernel's own order.
        types: nm's letters, one byte each.
        names: each with a NUL before it, and one after the last.
        ranges: (start, stop) of the memory that it owns.
    """

    module: str
    addrs: bytes
    types: bytes
    names: bytes
    ranges: tuple[tuple[int, int], ...]


class RecordedSymbols(Struct, frozen=True, kw_only=True):
    """The names of addresses, of the kernel first."""

    parts: tuple[SymbolPart, ...]


class RecordedClock(Struct, frozen=True, kw_only=True):
    """By what counters become times in the records that follow."""

    clock: ClockValue


class RecordedRound(Struct, frozen=True, kw_only=True):
    """The end of one look at all rings: what stands before it was found in it.

    Attributes:
        since_ns: when the look before it began, by this machine's CLOCK_REALTIME: its records were
            made after that.
        real_ns: when the look was over, likewise.
        lost: of each ring, records that were dropped so far because it was full.
        new_lost: those since the round before, whatever file that is in; None in older files,
            where ``lost`` tells.
        ignored: numbers of events whose records in it are not to be shown.
    """

    since_ns: int
    real_ns: int
    lost: tuple[int, ...]
    ignored: tuple[int, ...] = ()
    new_lost: tuple[int, ...] | None = None


class RecordingEnd(Struct, frozen=True, kw_only=True):
    """What was counted, where the end was in order.

    Attributes:
        real_ns: when it was over, by this machine's CLOCK_REALTIME.
        counts, hits: of the session.
        pauses: for how many seconds the guest stood still, and how often; None where none does.
        why: what ended it, if that was an error; "" where nothing went wrong.
    """

    real_ns: int
    counts: Counts
    hits: tuple[Hits, ...] = field(default=())
    pauses: tuple[float, int] | None = None
    why: str = ""
