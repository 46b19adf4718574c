"""The guests' kernel with its debug information, from Debian's package of that."""

import subprocess
from pathlib import Path

from kprobes.image.debug_info import untold
from kprobes.transport.debian import filled, kernel_image, open_apt

_DEBUG = "./usr/lib/debug"


def debug_module(arch: str = "amd64") -> Path:
    """Return the 6.1 kernel's module dummy with debug information, as ``debug_vmlinux``."""
    modules = debug_vmlinux(arch).parents[1] / "lib" / "modules" / _release(arch)
    return modules / "kernel/drivers/net/dummy.ko"


def _release(arch: str) -> str:
    return kernel_image(arch=arch).name.removeprefix("vmlinuz-")


def debug_vmlinux(arch: str = "amd64") -> Path:
    """Return the 6.1 kernel's vmlinux with debug information; 280 MB are downloaded once."""
    release = _release(arch)
    wanted = [
        f"{_DEBUG}/boot/vmlinux-{release}",
        f"{_DEBUG}/lib/modules/{release}/kernel/drivers/net/dummy.ko",
    ]

    def fill(root: Path) -> Path:
        apt = open_apt(root.parent / f".apt-{release}", suite="bookworm", arch=arch)
        (deb,) = apt.download([apt.package(f"linux-image-{release}-dbg")])
        # Of 5.6 GB; reading ends with the last that is wanted.
        unpacking = ["tar", "--extract", "--occurrence=1", "--directory", str(root), *wanted]
        packed = ["dpkg-deb", "--fsys-tarfile", str(deb)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(packed, stdout=pipe, stderr=nothing) as reading:
            subprocess.run(unpacking, stdin=reading.stdout, check=True)
        return root / wanted[0]

    return filled(f"debug-info-{release}", fill, progress=untold)
