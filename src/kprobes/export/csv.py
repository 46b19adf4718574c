"""Tables of comma-separated values: ``sinks.csv``, a file of each event."""

from pathlib import Path

import numpy as np

from kprobes.export.files import TableFiles
from kprobes.model.events import Batch
from kprobes.model.recording import RecordedKernel
from kprobes.model.resolved import RecordLayout
from kprobes.native.lines import in_order
from kprobes.sinks.csv import CsvSink, header_line, header_of
from kprobes.sinks.names import TraceSource


class CsvFiles(TableFiles["CsvTable"]):
    """One file of each event."""

    def __init__(self, path: Path, kernel: RecordedKernel, source: TraceSource) -> None:
        """Begin; OSError where nothing can be written."""
        del kernel
        super().__init__(path, header_of, lambda file, layout: CsvTable(file, layout, source))


class CsvTable:
    """One file."""

    def __init__(self, path: Path, layout: RecordLayout, source: TraceSource) -> None:
        """Write the line of names."""
        self._file = path.open("wb")
        self._file.write(header_line(layout))
        self._sink = CsvSink(self._file, source)

    def write(self, batch: Batch) -> None:
        """Append rows, oldest first."""
        lines = [self._sink.lines(batch)]
        self._file.writelines(in_order(lines, np.zeros(len(batch), np.uint16)))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
