"""Files, directories, links and devices into a newc cpio archive, as the kernel unpacks it.

Documentation/driver-api/early-userspace/buffer-format.rst; the reader is init/initramfs.c:

    struct header {            // every field ASCII hex digits
        char magic[6];         // "070701"
        char ino[8], mode[8], uid[8], gid[8], nlink[8], mtime[8], filesize[8];
        char devmajor[8], devminor[8], rdevmajor[8], rdevminor[8];
        char namesize[8];      // with its NUL
        char check[8];         // 0
    };                         // then the name, padded to 4; then the data, padded to 4

Archives may follow each other in one file: a later entry of the same name wins.
"""

import stat
from collections.abc import Iterable

from msgspec import Struct

_MAGIC = b"070701"
_TRAILER = "TRAILER!!!"
_LIMIT = (1 << 32) - 1
# PATH_MAX of the kernel: a longer name ends its unpacking with an error.
_NAME_LIMIT = 4096


class Entry(Struct, frozen=True, kw_only=True):
    """One thing in the archive; all belong to root.

    Attributes:
        path: without a leading slash; parents need entries of their own, earlier.
        mode: type and permission bits, as in ``st_mode``.
        data: a file's bytes or a link's target.
        device: (major, minor) of a device node.
    """

    path: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        name = self.path.encode(errors="surrogateescape")
        if not name or self.path.startswith("/") or b"\0" in name or len(name) >= _NAME_LIMIT:
            raise ValueError(f"no path for an archive: {self.path!r}")
        if len(self.data) > _LIMIT:
            raise ValueError(f"{self.path} has {len(self.data)} bytes, newc ends at 4 GiB")


def directory(path: str) -> Entry:
    """Return a directory that everybody may read."""
    return Entry(path=path, mode=stat.S_IFDIR | 0o755)


def file(path: str, data: bytes, *, mode: int = 0o644) -> Entry:
    """Return a regular file.

    Args:
        path: in the archive, without a leading slash.
        data: what is in it.
        mode: its permission bits.
    """
    return Entry(path=path, mode=stat.S_IFREG | stat.S_IMODE(mode), data=data)


def link(path: str, target: str) -> Entry:
    """Return a symbolic link."""
    data = target.encode(errors="surrogateescape")
    return Entry(path=path, mode=stat.S_IFLNK | 0o777, data=data)


def character_device(path: str, major: int, minor: int) -> Entry:
    """Return a character device that only root may open.

    Args:
        path: in the archive, without a leading slash.
        major: the number of its driver.
        minor: its number in that driver.
    """
    return Entry(path=path, mode=stat.S_IFCHR | 0o600, device=(major, minor))


def archive(entries: Iterable[Entry]) -> bytes:
    """Return the archive of these entries, in this order: the same bytes for the same entries."""
    parts = [_record(entry, ino) for ino, entry in enumerate(entries, 1)]
    return b"".join([*parts, _record(Entry(path=_TRAILER, mode=0), 0)])


def _record(entry: Entry, ino: int) -> bytes:
    name = entry.path.encode(errors="surrogateescape") + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    numbers = (ino, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
    header = _MAGIC + b"".join(b"%08x" % number for number in numbers)
    return _padded(header + name) + _padded(entry.data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
