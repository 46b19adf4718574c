"""Our directories, by the XDG base directory rules: this user's alone, at each level.

What lies there is acted upon: journals are written to guests, caches name their symbols. What
somebody else may have written there is refused.
"""

import io
import os
import pwd
import stat
import tempfile
from pathlib import Path

from kprobes.errors import StateError

_NAME = "kprobes"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def state() -> Path:
    """Return where journals are kept: below ``$XDG_STATE_HOME/kprobes``."""
    return _home("XDG_STATE_HOME", ".local/state") / _NAME


def cache() -> Path:
    """Return where caches are kept: below ``$XDG_CACHE_HOME/kprobes``."""
    return _home("XDG_CACHE_HOME", ".cache") / _NAME


def make(path: Path, *, top: Path) -> None:
    """Make a directory that is ours alone, as is each one from ``top`` on; wider ones are narrowed.

    Raises:
        StateError: one of them is somebody else's, or cannot be made.
    """
    try:
        for level in reversed([each for each in top.parents if not each.exists()]):
            level.mkdir(mode=0o700, exist_ok=True)
        for level in _levels(path, top):
            level.mkdir(mode=0o700, exist_ok=True)
            _narrow(level)
    except OSError as error:
        raise StateError(f"cannot make {path}: {error.strerror}") from error


def check(path: Path, *, top: Path) -> bool:
    """Narrow a directory as ``make`` does; return whether it is there.

    Raises:
        StateError: it is somebody else's, or cannot be looked at.
    """
    try:
        for level in _levels(path, top):
            _narrow(level)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StateError(f"cannot look at {path}: {error.strerror}") from error
    return True


def open_own(path: Path) -> io.BufferedReader:
    """Open a file of ours for reading; never waits for a writer.

    Raises:
        StateError: it is not a file, or somebody else can write it.
        OSError: it cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_file(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def create_own(path: Path) -> io.BufferedWriter:
    """Open an empty file that only we can read and write, for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def replace_own(path: Path, data: bytes) -> None:
    """Write a file of ours whole or not at all: others may read it, and we may die.

    Raises:
        OSError: it cannot be written; it is as before.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _home(variable: str, otherwise: str) -> Path:
    # A relative one would be another in each directory; the rules say to ignore it.
    given = os.environ.get(variable, "")
    return Path(given) if given.startswith("/") else Path.home() / otherwise


def _levels(path: Path, top: Path) -> list[Path]:
    return [top, *(each for each in reversed((path, *path.parents)) if top in each.parents)]


def _narrow(level: Path) -> None:
    handle = os.open(level, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        _check_owner(level, found.st_uid)
        # Whoever has a link can have it lead elsewhere.
        _check_owner(level, level.lstat().st_uid)
        if found.st_mode & _OTHERS:
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)


def _check_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise StateError(f"{path} is not a file")
    _check_owner(path, found.st_uid)
    if found.st_mode & _OTHERS_WRITE:
        raise StateError(f"{path} can be written by others: look at it, then chmod 600 it")


def _check_owner(path: Path, uid: int) -> None:
    if uid == os.geteuid():
        return
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = f"user {uid}"
    variable = "XDG_CACHE_HOME" if cache() in (path, *path.parents) else "XDG_STATE_HOME"
    raise StateError(
        f"{path} belongs to {owner}, and what is in it would be trusted: "
        f"remove it, or set {variable} to a directory of your own"
    )
