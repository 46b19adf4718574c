"""The files with the debug information of a kernel and its modules; Debian's, fetched."""

import shutil
from collections.abc import Callable
from contextlib import closing

from msgspec import Struct

from kprobes.errors import TargetError
from kprobes.image.debug_info import debug_root, untold
from kprobes.image.symbols import loaded_modules
from kprobes.inspect.source import SourceKernel
from kprobes.model.kernel import Kernel
from kprobes.transport.debian import debug_package
from kprobes.transport.qemu_command import MACHINE_TYPES
from kprobes.units import MIB

_KEPT = 2
"""Releases whose packages stay unpacked: the last ones."""


class DebugFile(Struct, frozen=True, kw_only=True):
    """What has the debug information of one of them.

    Attributes:
        module: or "" for the kernel itself.
        file: or "" where there is none.
    """

    module: str
    file: str


def debug_files(asked: SourceKernel) -> list[DebugFile]:
    """Return which file has that of a kernel, and of each module that it has loaded.

    Raises:
        UsageError: libdw is not there.
    """
    names = ("", *(module.name for module in loaded_modules(asked.kernel)))
    return [DebugFile(module=name, file=_file(asked, name)) for name in names]


def _file(asked: SourceKernel, module: str) -> str:
    try:
        return asked.open_source(asked.kernel, module).file
    except TargetError:
        return ""


def fetch_debug_files(
    kernel: Kernel, tell: Callable[[str], None] | None, *, suite: str = "", mirror: str = ""
) -> None:
    """Download Debian's package for a kernel; keep its file, and those of loaded modules.

    Args:
        kernel: one of Debian's.
        tell: is given words for people, such as how much is downloaded, or None.
        suite: of Debian; "" for all of some.
        mirror: of its archive; "" for this machine's own.

    Raises:
        UnreachableError: no apt, no network, no such package; StateError: it cannot be kept.
    """
    tell = tell or untold
    arch = next(name for name, each in MACHINE_TYPES.items() if each.native == kernel.arch)
    package = debug_package(kernel.release, arch=arch, suite=suite, mirror=mirror, progress=tell)
    with closing(package):
        size, name = package.package.size // MIB, package.package.name
        tell(f"downloading {name} of Debian {package.suite}: {size} MB")
        names = (each.name for each in loaded_modules(kernel))
        package.unpack(debug_root(kernel.release), names)
    kept = debug_root(kernel.release).parent.glob("[!.]*")
    for old in sorted(kept, key=lambda each: each.stat().st_mtime)[:-_KEPT]:
        tell(f"forgetting {old.name}")
        shutil.rmtree(old, ignore_errors=True)
