"""Exporters: a recording's events in files that other tools read, one module for each kind.

An exporter is a sink: it sees batches of columns, and the kernel that they are of; no ring, guest
or architecture. It is made with the path that is to be written; ``close`` makes that whole, and
``discard`` leaves nothing of it.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import UsageError
from kprobes.model.recording import RecordedKernel
from kprobes.ports import Sink
from kprobes.sinks.names import TraceSource
from kprobes.timeline import Shift


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
_NEEDED = {
    "arrow": "arrow",
    "html": "html",
    "manifest": "perfetto",
    "matplotlib.figure": "plot",
    "perfetto": "perfetto",
    "polars": "polars",
}
"""By module: the extra that has what it needs."""


class Peer(Struct, frozen=True, kw_only=True, eq=False):
    """One of several machines whose events are put on one timeline.

    Attributes:
        name: that no other has; also of its file.
        shift: to the clock of all, None where its own is the same.
    """

    name: str
    shift: Shift | None


def drift_of(shift: Shift) -> Shift:
    """Return what is left of a shift without ``shift.ns``: by what two clocks run apart.

    It is to a clock that runs as the other one and shows the same in the middle.
    """
    to = shift.to
    steady = replace(to, times=to.times - shift.ns, offsets=to.offsets + shift.ns)
    return replace(shift, to=steady)


class SeveralFiles(Protocol):
    """Files of several machines as one whole."""

    def add(self, peer: Peer, kernel: RecordedKernel, source: TraceSource) -> File:
        """Begin the file of a machine; each is closed before the next.

        Args:
            peer: which it is; the first is one whose clock is that of all.
            kernel: whose events come.
            source: what names its addresses.
        """
        ...

    def close(self) -> None:
        """Make the whole, and put it in the place of what was there."""
        ...

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        ...


SEVERAL = {".dat": "trace_dat.TraceDatFiles", ".zip": "manifest.PerfettoZip"}
"""As ``SUFFIXES``, of several machines."""


def exporter(path: Path) -> Exporter:
    """Return what writes such a file.

    Raises:
        UsageError: no file of this suffix can be written, or what it needs is not installed.
    """
    place = SUFFIXES.get(path.suffix)
    if place is None:
        known = ", ".join(dict.fromkeys((*SUFFIXES, *SEVERAL)))
        raise UsageError(f"cannot convert to {path.name!r}: its suffix must be one of {known}")
    return _loaded(place)


def several_exporter(path: Path) -> Callable[[Path], SeveralFiles]:
    """Return what writes files of several machines, when it is made with that path.

    Raises:
        UsageError: likewise.
    """
    place = SEVERAL.get(path.suffix)
    if place is None:
        raise UsageError(
            f"cannot convert several recordings to {path.name!r}: they become .dat or .zip; "
            "`kprobe report FILE FILE --format json` prints them in one order"
        )
    return _loaded(place)


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


def _loaded(place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(load(module), name)
