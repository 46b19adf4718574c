"""One file of text, or of JSON, as ``kprobe report`` prints them."""

from pathlib import Path

from msgspec.structs import replace

from kprobes.export.files import NewFile
from kprobes.model.events import Events
from kprobes.model.recording import RecordedKernel
from kprobes.sinks import FORMATS
from kprobes.sinks.names import TraceSource


class _File:
    form = ""

    def __init__(self, path: Path, kernel: RecordedKernel, source: TraceSource) -> None:
        """Begin the file; OSError where that is impossible."""
        del kernel
        self._new = NewFile(path)
        # Each boot has a file of its own.
        self._sink = FORMATS[self.form](self._new.file, replace(source, is_rebooted=False))

    def write(self, events: Events) -> None:
        """Take events, oldest first."""
        self._sink.write(events)

    def lose(self, cpu: int, count: int) -> None:
        """Have no place for it."""

    def close(self) -> None:
        """Finish what was written."""
        self._sink.close()
        self._new.close()

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        self._new.discard()


class TextFile(_File):
    """The kernel's own text."""

    form = "text"


class NdjsonFile(_File):
    """One object per line."""

    form = "json"
