"""Files that ``trace-cmd report`` and KernelShark open: ``formats.trace_dat``.

An event of a CPU is a record on a page of its ring, as the guest's kernel would have written it.
Full pages wait beside the file, compressed, as the file has all of a CPU in one place.
"""

import hashlib
import re
import shutil
import struct
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.export import Peer, drift_of
from kprobes.export.files import replace
from kprobes.export.kernel_records import KernelEvent, KernelRecords
from kprobes.formats import trace_dat
from kprobes.formats.ring_page import HEADER_EVENT, PAGE, WORD, PageData, encode_pages, header_page
from kprobes.formats.trace_dat import CpuData, PartId
from kprobes.model.events import Batch, Column, Events
from kprobes.model.recording import RecordedKernel
from kprobes.model.resolved import RecordLayout
from kprobes.sinks.names import Names, TraceSource
from kprobes.timeline import Shift
from kprobes.units import U64

_WINDOW = 1 << 13
"""Events that become records at once: what that takes stays in the cache."""
_HELD = 1 << 16
"""Words of a CPU's records that are held until they become pages, of which the last is not full."""
_FIRST_NUMBER, _NUMBER_END = 64, 1 << 16
"""Of events; before them are the kernel's own: enum trace_type of kernel/trace/trace.h."""
_CHAR_UNSIGNED_SINCE = (6, 2)
_SAMPLE_NS = 10**8
"""Between two samples of a clock's offset."""
_SAMPLES, _ALL_SAMPLES = 1 << 10, 1 << 16
"""Of a CPU, and of all CPUs of a file, 32 bytes each."""
_NS_PER_US = 1000
_US_PER_S = 1_000_000


@dataclass(kw_only=True, slots=True)
class _Cpu:
    # The ring of a CPU. ``lost`` of its events are missing before those that are held; ``chunks``
    # are where its pages are in the file of all pages, and how many bytes they take.
    held: list[PageData] = field(default_factory=list[PageData])
    words: int = 0
    lost: int = 0
    all_lost: int = 0
    events: int = 0
    oldest: int = 0
    newest: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def size(self) -> int:
        """Bytes that it takes in a file: a count, and its chunks."""
        return WORD + sum(size for _, size in self.chunks)

    def hold(self, data: PageData) -> None:
        """Take records that come after what is held."""
        if not self.events:
            self.oldest = int(data.ts[0])
        self.newest = int(data.ts[-1])
        self.events += len(data)
        self.words += len(data.words)
        self.held.append(data)

    def pages(self) -> NDArray[np.uint8]:
        """Return what is held as pages, and hold nothing any more."""
        data = PageData(
            words=np.concatenate([each.words for each in self.held]),
            sizes=np.concatenate([each.sizes for each in self.held]),
            ts=np.concatenate([each.ts for each in self.held]),
        )
        pages = encode_pages(data, lost=self.lost)
        self.held, self.words, self.lost = [], 0, 0
        return pages


class TraceDatFile:
    """One file of trace-cmd."""

    def __init__(
        self,
        path: Path,
        kernel: RecordedKernel,
        source: TraceSource,
        *,
        identity: Sequence[trace_dat.Option] = (),
    ) -> None:
        """Begin beside the path, which is replaced at the end; OSError where that is impossible.

        Args:
            path: of the file.
            kernel: whose events come.
            source: what names its addresses.
            identity: options that tell files of several machines apart, and relate their clocks.
        """
        self._path, self._kernel, self._source = path, kernel, source
        # When it began: no other recording of this machine did then.
        began = trace_dat.u64_option(PartId.TRACE_ID, kernel.real_ns & U64)
        self._identity = identity or (began,)
        self._directory = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
        self._spool = (self._directory / "pages").open("w+b")
        self._names = Names(source)
        self._events: dict[tuple[object, ...], KernelEvent] = {}
        self._formats: dict[str, list[str]] = defaultdict(list)
        self._cpus: dict[int, _Cpu] = defaultdict(_Cpu)
        self._symbols = _Symbols(source.symbol_at)
        self._comms: dict[int, bytes] = {}

    def write(self, events: Events) -> None:
        """Take events, oldest first."""
        for start in range(0, len(events), _WINDOW):
            which = events.batch[start : start + _WINDOW]
            rows = events.row[start : start + _WINDOW]
            by_batch = np.argsort(which, kind="stable")
            counts = np.bincount(which)
            present = np.flatnonzero(counts)
            parts = np.split(rows[by_batch], np.cumsum(counts[present])[:-1])
            batches = [
                events.batches[index].take(part)
                for index, part in zip(present.tolist(), parts, strict=True)
            ]
            self._write(batches, by_batch)

    def lose(self, cpu: int, count: int) -> None:
        """Mark the CPU's next event as the first after so many that are missing."""
        own = self._cpus[cpu]
        if own.held:
            self._flush(own)
        own.lost += count
        own.all_lost += count

    def close(self) -> None:
        """Write the file, and put it in the place of what was there."""
        for cpu in self._cpus.values():
            if cpu.held:
                self._flush(cpu)
        whole = self._directory / "whole"
        with whole.open("wb") as file:
            self._write_file(file)
        self._spool.close()
        whole.replace(self._path)
        shutil.rmtree(self._directory)

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        self._spool.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write(self, batches: list[Batch], places: NDArray[np.intp]) -> None:
        # ``places``: by batch and row, of each in the order of time.
        records = [self._records(batch) for batch in batches]
        in_time = np.empty(len(places), np.int64)
        in_time[places] = np.arange(len(places))
        self._name(batches, in_time)
        cpus = np.concatenate([batch.cpu for batch in batches])[in_time]
        by_cpu = np.argsort(cpus, kind="stable")
        order = in_time[by_cpu]
        data = PageData(
            words=_gathered(records, order),
            sizes=np.concatenate([each.sizes for each in records])[order],
            ts=np.concatenate([batch.ts for batch in batches])[order],
        )
        for cpu, part in _by_cpu(data, cpus[by_cpu]):
            own = self._cpus[cpu]
            own.hold(part)
            if own.words >= _HELD:
                self._flush(own)

    def _records(self, batch: Batch) -> KernelRecords:
        for values in _addresses(batch):
            self._symbols.add(values)
        self._symbols.note(int(batch.layout.ip), batch.layout.where)
        return self._event(batch.layout).records(batch)

    def _event(self, layout: RecordLayout) -> KernelEvent:
        # The functions of a pattern are one event, as long as their arguments are the same.
        own = ((f.name, f.type, f.storage, f.size, f.count) for f in layout.fields)
        key = layout.group, layout.event, layout.caller_offset is None, *own
        if key not in self._events:
            number = _FIRST_NUMBER + len(self._events)
            if number == _NUMBER_END:
                raise FormatError("more events than the kernel has numbers for")
            event = KernelEvent(
                layout, number=number, names=self._names, version=self._kernel.version
            )
            self._events[key] = event
            self._formats[layout.group].append(event.text)
        return self._events[key]

    def _name(self, batches: list[Batch], in_time: NDArray[np.int64]) -> None:
        # Each task's last name counts, as in the kernel's own trace.
        pids = np.concatenate([batch.pid for batch in batches])[in_time][::-1]
        comms = np.concatenate([batch.comm for batch in batches])[in_time][::-1]
        unique, last = np.unique(pids, return_index=True)
        self._comms |= zip(unique.tolist(), comms[last].tolist(), strict=True)

    def _flush(self, cpu: _Cpu) -> None:
        chunk = trace_dat.compressed(cpu.pages().tobytes())
        cpu.chunks.append((self._spool.tell(), len(chunk)))
        self._spool.write(chunk)

    def _write_file(self, file: BinaryIO) -> None:
        file.write(trace_dat.file_header(page_size=PAGE.size, options=0))
        options = list(self._about())
        for part, data in self._sections():
            options.append(trace_dat.u64_option(part, file.tell()))
            file.write(trace_dat.section(part, data))
        options.append(self._write_buffer(file))
        at = file.tell()
        file.write(trace_dat.options_section(options))
        file.seek(0)
        file.write(trace_dat.file_header(page_size=PAGE.size, options=at))

    def _about(self) -> Iterator[trace_dat.Option]:
        kernel = self._kernel
        yield trace_dat.text_option(PartId.UNAME, f"Linux {kernel.release} {kernel.arch}")
        yield trace_dat.text_option(PartId.VERSION, kernel.writer)
        yield trace_dat.text_option(PartId.TRACE_CLOCK, f"[{self._clock}]")
        yield trace_dat.u32_option(PartId.CPU_COUNT, kernel.cpus)
        yield from self._identity
        for cpu in range(kernel.cpus):
            text = _statistics(cpu, self._cpus.get(cpu, _Cpu()))
            yield trace_dat.text_option(PartId.CPU_STATISTICS, text)

    @property
    def _clock(self) -> str:
        # Readers show the times of ``counter`` as the numbers that they are.
        return "local" if self._source.has_ns else "counter"

    def _sections(self) -> Iterator[tuple[PartId, bytes]]:
        is_unsigned = self._kernel.version >= _CHAR_UNSIGNED_SINCE or self._kernel.arch != "x86_64"
        page = header_page(is_char_signed=not is_unsigned)
        yield PartId.HEADER_INFO, trace_dat.header_info(page, HEADER_EVENT)
        yield PartId.FTRACE_EVENTS, trace_dat.NOTHING
        yield PartId.EVENT_FORMATS, trace_dat.event_formats(self._formats)
        yield PartId.KALLSYMS, trace_dat.kallsyms(self._symbols.text())
        yield PartId.PRINTK, trace_dat.NOTHING
        yield PartId.CMDLINES, trace_dat.cmdlines(_cmdlines(self._comms))

    def _write_buffer(self, file: BinaryIO) -> trace_dat.Option:
        start = file.tell()
        first = after = start + len(trace_dat.buffer_header(0))
        cpus: list[CpuData] = []
        for number, cpu in sorted(self._cpus.items()):
            if cpu.chunks:
                at = -(-after // PAGE.size) * PAGE.size
                cpus.append(CpuData(cpu=number, offset=at, size=cpu.size))
                after = at + cpu.size
        file.write(trace_dat.buffer_header(after - first))
        for place in cpus:
            chunks = self._cpus[place.cpu].chunks
            file.write(bytes(place.offset - file.tell()) + struct.pack("<I", len(chunks)))
            for offset, size in chunks:
                self._spool.seek(offset)
                file.write(self._spool.read(size))
        return trace_dat.buffer_option(start, clock=self._clock, page_size=PAGE.size, cpus=cpus)


class TraceDatFiles:
    """A directory with a file of each machine, whose clocks are related by options of theirs."""

    def __init__(self, path: Path) -> None:
        """Begin beside the path, which is replaced at the end; OSError where that is impossible."""
        self._path = path
        self._directory = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
        self._first_id: int | None = None

    def add(self, peer: Peer, kernel: RecordedKernel, source: TraceSource) -> TraceDatFile:
        """Begin the file of a machine; each is closed before the next.

        Args:
            peer: which it is; the first is one whose clock is that of all.
            kernel: whose events come.
            source: what names its addresses.
        """
        # The same each time that these recordings are converted.
        key = f"{kernel.real_ns} {peer.name}".encode(errors="surrogateescape")
        own = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        identity = [trace_dat.u64_option(PartId.TRACE_ID, own)]
        if self._first_id is None:
            self._first_id = own
        elif peer.shift is not None:
            samples = _samples(peer.shift, kernel.cpus)
            identity.append(trace_dat.time_shift_option(self._first_id, *samples, cpus=kernel.cpus))
        return TraceDatFile(self._directory / f"{peer.name}.dat", kernel, source, identity=identity)

    def close(self) -> None:
        """Put the directory in the place of what was there."""
        self._directory.chmod(0o755)
        replace(self._directory, self._path, "*.dat")

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        shutil.rmtree(self._directory, ignore_errors=True)


def _samples(shift: Shift, cpus: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # Moments of a clock and its offsets then: as dense as they are known, if there is room.
    first, last = (max(int(shift.source.times[at]), 0) for at in (0, -1))
    count = max((last - first) // _SAMPLE_NS, 1) + 1
    count = min(count, _SAMPLES, max(_ALL_SAMPLES // cpus, 2))
    times = np.unique(first + np.linspace(0, last - first, count).astype(np.int64))
    offsets = drift_of(shift).apply(times.astype(np.uint64)).astype(np.int64) - times + shift.ns
    # A time below 0 would be one of centuries.
    offsets = np.maximum(offsets, -times)
    # Before and after them readers draw the line through the outer two: it is to be level.
    before = slice(0, 1 if first else 0)
    times = np.concatenate([times[before] - 1, times, times[-1:] + 1])
    return times, np.concatenate([offsets[before], offsets, offsets[-1:]])


def _addresses(batch: Batch) -> Iterator[Column]:
    if batch.caller is not None:
        yield batch.caller
    for each, values in zip(batch.layout.fields, batch.values, strict=True):
        if each.type == "symbol":
            yield values


def _gathered(records: list[KernelRecords], order: NDArray[np.int64]) -> NDArray[np.uint32]:
    words = np.concatenate([each.words for each in records])
    sizes = np.concatenate([each.sizes for each in records])
    froms = (np.cumsum(sizes) - sizes)[order]
    sizes = sizes[order]
    steps = froms - (np.cumsum(sizes) - sizes)
    return words[np.repeat(steps, sizes) + np.arange(len(words))]


def _by_cpu(data: PageData, cpus: NDArray[np.uint16]) -> Iterator[tuple[int, PageData]]:
    # Copies: what waits for a CPU's page to be full would keep the records of all others.
    firsts = np.flatnonzero(np.diff(cpus, prepend=np.uint16(cpus[0] + 1)))
    words = np.append(0, np.cumsum(data.sizes))
    for first, after in zip(firsts.tolist(), [*firsts[1:].tolist(), len(cpus)], strict=True):
        part = PageData(
            words=data.words[words[first] : words[after]].copy(),
            sizes=data.sizes[first:after].copy(),
            ts=data.ts[first:after].copy(),
        )
        yield int(cpus[first]), part


def _statistics(number: int, cpu: _Cpu) -> str:
    # tracing_stats_read of kernel/trace/trace.c, when all was read.
    return (
        f"CPU: {number}\nentries: 0\noverrun: 0\ncommit overrun: 0\nbytes: 0\n"
        f"oldest event ts: {_seconds(cpu.oldest)}\nnow ts: {_seconds(cpu.newest)}\n"
        f"dropped events: {cpu.all_lost}\nread events: {cpu.events}\n"
    )


def _seconds(ns: int) -> str:
    seconds, us = divmod(ns // _NS_PER_US, _US_PER_S)
    return f"{seconds:5d}.{us:06d}"


def _cmdlines(comms: dict[int, bytes]) -> bytes:
    # One line each; readers stop at a task without a name.
    named = ((pid, comm.replace(b"\n", b"\\n")) for pid, comm in sorted(comms.items()))
    return b"".join(b"%d %b\n" % (pid, comm) for pid, comm in named if comm.strip())


_SYMBOL = re.compile(r"(?P<name>\S+)\+0x(?P<offset>[0-9a-f]+)/0x(?P<size>[0-9a-f]+)(?P<module>.*)")
_MODULE = re.compile(r" \[(\S+)\]")
_REMEMBERED = 1 << 16


class _Symbols:
    # The symbols that addresses are in, found by what ``%pS`` prints for these.

    def __init__(self, symbol_at: Callable[[int], str]) -> None:
        self._symbol_at = symbol_at
        self._asked: set[int] = set()
        self._lines: dict[int, str] = {}
        self._ends: set[int] = set()

    def add(self, addrs: Column) -> None:
        """Find the symbols of addresses, of any shape."""
        if len(self._asked) > _REMEMBERED:
            self._asked.clear()
        new = set(np.unique(addrs).tolist()) - self._asked
        self._asked |= new
        for addr in new:
            self.note(addr, self._symbol_at(addr))

    def note(self, addr: int, place: str) -> None:
        """Take what is printed for an address."""
        found = _SYMBOL.fullmatch(place)
        if found is None:
            return
        start = addr - int(found["offset"], 16)
        module = _MODULE.fullmatch(found["module"])
        suffix = f"\t[{module[1]}]" if module else ""
        self._lines[start] = f"{start:016x} t {found['name']}{suffix}\n"
        self._ends.add(start + int(found["size"], 16))

    def text(self) -> bytes:
        """Return the lines of /proc/kallsyms."""
        # To its readers a symbol reaches to the next one. So what follows has its own address as a
        # name: what lies there is shown as 0xffffffff81001200+0x40.
        ends = {end: f"{end:016x} t {end:#x}\n" for end in self._ends}
        lines = sorted((ends | self._lines).items())
        return "".join(line for _, line in lines).encode(errors="surrogateescape")
