"""A module of Debian's own that guests load and unload."""

import lzma

from kprobes.transport.debian import kernel_image, modules_of

LOAD, UNLOAD = "insmod /dummy.ko || exit 1", "rmmod dummy || exit 1"


def dummy(suite: str, arch: str) -> bytes:
    """Return the module of a suite, for ``/dummy.ko``: its init sets up one network device."""
    modules = modules_of(kernel_image(suite=suite, arch=arch))
    assert modules is not None
    (path,) = modules.rglob("dummy.ko*")
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data
