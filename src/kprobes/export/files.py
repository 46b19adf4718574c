"""Files of tables: one for each event; a single one is the file itself, several are in a directory.

    out.parquet                         one event
    out.parquet/event=open/part-0.parquet
    out.parquet/event=mine.read/part-0.parquet     where two groups have an event of one name

Tools that know Hive's directories make a column of ``event=NAME``. Functions of a pattern whose
arguments differ are parts of their own.
"""

import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

from kprobes.errors import KprobesError
from kprobes.model.events import Batch, Events
from kprobes.model.resolved import RecordLayout

_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_FOLDERS = "event=*"


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
            replace(file, self._path, _FOLDERS)
            shutil.rmtree(self._directory)
            return
        names = Counter(event for _, event in self._parts)
        for (group, event, _), (file, _) in self._tables.items():
            name = event if names[event] == 1 else f"{group}.{event}"
            folder = self._directory / f"event={name}"
            folder.mkdir(exist_ok=True)
            file.rename(folder / file.name.partition("+")[2])
        self._directory.chmod(0o755)
        replace(self._directory, self._path, _FOLDERS)

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


class NewFile:
    """A file that takes the place of what is there when it is whole; until then that stays.

    What is no plain file, a pipe say, is written itself.

    Attributes:
        file: that is written, and can be read and sought unless it is a pipe.
    """

    def __init__(self, path: Path) -> None:
        """Begin it, beside the path; OSError where that is impossible."""
        self._path = path.resolve()
        self._is_beside = self._path.is_file() or not self._path.exists()
        own = f".{self._path.name}-{secrets.token_hex(4)}"
        self._written = self._path.with_name(own) if self._is_beside else self._path
        self.file: BinaryIO = self._written.open("x+b" if self._is_beside else "wb")

    def close(self) -> None:
        """Put it into its place."""
        self.file.close()
        if self._is_beside:
            self._written.replace(self._path)

    def discard(self) -> None:
        """Leave what was there."""
        self.file.close()
        if self._is_beside:
            self._written.unlink(missing_ok=True)


def replace(new: Path, path: Path, own: str) -> None:
    """Put a file or directory into the place of what is there.

    Args:
        new: what is whole now.
        path: where it is to be.
        own: a shell pattern of what such a directory has.

    Raises:
        KprobesError: there is a directory that has something else, too.
    """
    if path.is_dir() and not path.is_symlink():
        other = next((each for each in path.iterdir() if not each.match(own)), None)
        if other is not None:
            raise KprobesError(
                f"{path} has something else in it, {other.name}: it is left as it is"
            )
        shutil.rmtree(path)
    elif new.is_dir():
        path.unlink(missing_ok=True)
    new.replace(path)
