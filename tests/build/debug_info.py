"""The guests' kernel with its debug information, from Debian's package of that."""

from contextlib import closing
from pathlib import Path

from kprobes.image.debug_info import untold
from kprobes.transport.debian import debug_package, filled, kernel_image


def debug_module(arch: str = "amd64") -> Path:
    """Return the 6.1 kernel's module dummy with debug information, as ``debug_vmlinux``."""
    modules = debug_vmlinux(arch).parents[1] / "lib" / "modules" / release_of(arch)
    return modules / "kernel/drivers/net/dummy.ko"


def release_of(arch: str = "amd64") -> str:
    """Return the release of the guests' kernel."""
    return kernel_image(arch=arch).name.removeprefix("vmlinuz-")


def debug_vmlinux(arch: str = "amd64") -> Path:
    """Return the 6.1 kernel's vmlinux with debug information; 280 MB are downloaded once."""
    release = release_of(arch)

    def fill(root: Path) -> Path:
        with closing(debug_package(release, arch=arch, suite="bookworm")) as package:
            package.unpack(root / "files", ["dummy"])
        return root / "files/usr/lib/debug/boot" / f"vmlinux-{release}"

    return filled(f"debug-info-{release}", fill, progress=untold)
