"""Where events go: standard output or a file, and what happens when it takes no more."""

import os
import select
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kprobes.errors import KprobesError, UsageError
from kprobes.model.batch import Events
from kprobes.ports import Sink

_NOTHING = Events(batches=(), batch=np.empty(0, np.uint16), row=np.empty(0, np.uint32))


class Output:
    """A sink that writes until its output is gone. Implements ``ports.Sink``.

    A reader that has left, as ``head`` does, is no error: nobody wants the rest. A full disk is
    one, but the guest is put right first: ``check`` raises it.
    """

    def __init__(
        self, stream: BinaryIO, make_sink: Callable[[BinaryIO], Sink], *, is_ours: bool = False
    ) -> None:
        """Write with a sink to a stream, which is closed at the end if it is ours."""
        self._stream = stream
        self._is_ours = is_ours
        self._sink = make_sink(stream)
        self._poll = _watched(stream)
        self._error: OSError | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nobody takes what we write any more."""
        if self._error is None and self._poll is not None and self._poll.poll(0):
            self._error = BrokenPipeError()
        return self._error is not None

    def begin(self) -> None:
        """Write what stands before all events: the header of a text."""
        with self._noting():
            if self._error is None:
                self._sink.write(_NOTHING)

    def write(self, events: Events) -> None:
        """Write events, or drop them when the output is gone."""
        with self._noting():
            if self._error is None:
                self._sink.write(events)

    def close(self) -> None:
        """Write what is still to be written."""
        with self._noting():
            if self._error is None:
                self._sink.close()
        with self._noting():
            if self._is_ours:
                # What could not be written before fails once more.
                self._stream.close()

    def check(self) -> None:
        """Raise what went wrong.

        Raises:
            KprobesError: the output could not be written.
        """
        if self._error is not None and not isinstance(self._error, BrokenPipeError):
            why = self._error.strerror or str(self._error)
            raise KprobesError(f"cannot write the events: {why}") from self._error

    @contextmanager
    def _noting(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error


class NoEvents:
    """A sink for a trace without definitions: no header either. Implements ``ports.Sink``."""

    def write(self, events: Events) -> None:
        """Drop events: there are none."""

    def close(self) -> None:
        """Do nothing."""


def check_writable(path: Path) -> None:
    """Find out early whether a file can be written; what it holds stays for now.

    Raises:
        UsageError: it cannot.
    """
    if path.exists() and not path.is_file():
        return
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def open_output(path: Path) -> BinaryIO:
    """Open a file for events, emptied; a regular one so that it can be read and sought, too.

    Raises:
        KprobesError: it cannot be written.
    """
    try:
        return path.open("w+b" if path.is_file() else "wb")
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
