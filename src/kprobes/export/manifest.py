"""Timelines of several machines as one, for Perfetto: a zip of a file of each and a manifest.

The manifest tells which machine a file is of, and what is added to its times: ``offset_ns``, by
which the clocks differ in the middle of its recording. By what they run apart before and after
that, the times in the file are not those of the recording.

docs/reference/perfetto-manifest.md of Perfetto has all of it.
"""

import shutil
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kprobes.export import Peer, drift_of
from kprobes.export.perfetto import PerfettoFile
from kprobes.model.events import Events
from kprobes.model.recording import RecordedKernel
from kprobes.sinks.names import TraceSource
from kprobes.timeline import shifted

_NAME = "perfetto_manifest.json"
_CLOCK = "BOOTTIME"


class PerfettoZip:
    """One zip."""

    def __init__(self, path: Path) -> None:
        """Begin beside the path, which is replaced at the end; OSError where that is impossible."""
        self._path = path
        self._directory = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
        self._whole = self._directory / "whole"
        self._archive = zipfile.ZipFile(self._whole, "w", zipfile.ZIP_DEFLATED)
        self._files: list[_PeerFile] = []

    def add(self, peer: Peer, kernel: RecordedKernel, source: TraceSource) -> "_PeerFile":
        """Begin the file of a machine; each is closed before the next.

        Args:
            peer: which it is; the first is one whose clock is that of all.
            kernel: whose events come.
            source: what names its addresses.
        """
        path = self._directory / f"{peer.name}.pftrace"
        file = _PeerFile(PerfettoFile(path, kernel, source), path, peer, self._archive)
        self._files.append(file)
        return file

    def close(self) -> None:
        """Finish the zip, and put it in the place of what was there."""
        self._archive.writestr(_NAME, msgspec.json.encode({"perfetto_manifest": self._manifest()}))
        self._archive.close()
        self._whole.replace(self._path)
        shutil.rmtree(self._directory)

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        with suppress(OSError):
            self._archive.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _manifest(self) -> dict[str, Any]:
        first, *others = self._files
        sync_to = {"file": first.name, "clock": _CLOCK}
        files: list[dict[str, Any]] = [first.described()]
        for each in others:
            clocks = {"clock": _CLOCK, "sync_to": sync_to, "offset_ns": each.offset_ns}
            files.append({**each.described(), "clocks": clocks})
        trace_time = {"clock": _CLOCK, "file": first.name}
        return {"version": 1, "trace_time": trace_time, "files": files}


class _PeerFile:
    # Goes into the zip when it is whole.

    def __init__(
        self, file: PerfettoFile, path: Path, peer: Peer, archive: zipfile.ZipFile
    ) -> None:
        self._machine, self.name = peer.name, path.name
        self.offset_ns = 0 if peer.shift is None else peer.shift.ns
        self._drift = None if peer.shift is None else drift_of(peer.shift)
        self._file, self._path, self._archive = file, path, archive

    def described(self) -> dict[str, Any]:
        return {"path": self.name, "machine": {"name": self._machine}}

    def write(self, events: Events) -> None:
        for moved in shifted(iter((events,)), self._drift):
            self._file.write(moved)

    def lose(self, cpu: int, count: int) -> None:
        self._file.lose(cpu, count)

    def close(self) -> None:
        self._file.close()
        self._archive.write(self._path, self.name)
        self._path.unlink()

    def discard(self) -> None:
        self._file.discard()
