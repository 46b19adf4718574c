"""The guests' kernel with its debug information, from Debian's package of that."""

import subprocess
from pathlib import Path

from kprobes.image.debug_info import untold
from kprobes.transport.debian import filled, kernel_image, open_apt


def debug_vmlinux(arch: str = "amd64") -> Path:
    """Return the 6.1 kernel's vmlinux with debug information; 280 MB are downloaded once."""
    release = kernel_image(arch=arch).name.removeprefix("vmlinuz-")
    wanted = f"./usr/lib/debug/boot/vmlinux-{release}"

    def fill(root: Path) -> Path:
        apt = open_apt(root.parent / f".apt-{release}", suite="bookworm", arch=arch)
        (deb,) = apt.download([apt.package(f"linux-image-{release}-dbg")])
        # A tenth of its 5.6 GB.
        unpacking = ["tar", "--extract", "--directory", str(root), wanted]
        packed = ["dpkg-deb", "--fsys-tarfile", str(deb)]
        with subprocess.Popen(packed, stdout=subprocess.PIPE) as reading:
            subprocess.run(unpacking, stdin=reading.stdout, check=True)
        return root / wanted

    return filled(f"debug-{release}", fill, progress=untold)
