"""Exporters: a recording's events in files that other tools read, one module for each kind.

An exporter is a sink: it sees batches of columns, and the kernel that they are of; no ring, guest
or architecture. It is made with the path that is to be written; ``close`` makes that whole, and
``discard`` leaves nothing of it.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from kprobes.errors import UsageError
from kprobes.model.recording import RecordedKernel
from kprobes.ports import Sink
from kprobes.sinks.names import TraceSource


class File(Sink, Protocol):
    """A sink that may be given up."""

    def lose(self, cpu: int, count: int) -> None:
        """Be told that events of a CPU were lost: after what was written, before what comes."""
        ...

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        ...


Exporter = Callable[[Path, RecordedKernel, TraceSource], File]
"""Where it is written, and which kernel's events come, to what writes them."""
SUFFIXES = {
    ".txt": "text.TextFile",
    ".ndjson": "text.NdjsonFile",
    ".json": "text.NdjsonFile",
    ".csv": "csv.CsvFiles",
    ".parquet": "arrow.ParquetFiles",
    ".arrow": "arrow.ArrowFiles",
    ".pftrace": "perfetto.PerfettoFile",
    ".dat": "trace_dat.TraceDatFile",
    ".html": "html.HtmlFile",
}
"""By the suffix of the file: its module here, and what makes it."""
_NEEDED = {"arrow": "arrow", "html": "html", "perfetto": "perfetto", "polars": "polars"}
"""By module: the extra that has what it needs."""


def exporter(path: Path) -> Exporter:
    """Return what writes such a file.

    Raises:
        UsageError: no file of this suffix can be written, or what it needs is not installed.
    """
    place = SUFFIXES.get(path.suffix)
    if place is None:
        known = ", ".join(SUFFIXES)
        raise UsageError(f"cannot convert to {path.name!r}: its suffix must be one of {known}")
    module, _, name = place.partition(".")
    return getattr(load(module), name)


def load(module: str, package: str = __name__) -> Any:
    """Return a module of this package, or one that an extra brings.

    Args:
        module: its name.
        package: that it is in; "" for none.

    Raises:
        UsageError: what it needs is not installed.
    """
    try:
        return import_module(f"{package}.{module}" if package else module)
    except ModuleNotFoundError as error:
        if module not in _NEEDED:
            raise
        needed = f"kprobes[{_NEEDED[module]}]"
        raise UsageError(f"{error.name} is not installed: pip install '{needed}'") from error
