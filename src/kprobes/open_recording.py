"""Open what has events: a recording of ours, a file of trace-cmd, or a copy of tracefs."""

import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO, Protocol, cast

from kprobes.errors import FormatError, UsageError
from kprobes.model.events import Events
from kprobes.model.recording import RecordingEnd
from kprobes.model.resolved import RecordLayout
from kprobes.recording import RecordedBoot, Recording
from kprobes.timeline import Bounds


class EventFile(Protocol):
    """A ``Recording``, which is read once, or what is read likewise.

    Attributes:
        is_ours: whether it is a ``Recording``.
    """

    is_ours: bool
    end: RecordingEnd | None
    continued: str
    bounds: Bounds

    @property
    def damaged(self) -> int:
        """Places that were passed over so far."""
        ...

    @property
    def lost(self) -> int:
        """Events that were not recorded, as a ring was full."""
        ...

    @property
    def counted(self) -> RecordingEnd:
        """What was counted."""
        ...

    @property
    def layouts(self) -> dict[int, RecordLayout]:
        """The events, by number."""
        ...

    @property
    def left_out(self) -> Sequence[str]:
        """Names of instances in it whose events are not read."""
        ...

    def boots(self) -> Iterator[RecordedBoot]:
        """Yield boot after boot; the rounds of one are to be read before the next one."""
        ...


def read_events(path: Path) -> Iterator[Events]:
    """Yield the events of all boots in a recording, oldest first.

    Raises:
        FormatError: it is none.
        UsageError: there is no such file.
    """
    with opened_recording(path) as recording:
        for boot in recording.boots():
            yield from boot.rounds


@contextmanager
def opened_recording(path: Path) -> Generator[EventFile]:
    """Open a recording to be read; ``-`` is standard input. Errors as for ``read_events``."""
    with ExitStack() as files:
        try:
            yield _opened(path, files)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error


def _opened(path: Path, files: ExitStack) -> EventFile:
    # Who only records does without.
    from kprobes.formats.trace_dat import MAGIC

    try:
        if path.is_dir():
            return _kernel_trace_of_pages(path)
        is_input = str(path) == "-"
        stream = cast("BufferedReader", sys.stdin.buffer) if is_input else path.open("rb")
        if not is_input:
            files.enter_context(stream)
        if not stream.peek(len(MAGIC)).startswith(MAGIC):
            return Recording(stream)
        return _kernel_trace(_seekable(stream, files), path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _kernel_trace(stream: BinaryIO, path: Path) -> EventFile:
    # Only who reads such files needs what reads them.
    from kprobes.formats.trace_dat_reader import TraceDat
    from kprobes.kernel_trace import KernelTrace

    return KernelTrace(TraceDat(stream), str(path))


def _kernel_trace_of_pages(path: Path) -> EventFile:
    from kprobes.kernel_trace import KernelTrace
    from kprobes.transport.tracefs_copy import TracefsCopy

    return KernelTrace(TracefsCopy(path), str(path))


def _seekable(stream: BinaryIO, files: ExitStack) -> BinaryIO:
    if stream.seekable():
        return stream
    whole = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the others
    copyfileobj(stream, whole)
    whole.seek(0)
    return whole
