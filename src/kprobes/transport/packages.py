"""Debian's kernels and its static busybox, by package name, unpacked into a cache.

A kernel's meta package (linux-image-cloud-amd64) leads to the package that holds its image:
linux-image-VERSION up to 6.x, at boot/vmlinuz-VERSION; since 7.x linux-binary-VERSION, at
usr/lib/modules/VERSION/vmlinuz, with the modules in linux-modules-VERSION.
"""

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kprobes.errors import FormatError, UnreachableError
from kprobes.formats import elf
from kprobes.transport.apt import Package, open_apt, unpack
from kprobes.transport.boards import BOARDS, DEFAULT_ARCH
from kprobes.transport.image_cache import Progress, filled
from kprobes.units import MIB

_KERNEL_PARTS = re.compile(r"linux-(image|binary|modules)-.*")
# A meta package leads to an image, which leads to a binary; more is a loop.
_MAX_PACKAGES = 8
_BUSYBOX_SUITE = "bookworm"


def _quiet(words: str) -> None:
    del words


def kernel_image(
    *,
    suite: str = "bookworm",
    arch: str = DEFAULT_ARCH,
    mirror: str = "",
    progress: Progress = _quiet,
) -> Path:
    """Return the boot image of a Debian suite's cloud kernel, downloaded the first time.

    The package's modules are beside it: see ``modules_of``. It stays at the version that was
    downloaded until its directory below ``image_cache.images()`` is removed.

    Raises:
        UnreachableError: no apt, no network, no such suite or package.
    """

    def fill(root: Path) -> Path:
        debian = _Debian(suite=suite, arch=arch, mirror=mirror)
        _fetch_into(root, f"linux-image-cloud-{arch}", debian, progress)
        return _only(root, "boot/vmlinuz-*", "usr/lib/modules/*/vmlinuz", "lib/modules/*/vmlinuz")

    return filled(f"linux-{suite}-{arch}", fill, progress=progress)


def modules_of(kernel: Path) -> Path | None:
    """Return the modules directory that came in a package with this image, or None."""
    release = kernel.name.removeprefix("vmlinuz-")
    for path in (kernel.parent, kernel.parent.parent / "lib" / "modules" / release):
        if (path / "kernel").is_dir():
            return path
    return None


def busybox(*, arch: str = DEFAULT_ARCH, mirror: str = "", progress: Progress = _quiet) -> Path:
    """Return a static busybox: the installed one, else Debian's package from the cache.

    Raises:
        UnreachableError: none is installed, and none can be downloaded.
    """
    installed = shutil.which("busybox")
    if installed is not None and is_static(Path(installed), arch=arch):
        return Path(installed)

    def fill(root: Path) -> Path:
        debian = _Debian(suite=_BUSYBOX_SUITE, arch=arch, mirror=mirror)
        _fetch_into(root, "busybox-static", debian, progress)
        return _only(root, "bin/busybox", "usr/bin/busybox")

    return filled(f"busybox-{arch}", fill, progress=progress)


def is_static(path: Path, *, arch: str) -> bool:
    """Return whether a file is an ELF program of this machine that needs no loader."""
    try:
        program = elf.parse(path.read_bytes())
    except FormatError:
        return False
    return program.machine == BOARDS[arch].elf and not program.needs_loader


def kernel_parts(find: Callable[[str], Package], name: str) -> list[Package]:
    """Return the parts of a kernel that a meta package leads to, or else the package itself.

    The meta package is left out: it has no files, and a mirror had all but it once.
    """
    found: dict[str, Package] = {}
    wanted = [name]
    while wanted and len(found) < _MAX_PACKAGES:
        package = find(wanted.pop())
        found[package.name] = package
        wanted += [d for d in package.depends if _KERNEL_PARTS.fullmatch(d) and d not in found]
    parts = list(found.values())
    return parts[1:] or parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Debian:
    suite: str
    arch: str
    mirror: str


def _fetch_into(root: Path, name: str, debian: _Debian, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".apt-", dir=root.parent) as scratch:
        progress(f"reading the package lists of Debian {debian.suite}")
        apt = open_apt(Path(scratch), suite=debian.suite, arch=debian.arch, mirror=debian.mirror)
        packages = kernel_parts(apt.package, name)
        size = sum(package.size for package in packages) / MIB
        progress(f"downloading {packages[-1].name} ({size:.0f} MB, only the first time)")
        debs = apt.download(packages)
        progress(f"unpacking {packages[-1].name}")
        for deb in debs:
            unpack(deb, root)


def _only(root: Path, *patterns: str) -> Path:
    found = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    if not found:
        raise UnreachableError(f"the packages hold no {patterns[0].rstrip('-*')}")
    return found[0]
