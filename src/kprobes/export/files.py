"""Files of tables: one for each event; a single one is the file itself, several are in a directory.

    out.parquet                         one event
    out.parquet/event=open/part-0.parquet
    out.parquet/event=mine.read/part-0.parquet     where two groups have an event of one name

Tools that know Hive's directories make a column of ``event=NAME``. Functions of a pattern whose
arguments differ are parts of their own.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kprobes.model.events import Batch, Events
from kprobes.model.resolved import RecordLayout

_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class TableFile(Protocol):
    """One file that is written."""

    def write(self, batch: Batch) -> None:
        """Append rows, oldest first."""
        ...

    def close(self) -> None:
        """Finish the file."""
        ...


_Table = TypeVar("_Table", bound=TableFile)


class TableFiles(Generic[_Table]):
    """A file for each event. Implements ``ports.Sink``."""

    def __init__(
        self,
        path: Path,
        shape: Callable[[RecordLayout], Hashable],
        make: Callable[[Path, RecordLayout], _Table],
    ) -> None:
        """Begin beside the path, which is replaced when all is whole.

        Args:
            path: of the file, or the directory.
            shape: what the rows of one file have in common.
            make: begins a file.
        """
        self._path, self._shape, self._make = path, shape, make
        self._directory = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
        self._tables: dict[tuple[str, str, Hashable], tuple[Path, _Table]] = {}
        self._parts: Counter[tuple[str, str]] = Counter()

    def write(self, events: Events) -> None:
        """Take events, oldest first."""
        for index, batch in enumerate(events.batches):
            rows = events.row[events.batch == index]
            if len(rows):
                self._table(batch.layout).write(batch.take(rows))

    def lose(self, cpu: int, count: int) -> None:
        """Have no place for it."""

    def close(self) -> None:
        """Finish the files, and put them in the place of what was there."""
        for _, table in self._tables.values():
            table.close()
        if len(self._tables) == 1:
            ((file, _),) = self._tables.values()
            _replace(file, self._path)
            shutil.rmtree(self._directory)
            return
        names = Counter(event for _, event in self._parts)
        for (group, event, _), (file, _) in self._tables.items():
            name = event if names[event] == 1 else f"{group}.{event}"
            folder = self._directory / f"event={name}"
            folder.mkdir(exist_ok=True)
            file.rename(folder / file.name.partition("+")[2])
        self._directory.chmod(0o755)
        _replace(self._directory, self._path)

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        for _, table in self._tables.values():
            with suppress(OSError):
                table.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _table(self, layout: RecordLayout) -> _Table:
        key = layout.group, layout.event, self._shape(layout)
        if key not in self._tables:
            part = self._parts[key[:2]]
            self._parts[key[:2]] += 1
            file = self._directory / f"{len(self._tables)}+part-{part}{self._path.suffix}"
            self._tables[key] = file, self._make(file, layout)
        return self._tables[key][1]


def _replace(new: Path, path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    new.replace(path)
