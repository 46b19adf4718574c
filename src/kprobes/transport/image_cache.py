"""Directories that are made once: slow to fill, then found at once by every later process."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from kprobes.errors import UnreachableError

Progress = Callable[[str], None]
"""Takes a few words on what happens now, for a person who waits."""

_SEAL = ".kprobes.json"


def images() -> Path:
    """Return where unpacked packages are kept: ``$XDG_CACHE_HOME/kprobes/images``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".cache"
    return base / "kprobes" / "images"


def filled(name: str, fill: Callable[[Path], Path], *, progress: Progress) -> Path:
    """Return the main file of a cached directory, filled first when it is not there.

    Args:
        name: of the directory, below ``images()``.
        fill: puts files into an empty directory and returns the main one. Runs in one
            process at a time; nothing is kept when it raises.
        progress: told when another process is at it.

    Raises:
        UnreachableError: the cache cannot be written; or what ``fill`` raises.
    """
    root = images() / name
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
        fresh.mkdir()
        main = fill(fresh)
        seal = {"main": str(main.relative_to(fresh)), "sha256": _digest(main)}
        (fresh / _SEAL).write_text(json.dumps(seal))
        # Only a directory whose seal is broken can be in the way: it is rebuilt.
        shutil.rmtree(root, ignore_errors=True)
        fresh.rename(root)
    return root / seal["main"]


def _sealed(root: Path) -> Path | None:
    try:
        seal = json.loads((root / _SEAL).read_text())
        main = root / str(seal["main"])
        return main if _digest(main) == seal["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(root: Path, progress: Progress) -> Generator[None]:
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f".{root.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {root.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
