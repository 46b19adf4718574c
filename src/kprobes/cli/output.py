"""The output of events: standard output or a file, and its end when that takes no more.

A sink in front of a sink: passes on so many events, and counts them.
"""

import errno
import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kprobes.cli.files import WholeFile
from kprobes.cli.terminal import Stop, counted
from kprobes.errors import KprobesError, UsageError
from kprobes.model.events import NO_EVENTS, Events
from kprobes.model.resolved import Storage
from kprobes.ports import Sink
from kprobes.sinks.names import LARGE_WINDOW

_FINISH_S = 1.5
"""With what is done besides, the output ends within two seconds after Ctrl-C."""
_PART = 2 * LARGE_WINDOW


class Output:
    """A sink that writes until its output is gone. Implements ``ports.Sink``.

    A reader that has left, as ``head`` does, is not an error: nobody wants the rest. A full disk is
    one, but the guest is put right first: ``check`` raises it. After the user's wish to end,
    ``write`` comes back at once, and what is left has ``_FINISH_S`` from then on.

    Attributes:
        unwritten: events that were to be written and were not.
        mark: what ``begin`` writes before anything else.
    """

    def __init__(
        self,
        stream: BinaryIO,
        make_sink: Callable[[BinaryIO], Sink],
        *,
        is_ours: bool = False,
        stop: Stop | None = None,
    ) -> None:
        """Write with a sink to a stream, which is closed at the end if it is ours."""
        self.unwritten = 0
        self.mark = b""
        self._stream = stream
        self._file = stream if isinstance(stream, WholeFile) else None
        self._is_ours = is_ours
        self._stop = stop or Stop()
        self._sink = make_sink(stream)
        self._poll = _watched(stream)
        self._todo: deque[Events] = deque()
        self._has_paused = False
        self._error: OSError | None = None
        self._stop.subscribe(self._hurry, self._rest)
        if self._stop.is_asked:
            self._hurry()

    @property
    def is_gone(self) -> bool:
        """Whether nobody takes what we write any more."""
        if self._error is None and self._poll is not None and self._poll.poll(0):
            self._error = BrokenPipeError()
        return self._error is not None

    @property
    def is_late(self) -> bool:
        """Whether events were not written because they could not be in time."""
        return bool(self.unwritten) and (self._error is None or _is_late(self._error))

    def begin(self) -> None:
        """Write what stands before all events: the header of a text."""
        with self._noting():
            if self._error is None:
                self._stream.write(self.mark)
                self._sink.write(NO_EVENTS)

    def refresh(self) -> None:
        """Have the sink write what it has, where it does so from time to time."""
        with self._noting():
            if self._error is None:
                self._sink.write(NO_EVENTS)

    def write(self, events: Events) -> None:
        """Write events, or drop them when the output is gone."""
        self._todo.extend(_parts(events))
        if not self._stop.is_asked or self._has_paused:
            self._write_parts()
        self._has_paused = self._stop.is_asked

    def close(self) -> None:
        """Write what is still to be written."""
        self._has_paused = True
        self._write_parts()
        with self._noting():
            if self._error is None:
                self._sink.close()
        self._stop.unsubscribe()
        self._rest()
        with self._noting():
            if self._is_ours:
                # What could not be written before fails once more.
                self._stream.close()

    def check(self) -> None:
        """Raise what went wrong.

        Raises:
            KprobesError: the output could not be written.
        """
        error = self._error
        if error is None or isinstance(error, BrokenPipeError) or _is_late(error):
            return
        lost = f"; {counted(self.unwritten, 'event')} not written" if self.unwritten else ""
        why = error.strerror or str(error)
        raise KprobesError(f"cannot write the events: {why}{lost}") from error

    def _write_parts(self) -> None:
        while self._todo and (self._has_paused or not self._stop.is_asked):
            part = self._todo.popleft()
            before = self._lines
            with self._noting():
                if self._error is None and time.monotonic() < self._stop.asked_s + _FINISH_S:
                    self._sink.write(part)
                    continue
            self.unwritten += len(part) - (self._lines - before)

    @property
    def _lines(self) -> int:
        return 0 if self._file is None else self._file.lines

    def _hurry(self) -> None:
        if self._file is not None:
            self._file.hurry(self._stop.asked_s + _FINISH_S)

    def _rest(self) -> None:
        if self._file is not None:
            self._file.rest()

    @contextmanager
    def _noting(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error


def _parts(events: Events) -> Iterator[Events]:
    for start in range(0, len(events), _PART):
        yield events.cut(slice(start, start + _PART))


def _is_late(error: OSError) -> bool:
    return error.errno == errno.EAGAIN


class LimitSink:
    """Passes on everything up to a limit and counts it. Implements ``ports.Sink``.

    Attributes:
        events: how many were passed on.
        faulted: how many of their values could not be read.
    """

    def __init__(self, sink: Sink, *, limit: int | None = None) -> None:
        """Count what goes to a sink; after ``limit`` events it gets no more."""
        self._sink = sink
        self._limit = limit
        self.events = 0
        self.faulted = 0

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self._limit is not None and self.events >= self._limit

    def write(self, events: Events) -> None:
        """Pass on as many as the limit leaves, the oldest."""
        if self._limit is not None and len(events) > self._limit - self.events:
            events = _first(events, self._limit - self.events)
            if not len(events):
                return
        self._sink.write(events)
        self.events += len(events)
        self.faulted += _faulted(events)

    def close(self) -> None:
        """Close what is behind."""
        self._sink.close()


def _first(events: Events, count: int) -> Events:
    return Events(batches=events.batches, batch=events.batch[:count], row=events.row[:count])


def _faulted(events: Events) -> int:
    total = 0
    for index, batch in enumerate(events.batches):
        fields = zip(batch.layout.fields, batch.faulted, strict=True)
        read = (mask for field, mask in fields if field.storage is not Storage.DURATION)
        masks = [mask for mask in read if mask is not None and mask.any()]
        if masks:
            rows = events.row[events.batch == index]
            total += sum(int(mask[rows].sum()) for mask in masks)
    return total


class NoEvents:
    """A sink for a trace without definitions: no header either. Implements ``ports.Sink``."""

    def write(self, events: Events) -> None:
        """Drop events: there are none."""

    def close(self) -> None:
        """Do nothing."""


def check_apart(file: Path, out: Path) -> None:
    """Raise UsageError where what is written is what is read."""
    if file.exists() and out.exists() and file.samefile(out):
        raise UsageError(f"{out} is what is read: give another name to what is written")


def check_writable(path: Path) -> None:
    """Find out early whether a file can be written; it is as before, and there only if it was.

    Raises:
        UsageError: it cannot.
    """
    if path.exists() and not path.is_file():
        return
    is_new, file = not path.exists(), path.resolve()
    try:
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def open_output(path: Path, *, goes_on: bool = False) -> WholeFile:
    """Open a file for events; a regular one so that it can be read and sought, too.

    Args:
        path: of the file.
        goes_on: whether what it holds stays, in front of what comes.

    Raises:
        KprobesError: it cannot be written.
    """
    try:
        if goes_on and path.is_file():
            file = WholeFile(path, "r+b")
            file.seek(0, os.SEEK_END)
            return file
        return WholeFile(path, "w+b" if path.is_file() or not path.exists() else "wb")
    except OSError as error:
        raise KprobesError(f"cannot write {path}: {error.strerror}") from error


def _watched(stream: BinaryIO) -> "select.poll | None":
    # POLLERR on a pipe or socket tells that its reader is gone, without a write.
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except OSError:
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return None
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return poll
