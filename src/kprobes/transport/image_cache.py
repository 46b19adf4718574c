"""Directories that are made once: slow to fill, then found at once by every later process."""

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from kprobes import directories
from kprobes.errors import StateError, UnreachableError

Progress = Callable[[str], None]
"""Takes a few words on what happens now, for a person who waits."""

_SEAL = ".kprobes.json"
_MAX_SEAL = 1 << 16
_OTHERS_WRITE = 0o022


def images() -> Path:
    """Return where unpacked packages are kept: ``$XDG_CACHE_HOME/kprobes/images``."""
    return directories.cache() / "images"


def cached() -> list[Path]:
    """Return the directories that were filled, by name; none where somebody else may have."""
    try:
        directories.check(images(), top=directories.cache())
        return sorted(images().glob("*"))
    except StateError:
        return []


def filled(name: str, fill: Callable[[Path], Path], *, progress: Progress) -> Path:
    """Return the main file of a cached directory, filled first when it is not there.

    Args:
        name: of the directory, below ``images()``.
        fill: puts files into an empty directory and returns the main one. Runs in one
            process at a time; nothing is kept when it raises.
        progress: told when another process is at it.

    Raises:
        StateError: the cache is somebody else's, or cannot be made.
        UnreachableError: it cannot be written; or what ``fill`` raises.
    """
    root = images() / name
    directories.make(root.parent, top=directories.cache())
    if (found := _sealed(root)) is not None:
        return found
    try:
        with _locked(root, progress):
            return _sealed(root) or _fill(root, fill)
    except OSError as e:
        raise UnreachableError(f"cannot write the cache {root}: {e.strerror or e}") from e


def _fill(root: Path, fill: Callable[[Path], Path]) -> Path:
    with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as scratch:
        fresh = Path(scratch, "image")
        fresh.mkdir(mode=0o700)
        main = fill(fresh)
        main.chmod(main.stat().st_mode & ~_OTHERS_WRITE)
        seal = {"main": str(main.relative_to(fresh)), "sha256": _digest(main)}
        with directories.create_own(fresh / _SEAL) as file:
            file.write(json.dumps(seal).encode())
        # Only a directory whose seal is broken can be in the way: it is rebuilt.
        shutil.rmtree(root, ignore_errors=True)
        fresh.rename(root)
    return root / seal["main"]


def _sealed(root: Path) -> Path | None:
    try:
        directories.check(root, top=directories.cache())
        with directories.open_own(root / _SEAL) as file:
            seal = json.loads(file.read(_MAX_SEAL))
        main = root / str(seal["main"])
        return main if _digest(main) == seal["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, StateError):
        return None


def _digest(path: Path) -> str:
    with directories.open_own(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(root: Path, progress: Progress) -> Generator[None]:
    with (root.parent / f".{root.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {root.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
