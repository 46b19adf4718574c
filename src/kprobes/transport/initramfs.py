"""The guest's whole file system: busybox, our init and agent, and the user's files, as cpio."""

import stat
import subprocess
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path, PurePosixPath

from kprobes.errors import UnreachableError, UsageError
from kprobes.formats import cpio

Files = Mapping[str, Path | bytes]
"""Absolute path in the guest to a file or directory of this machine, or to a file's bytes."""

_DIRECTORIES = (
    "bin",
    "dev",
    "etc",
    "proc",
    "root",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr/bin",
    "usr/sbin",
)
_PROGRAM_STARTS = (b"#!", b"\x7fELF")
_OURS = frozenset({"init", "bin/busybox", "etc/kprobes-agent", "sbin/kprobes-agent"})


def build(busybox: Path, files: Files, *, agent: str) -> bytes:
    """Return the archive.

    Bytes that begin like a program are executable; files keep their permission bits, and
    directories are taken with all that is below them, links as links.

    Args:
        busybox: for the guest's architecture.
        files: to be added.
        agent: the terminal, below /dev, that the agent speaks on.

    Raises:
        UsageError: a guest path that is not absolute, or is one of ours.
        UnreachableError: a file that cannot be read.
    """
    wanted = {_guest_path(where): what for where, what in files.items()}
    entries: dict[str, cpio.Entry] = {}
    try:
        for entry in _base(busybox, agent):
            _add(entries, entry)
        for path, what in wanted.items():
            for entry in _user_entries(path, what):
                _add(entries, entry)
    except OSError as e:
        raise UnreachableError(f"cannot read {e.filename}: {e.strerror}") from e
    return cpio.archive(entries.values())


def _add(entries: dict[str, cpio.Entry], entry: cpio.Entry) -> None:
    # The kernel makes no parents.
    for parent in reversed(PurePosixPath(entry.path).parents[:-1]):
        entries.setdefault(str(parent), cpio.directory(str(parent)))
    entries[entry.path] = entry


def _base(busybox: Path, agent: str) -> Iterator[cpio.Entry]:
    scripts = resources.files("kprobes.transport") / "guest"
    yield from (cpio.directory(path) for path in _DIRECTORIES)
    yield cpio.character_device("dev/console", 5, 1)
    yield cpio.file("bin/busybox", busybox.read_bytes(), mode=0o755)
    for applet in _applets(busybox):
        yield cpio.link(applet, "/bin/busybox")
    yield cpio.file("init", (scripts / "init.sh").read_bytes(), mode=0o755)
    yield cpio.file("sbin/kprobes-agent", (scripts / "agent.sh").read_bytes(), mode=0o755)
    yield cpio.file("etc/kprobes-agent", f"{agent}\n".encode())
    yield cpio.file("etc/passwd", b"root::0:0:root:/root:/bin/sh\n")
    yield cpio.file("etc/group", b"root:x:0:\n")


def _applets(busybox: Path) -> list[str]:
    # Links made by the kernel while it unpacks save 45 ms of the guest's boot under TCG; for
    # another architecture's busybox, which does not run here, init makes them.
    try:
        listed = subprocess.run([busybox, "--list-full"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    names = set(listed.stdout.decode().split()) - _OURS - {"linuxrc"}
    return sorted(name.removeprefix("/") for name in names)


def _guest_path(where: str) -> str:
    relative = str(PurePosixPath(where.lstrip("/")))
    if not where.startswith("/") or {"", ".", ".."} & set(relative.split("/")) or "\0" in where:
        raise UsageError(f"{where!r} is not an absolute path for a file in the guest")
    if relative in _OURS:
        raise UsageError(f"{where} in the guest is needed by kprobes itself")
    return relative


def _user_entries(path: str, what: Path | bytes) -> Iterator[cpio.Entry]:
    if isinstance(what, bytes):
        mode = 0o755 if what.startswith(_PROGRAM_STARTS) else 0o644
        yield cpio.file(path, what, mode=mode)
    elif what.is_dir():
        yield cpio.directory(path)
        for child in sorted(what.iterdir()):
            yield from _tree(f"{path}/{child.name}", child)
    elif what.exists() and not what.is_file():
        raise UnreachableError(f"{what} is neither a file nor a directory")
    else:
        mode = stat.S_IMODE(what.stat().st_mode)
        yield cpio.file(path, what.read_bytes(), mode=mode)


def _tree(path: str, what: Path) -> Iterator[cpio.Entry]:
    if what.is_symlink():
        yield cpio.link(path, str(what.readlink()))
    elif what.is_dir() or what.is_file():
        yield from _user_entries(path, what)
