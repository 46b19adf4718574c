"""Recordings in several files, and recordings of which the end alone is kept.

Every file is whole by itself: what its records need stands before them once more.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from kprobes.errors import KprobesError
from kprobes.formats.recording import FrameKind, file_header, pack_frame
from kprobes.model.recording import RecordingEnd
from kprobes.recording_writer import (
    FileWriter,
    Needed,
    RecordingWriter,
    open_file,
    sync,
    write_whole,
)


def folded(before: Sequence[Needed], more: Sequence[Needed]) -> list[Needed]:
    """Return the frames that records need after some more of them; neither is changed."""
    found: list[Needed] = list(before)
    for kind, frame in more:
        if kind == FrameKind.KERNEL:
            found.clear()
        elif kind == FrameKind.CLOCK:
            found = [each for each in found if each[0] != kind]
        elif kind == FrameKind.INSTANCE and kind in {known for known, _ in found}:
            # Its events stand behind it.
            found = [(kind, frame) if known == kind else (known, own) for known, own in found]
            continue
        found.append((kind, frame))
    return found


class RotatingWriter(FileWriter):
    """Begins another file when one is large, or old, enough: x.rec, x.2.rec, x.3.rec, ..."""

    def __init__(
        self,
        path: Path,
        *,
        most: int | None = None,
        most_s: float | None = None,
        in_all: int | None = None,
    ) -> None:
        """Begin the first file.

        Args:
            path: of it.
            most: bytes of records after which another one is begun.
            most_s: seconds after which one is.
            in_all: bytes of all files, or a little more: the oldest are removed.

        Raises:
            KprobesError: it cannot be written.
        """
        self._path, self._number = path, 1
        self._most, self._most_s, self._in_all = most, most_s, in_all
        self._needed: list[Needed] = []
        self._done: deque[tuple[Path, int]] = deque()
        # Of the file that is written: when and where it begins, and how much in it is records.
        self._began_s, self._began_at, self._records = time.monotonic(), 0, 0
        self._is_between = False
        super().__init__(open_file(path), name=str(path))

    def _put(self, needed: Sequence[Needed], data: bytes) -> None:
        self._needed = folded(self._needed, needed)
        if self._is_between and self._is_due():
            self._rotate()
            needed = self._needed
        self._is_between = False
        super()._put(needed, data)
        self._records += len(data)
        self._remove_oldest()

    def end(self, end: RecordingEnd) -> None:
        """Take what was counted, into the file of the last records."""
        self._is_between = False
        super().end(end)

    def _end_round(self) -> None:
        # What one look has found is in one file.
        self._is_between = True

    def _is_due(self) -> bool:
        if self._most is not None and self._records >= self._most:
            return True
        return self._most_s is not None and time.monotonic() - self._began_s >= self._most_s

    def _rotate(self) -> None:
        self._number += 1
        self._needed = folded(self._needed, self._renewed())
        path = self._path.with_suffix(f".{self._number}{self._path.suffix}")
        self._append(pack_frame(FrameKind.CONTINUED, os.fsencode(path.name)))
        sync(self._file)
        old, self._file = self._file, open_file(path)
        old.close()
        self._done.append((Path(self._name), self.size - self._began_at))
        self._name = str(path)
        self._began_s, self._began_at, self._records = time.monotonic(), self.size, 0
        self._append(file_header())

    def _remove_oldest(self) -> None:
        if self._in_all is None:
            return
        left = self.size - self._began_at + sum(size for _, size in self._done)
        while self._done and left > self._in_all:
            path, size = self._done.popleft()
            path.unlink(missing_ok=True)
            left -= size


class SnapshotWriter(RecordingWriter):
    """Keeps the end of a recording in memory, and writes it when it is asked to, and at its end.

    One thread records; another writes what was asked for, under ``_lock`` no longer than to see
    what there is.
    """

    def __init__(self, path: Path, *, most: int, report: Callable[[int], None]) -> None:
        """Begin with nothing.

        Args:
            path: of the file; one that is there becomes ``.old``, snapshot by snapshot.
            most: bytes that are kept, or a little less.
            report: is given the bytes of each snapshot that was written while it records.
        """
        super().__init__()
        self._path, self._most, self._report = path, most, report
        self._lock = threading.Lock()
        self._base: list[Needed] = []
        # By look at the rings, of which the last one goes on.
        self._kept: deque[list[tuple[Sequence[Needed], bytes]]] = deque([[]])
        self._held = 0
        self._error: KprobesError | None = None
        self._asked = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="kprobes-snapshot", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Have what there is written, soon; for handlers of signals."""
        self._asked.set()

    def close(self) -> None:
        """Write what there is.

        Raises:
            KprobesError: it cannot be written, or what was asked for could not.
        """
        self._is_over = True
        self._asked.set()
        self._thread.join()
        self._write()
        if self._error is not None:
            raise self._error

    def _put(self, needed: Sequence[Needed], data: bytes) -> None:
        with self._lock:
            self._kept[-1].append((needed, data))
            self._held += len(data)
            while self._held > self._most and (len(self._kept) > 1 or len(self._kept[0]) > 1):
                self._let_go()

    def _let_go(self) -> None:
        # Of the oldest look, or of a part of it where without it too little would be left.
        oldest = self._kept[0]
        size = sum(len(data) for _, data in oldest)
        is_whole = len(self._kept) > 1 and self._held - size >= self._most // 2
        count = len(oldest) if is_whole else 1
        for before, gone in oldest[:count]:
            self._base = folded(self._base, before)
            self._held -= len(gone)
        del oldest[:count]
        if not oldest and len(self._kept) > 1:
            self._kept.popleft()

    def _end_round(self) -> None:
        with self._lock:
            self._kept.append([])

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._is_over:
                return
            try:
                self._write()
                self._report(self.size)
            except KprobesError as error:
                self._error = error

    def _write(self) -> None:
        with self._lock:
            needed, parts = self._base, list(chain.from_iterable(self._kept))
        if any(kind == FrameKind.INSTANCE for kind, _ in needed):
            needed = folded(needed, self._renewed())
        frames = [frame for _, frame in needed]
        for more, data in parts:
            frames += [*(frame for _, frame in more), data]
        data = b"".join([file_header(), *frames])
        with open_file(self._path) as file:
            write_whole(file, data, str(self._path))
            sync(file)
        self.size = len(data)
