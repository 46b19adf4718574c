"""Reader of what others recorded of a kernel's own rings: files of trace-cmd, and raw pages.

The events are columns in one order of time, as those of a recording are.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.errors import FormatError, RingError, TargetError
from kprobes.formats.ftrace import PageFormat, parse_event
from kprobes.formats.trace_dat_clock import TraceClock
from kprobes.formats.trace_dat_options import TimeShift
from kprobes.formats.trace_dat_reader import Buffer
from kprobes.image.host import parse_kallsyms
from kprobes.image.symbols import SymbolMap
from kprobes.model.events import Counts, Events, Pages
from kprobes.model.kernel import place_of, version_of
from kprobes.model.recording import RecordedKernel, RecordingEnd
from kprobes.model.resolved import RecordLayout
from kprobes.recording import RecordedBoot
from kprobes.ring.ftrace import PID_LIMIT, HostDecoded, TaskNames
from kprobes.ring.ftrace_layouts import event_of
from kprobes.ring.ftrace_pages import PageDecoder, shapes_of
from kprobes.sinks.names import NEWEST, TraceSource
from kprobes.timeline import Bounds

_NS_CLOCKS = frozenset({"local", "global", "mono", "mono_raw", "boot", "tai", "perf", "uptime"})
"""Of kernel/trace/trace.c, trace_clocks[]: those of nanoseconds."""
_ID = re.compile(r"^ID: (\d{1,9})$", re.MULTILINE)
_PAGES = 2048
"""That are looked at in one round, of all CPUs."""
_FEWEST = 32


class PageFile(Protocol):
    """What describes pages, and has them: ``TraceDat``, or ``TracefsCopy``."""

    page: PageFormat
    cpu_count: int
    release: str
    machine: str
    events: tuple[tuple[str, str], ...]
    kallsyms: bytes
    printk_formats: dict[int, bytes]
    comms: dict[int, bytes]
    offset_ns: int
    tsc2nsec: tuple[int, int, int] | None
    time_shifts: tuple[TimeShift, ...]
    lost: dict[int, int]
    buffers: tuple[Buffer, ...]
    is_cut: bool

    def pages(self, buffer: int, cpu: int, *, at_once: int) -> Iterator[NDArray[np.uint8]]:
        """Yield a CPU's pages in ring order, copies of shape (n <= at_once, page size).

        Args:
            buffer: its place in ``buffers``.
            cpu: of the buffer's.
            at_once: pages at most.
        """
        ...


class _Ring:
    # The pages of a CPU that are still to be read.
    def __init__(self, cpu: int, pages: Iterator[NDArray[np.uint8]]) -> None:
        self.cpu = cpu
        self.last = 0
        self._pages = pages

    def next(self, decoder: PageDecoder) -> HostDecoded | None:
        data = next(self._pages, None)
        if data is None:
            return None
        pages = Pages(
            data=data,
            cpu=np.full(len(data), self.cpu, np.uint16),
            skips=np.zeros(len(data), np.int64),
        )
        found = decoder.decode(pages)
        self.last = max([self.last, *(int(batch.ts.max()) for batch in found.batches)])
        return found


class KernelTrace:
    """Read once, from beginning to end; attributes as those of ``recording.Recording``.

    Attributes:
        left_out: names of instances whose events are not read: those of one are.
    """

    is_ours = False

    def __init__(self, file: PageFile, name: str) -> None:
        """Read what the events are.

        Args:
            file: of the pages.
            name: of it, for people.

        Raises:
            FormatError: they are of no kernel's.
        """
        self._file = file
        self._name = name
        with_pages = [i for i, buffer in enumerate(file.buffers) if buffer.cpus]
        self._buffer = with_pages[0] if with_pages else 0
        self.left_out = [file.buffers[i].name for i in with_pages[1:]]
        self.damaged = 0
        self.continued = ""
        self.end: RecordingEnd | None = None
        self.bounds = Bounds()
        self.layouts: dict[int, RecordLayout] = {}
        self._recorded: Counter[int] = Counter()
        self._clock = TraceClock(
            file.tsc2nsec, file.time_shifts[-1] if file.time_shifts else None, file.offset_ns
        )
        self._lost: Counter[int] = Counter()
        self._reported: Counter[int] = Counter()
        self._symbols: Callable[[int], str] | None = None

    @property
    def lost(self) -> int:
        """Events that the kernel overwrote or dropped before pages that were read."""
        return self._lost.total()

    @property
    def is_cut(self) -> bool:
        """Whether the file ends within its pages."""
        return self._file.is_cut

    @property
    def counted(self) -> RecordingEnd:
        """What was read so far."""
        counts = Counts(recorded=dict(self._recorded), missed={}, lost=self.lost, damaged=0)
        return RecordingEnd(real_ns=0, counts=counts)

    def symbol_at(self, addr: int) -> str:
        """Return what ``%pS`` printed for an address."""
        if self._symbols is None:
            self._symbols = _symbols(self._file.kallsyms)
        return self._symbols(addr)

    def boots(self) -> Iterator[RecordedBoot]:
        """Yield the only one."""
        file = self._file
        version = version_of(file.release) if file.release else NEWEST
        kernel = RecordedKernel(
            release=file.release,
            arch=file.machine,
            build_id=b"",
            version=version,
            target=self._name,
            cpus=file.cpu_count,
            trampoline=None,
            has_ns=self._has_ns,
            real_ns=0,
            writer="others",
        )
        source = TraceSource(
            version=version,
            cpus=kernel.cpus,
            symbol_at=self.symbol_at,
            has_ns=kernel.has_ns,
            release=kernel.release,
            arch=kernel.arch,
            texts=file.printk_formats,
        )
        yield RecordedBoot(
            kernel=kernel, source=source, rounds=self._rounds(version), new_lost=self._new_lost
        )

    @property
    def _has_ns(self) -> bool:
        file = self._file
        return file.buffers[self._buffer].clock in _NS_CLOCKS or file.tsc2nsec is not None

    def _rounds(self, version: tuple[int, int]) -> Iterator[Events]:
        decoder, rings = self._decoder(version), self._rings()
        while rings:
            slowest = min(ring.last for ring in rings)
            found: list[HostDecoded] = []
            for ring in [ring for ring in rings if ring.last == slowest]:
                decoded = self._next(ring, decoder)
                if decoded is None:
                    rings.remove(ring)
                else:
                    found.append(decoded)
            if not rings:
                break
            # Of two CPUs' events of one moment those of the lower CPU come first.
            until = min(ring.last for ring in rings) - 1
            yield self._counted(decoder.push(found, max(until, 0)))
        # The kernel's statistics and its pages tell of the same losses, each in part.
        self._lost |= Counter(self._file.lost)
        yield self._counted(decoder.finish())
        if not self.is_cut:
            self.end = self.counted

    def _next(self, ring: _Ring, decoder: PageDecoder) -> HostDecoded | None:
        try:
            decoded = ring.next(decoder)
        except (RingError, ValueError, TypeError, OverflowError) as error:
            raise FormatError(f"pages of CPU {ring.cpu} that cannot be: {error}") from error
        if decoded is not None:
            self._lost[ring.cpu] += decoded.lost
        return decoded

    def _rings(self) -> list[_Ring]:
        cpus = self._file.buffers[self._buffer].cpus
        at_once = max(_PAGES // max(len(cpus), 1), _FEWEST)
        return [_Ring(cpu, self._file.pages(self._buffer, cpu, at_once=at_once)) for cpu in cpus]

    def _decoder(self, version: tuple[int, int]) -> PageDecoder:
        comms = {pid: comm for pid, comm in self._file.comms.items() if 0 <= pid < PID_LIMIT}
        texts = {_number(text): (group, text) for group, text in self._file.events}

        def add(number: int) -> None:
            # Of a thousand events there are records of some.
            if number in texts:
                group, text = texts.pop(number)
                decoder.add([event_of(group, parse_event(text), version)])

        page = replace(self._file.page, size=self._file.buffers[self._buffer].page_size)
        shapes = replace(shapes_of(page, version, ()), more=add)
        decoder = PageDecoder(shapes, TaskNames(comms, dict), self.symbol_at)
        return decoder

    def _counted(self, events: Events) -> Events:
        for batch in events.batches:
            self.layouts[batch.layout.event_id] = batch.layout
            self._recorded[batch.layout.event_id] += len(batch)
        timed = (replace(each, ts=self._clock.apply(each.ts, each.cpu)) for each in events.batches)
        return replace(events, batches=tuple(timed))

    def _new_lost(self) -> list[tuple[int, int]]:
        before, self._reported = self._reported, Counter(self._lost)
        return [
            (cpu, count - before[cpu]) for cpu, count in self._lost.items() if count > before[cpu]
        ]


def _number(text: str) -> int:
    found = _ID.search(text)
    return 0 if found is None else int(found[1])


def _symbols(kallsyms: bytes) -> Callable[[int], str]:
    if not kallsyms:
        return hex
    try:
        return partial(place_of, SymbolMap(*parse_kallsyms(kallsyms)))
    except TargetError as error:
        raise FormatError(str(error)) from error
