"""Writer of recordings: the bytes of a session's rings, frame after frame, while it records.

Nothing is decoded: a chunk has the bytes of one CPU's ring as they were, and the guest may use that
part of the ring again only when the chunk is in the file. So a file is good up to its last whole
frame, however its writer ended. ``recording`` reads it.
"""

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import KprobesError, UsageError
from kprobes.formats.recording import (
    CHUNK,
    CHUNK_IS_BLOCKED,
    PAGES,
    FrameKind,
    file_header,
    pack_frame,
)
from kprobes.image.symbols import SymbolMap
from kprobes.model.clock import ClockValue
from kprobes.model.events import Counts, Hits, HostEvent, Pages
from kprobes.model.kernel import Kernel, Symbols
from kprobes.model.recording import (
    RecordedClock,
    RecordedEvents,
    RecordedHostEvents,
    RecordedInstance,
    RecordedKernel,
    RecordedRound,
    RecordedSymbols,
    RecordingEnd,
    SymbolPart,
)
from kprobes.model.resolved import RecordLayout
from kprobes.ring.chunk import Committed
from kprobes.sinks.names import TraceSource
from kprobes.transport.tracefs import running_comms

_LEVEL, _FAST_LEVEL = 3, -5
"""Of zstd's compression. Even in haste: to write all of it takes longer than the fast one does."""
_SYNC_S = 1.0
_SMALL = 1 << 10
"""Bytes of a frame that are not worth compressing."""
_PAGES = 4 << 20
"""Bytes of one frame, for readers' sake."""
_LAYOUTS = 1 << 12
"""Of one frame: a pattern may have tens of thousands."""
_SYMBOLIC = ("symbol", "symstr", "stacktrace")


Needed = tuple[FrameKind, bytes]
"""A frame that records after it need, and of which kind it is."""


class RecordingWriter(ABC):
    """Makes frames of what is recorded. One thread at a time writes.

    Attributes:
        size: bytes so far.
    """

    def __init__(self) -> None:
        self.size: int = 0
        self._clock: ClockValue | None = None
        self._symbols: Symbols | None = None
        self._lost: tuple[int, ...] = ()
        self._instance: RecordedInstance | None = None

    def begin(self, kernel: RecordedKernel, symbols: Symbols) -> None:
        """Have what follows be events of a kernel; errors as for ``write_round``.

        Args:
            kernel: that it is.
            symbols: its names, which are written when the first event has an address to be named.
        """
        self._clock, self._symbols, self._lost = None, symbols, ()
        self._put([(FrameKind.KERNEL, pack(FrameKind.KERNEL, kernel))], b"")

    def write_chunk(
        self,
        layouts: Sequence[RecordLayout],
        clock: ClockValue,
        found: Committed,
        *,
        is_late: bool = False,
    ) -> None:
        """Take what was found in a ring; it is where it is to be kept on return.

        Args:
            layouts: of events that are new.
            clock: of their times.
            found: of one CPU, after what was found there before.
            is_late: whether there is no time to compress it well.

        Raises:
            KprobesError: it cannot be written; the file is good without it.
        """
        needed = self._needed_by(layouts)
        if clock != self._clock:
            needed.append(_needed(FrameKind.CLOCK, RecordedClock(clock=clock)))
            self._clock = clock
        self._put(needed, _pack_chunk(found, _FAST_LEVEL if is_late else _LEVEL))

    def write_round(self, layouts: Sequence[RecordLayout], end: RecordedRound) -> None:
        """Have what was written since the one before be of one look at all rings.

        Args:
            layouts: of events that are new.
            end: of the look.

        Raises:
            KprobesError: it cannot be written; the file is good without it.
        """
        self._put(self._needed_by(layouts), self._packed(end))
        self._end_round()

    def _packed(self, end: RecordedRound) -> bytes:
        # A file may be the second one of a recording, or its end.
        pairs = zip_longest(end.lost, self._lost, fillvalue=0)
        self._lost = end.lost
        new = tuple(max(now - before, 0) for now, before in pairs)
        return pack(FrameKind.ROUND, replace(end, new_lost=new))

    def _needed_by(self, layouts: Sequence[RecordLayout]) -> list[Needed]:
        parts = (layouts[at : at + _LAYOUTS] for at in range(0, len(layouts), _LAYOUTS))
        needed = [_needed(FrameKind.EVENTS, RecordedEvents(layouts=tuple(part))) for part in parts]
        return needed + self._symbols_of(layouts)

    def write_instance(self, instance: RecordedInstance) -> None:
        """Have what follows be pages of a tracing instance; errors as for ``write_round``."""
        self._instance = instance
        self._put([_needed(FrameKind.INSTANCE, instance)], b"")

    def _renewed(self) -> list[Needed]:
        # The instance with the names that tasks have now: what told of them is in another file.
        if self._instance is None or not self._instance.comms:
            return []
        comms = {**self._instance.comms, **running_comms()}
        return [_needed(FrameKind.INSTANCE, replace(self._instance, comms=comms))]

    def write_pages(
        self,
        events: Sequence[HostEvent],
        found: Sequence[Pages],
        end: RecordedRound,
        *,
        is_late: bool = False,
    ) -> None:
        """Take what some rounds have read of an instance's rings; errors as for ``write_round``.

        Args:
            events: that are new.
            found: pages, each CPU's in its ring's order.
            end: of the rounds.
            is_late: whether there is no time to compress it well.
        """
        parts = (events[at : at + _LAYOUTS] for at in range(0, len(events), _LAYOUTS))
        needed = [
            _needed(FrameKind.HOST_EVENTS, RecordedHostEvents(events=tuple(part))) for part in parts
        ]
        needed += self._symbols_of([layout for event in events for layout in event.layouts])
        level = _FAST_LEVEL if is_late else _LEVEL
        pages = [pack_frame(FrameKind.PAGES, part, level=level) for part in _page_parts(found)]
        self._put(needed, b"".join([*pages, self._packed(end)]))
        self._end_round()

    def ask(self) -> None:
        """Have what there is written, soon, where only the end of a recording is kept."""
        return

    def end(self, end: RecordingEnd) -> None:
        """Take what was counted; errors as for ``write_round``."""
        self._put([], pack(FrameKind.END, end))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Have all of it kept.

        Raises:
            KprobesError: it cannot be written.
        """

    @abstractmethod
    def _put(self, needed: Sequence[Needed], data: bytes) -> None:
        # Frames that all later records need, then those of this time.
        ...

    def _end_round(self) -> None:
        # What comes now may begin another file.
        return

    def _symbols_of(self, layouts: Sequence[RecordLayout]) -> list[Needed]:
        # All names, when one is needed first.
        if self._symbols is None or not any(map(_names_addresses, layouts)):
            return []
        symbols, self._symbols = self._symbols, None
        return [_needed(FrameKind.SYMBOLS, _parts(symbols))]


class FileWriter(RecordingWriter):
    """Appends to one file; each second what there is is synced."""

    def __init__(
        self, file: BinaryIO, *, name: str = "the recording", is_ours: bool = True
    ) -> None:
        """Begin a recording in a file without a buffer.

        Args:
            file: where it goes.
            name: for people.
            is_ours: whether it is closed with this.

        Raises:
            KprobesError: nothing can be written there.
        """
        super().__init__()
        self._file, self._name, self._is_ours = file, name, is_ours
        self._closing = threading.Event()
        self._append(file_header())
        self._thread = threading.Thread(target=self._sync, name="kprobes-sync", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Have all of it on the disk, and close the file."""
        self._closing.set()
        self._thread.join()
        if self._is_ours:
            self._file.close()

    def _put(self, needed: Sequence[Needed], data: bytes) -> None:
        self._append(b"".join(frame for _, frame in needed) + data)

    def _append(self, data: bytes) -> None:
        write_whole(self._file, data, self._name)
        self.size += len(data)

    def _sync(self) -> None:
        is_over, before = False, 0
        while not is_over:
            is_over = self._closing.wait(_SYNC_S)
            if self.size != before:
                before = self.size
                sync(self._file)


def write_whole(file: BinaryIO, data: bytes, name: str) -> None:
    """Write all bytes to a file without a buffer.

    Args:
        file: any.
        data: for it.
        name: of the file, for people.

    Raises:
        KprobesError: it cannot be written.
    """
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise KprobesError(f"cannot write {name}: {error.strerror}") from error


def sync(file: BinaryIO) -> None:
    """Have what was written on the disk, where there is one."""
    # A disk that fails does so when it is written to, too; a file that was closed has been synced.
    with suppress(OSError, ValueError):
        os.fdatasync(file.fileno())


def check_recording(path: Path) -> None:
    """Find out early whether a recording can be kept there; nothing is changed.

    Raises:
        UsageError: it cannot.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory")
    if not os.access(path.parent, os.W_OK):
        why = os.strerror(errno.EACCES if path.parent.is_dir() else errno.ENOENT)
        raise UsageError(f"cannot write {path}: {why}")


def open_file(path: Path) -> BinaryIO:
    """Begin a file that only its owner may read; one of that name becomes ``.old``.

    Raises:
        KprobesError: it cannot be written.
    """
    try:
        if path.is_file():
            path.replace(path.with_name(f"{path.name}.old"))
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KprobesError(f"cannot write {path}: {error.strerror}") from error
    return cast("BinaryIO", os.fdopen(handle, "wb", buffering=0))


def open_recording(path: Path) -> RecordingWriter:
    """Begin a recording in a file; errors as for ``open_file``."""
    return FileWriter(open_file(path), name=str(path))


def opener(path: Path, files: ExitStack) -> Callable[[], RecordingWriter]:
    """Return what opens a recording when it is called; ``files`` closes it."""
    return lambda: files.enter_context(open_recording(path))


class Counted(Protocol):
    """What a session has counted."""

    @property
    def pauses(self) -> tuple[float, int] | None:
        """As of ``RecordingEnd``."""
        ...

    def counts(self) -> Counts:
        """Return what was counted since the recording began."""
        ...

    def hits(self) -> Sequence[Hits]:
        """Return what was counted of every probe."""
        ...


@contextmanager
def ended(writer: RecordingWriter, counted: Counted) -> "Generator[None]":
    """Write at the end of the block what was counted, and which error of ours ended it."""
    try:
        yield
    except BaseException as error:
        # It may be the file itself that cannot be written; and a dead guest counts no more.
        with suppress(KprobesError):
            writer.end(_end(counted, str(error) if isinstance(error, KprobesError) else ""))
        raise
    writer.end(_end(counted))


def _end(counted: Counted, why: str = "") -> RecordingEnd:
    return RecordingEnd(
        real_ns=time.time_ns(),
        counts=counted.counts(),
        hits=tuple(counted.hits()),
        pauses=counted.pauses,
        why=why,
    )


def own_version() -> str:
    """Return the version of this package, or ``?`` where it is not installed."""
    try:
        return version("kprobes")
    except PackageNotFoundError:
        return "?"


def begin(writer: RecordingWriter, kernel: Kernel, source: TraceSource, target: str) -> None:
    """Write whose events come.

    Args:
        writer: of the recording.
        kernel: that is recorded.
        source: what sinks need to know of it.
        target: where it is.
    """
    recorded = RecordedKernel(
        release=kernel.release,
        arch=kernel.arch,
        build_id=kernel.build_id,
        version=source.version,
        target=target,
        cpus=source.cpus,
        trampoline=source.trampoline,
        has_ns=source.has_ns,
        real_ns=time.time_ns(),
        writer=f"kprobe {own_version()}",
    )
    writer.begin(recorded, kernel.symbols)


def _needed(kind: FrameKind, value: Struct) -> Needed:
    return kind, pack(kind, value)


def pack(kind: FrameKind, value: Struct) -> bytes:
    """Return the frame of a value."""
    try:
        data = msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        # A definition may have bytes that are no text, and so may a guest's names.
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        data = msgspec.msgpack.encode(_as_text(plain))
    return pack_frame(kind, data, level=_LEVEL if len(data) > _SMALL else None)


def _as_text(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            members = cast("dict[Any, Any]", value).items()
            return {key: _as_text(each) for key, each in members}
        case list() | tuple():
            return list(map(_as_text, cast("list[Any]", value)))
        case _:
            return value


def _pack_chunk(found: Committed, level: int | None) -> bytes:
    chunk = found.chunk
    head = CHUNK.pack(
        chunk.cpu, CHUNK_IS_BLOCKED * found.is_blocked, 0, chunk.limit, chunk.position
    )
    return pack_frame(FrameKind.CHUNK, head + chunk.data.tobytes(), level=level)


def _page_parts(found: Sequence[Pages]) -> Iterator[bytes]:
    for pages in found:
        most = max(_PAGES // pages.data.shape[1], 1)
        for at in range(0, len(pages.data), most):
            own = slice(at, at + most)
            data, skips = pages.data[own], pages.skips[own].astype("<u8")
            head = PAGES.pack(*data.shape)
            yield head + pages.cpu[own].astype("<u2").tobytes() + skips.tobytes() + data.tobytes()


def _names_addresses(layout: RecordLayout) -> bool:
    return layout.caller_offset is not None or any(f.type in _SYMBOLIC for f in layout.fields)


def _parts(symbols: Symbols) -> RecordedSymbols:
    if not isinstance(symbols, SymbolMap):
        raise TypeError("names that are no table")
    return RecordedSymbols(
        parts=tuple(
            SymbolPart(
                module=owner.name,
                addrs=owner.table.addrs.astype("<u8").tobytes(),
                types=owner.table.types,
                names=owner.table.blob,
                ranges=owner.ranges,
            )
            for owner in symbols.owners
        )
    )
