"""Kernels as people build them for themselves, without what a distribution's have.

They are built from Debian's source package, and kept in the cache by configuration and source.
"""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from kprobes import directories

_SOURCE = Path("/usr/src/linux-source-6.1.tar.xz")
_PLAIN = """
64BIT SMP MODULES MODULE_UNLOAD KALLSYMS BUG PRINTK PRINTK_TIME
BLK_DEV_INITRD RD_GZIP BINFMT_ELF BINFMT_SCRIPT MULTIUSER SYSFS PROC_FS PROC_SYSCTL TMPFS DEVTMPFS
TTY UNIX98_PTYS SERIAL_8250 SERIAL_8250_CONSOLE ACPI PCI HPET_TIMER HIGH_RES_TIMERS NO_HZ_IDLE
FUTEX EPOLL SIGNALFD TIMERFD EVENTFD SHMEM AIO POSIX_TIMERS FILE_LOCKING SYSVIPC NET UNIX INET
RELOCATABLE RANDOMIZE_BASE RETPOLINE HYPERVISOR_GUEST PARAVIRT KVM_GUEST UNWINDER_ORC DEBUG_FS
"""
"""What a small guest needs; allnoconfig says no to all else."""
KERNELS = {
    "bare": "",
    "dwarf": "DEBUG_KERNEL DEBUG_INFO_DWARF_TOOLCHAIN_DEFAULT KPROBES FTRACE KPROBE_EVENTS",
    "preempt": "PREEMPT DEBUG_KERNEL KALLSYMS_ALL STACKPROTECTOR STACKPROTECTOR_STRONG",
    "static": "-MODULES DEBUG_KERNEL KALLSYMS_ALL",
    "nameless": "-KALLSYMS EXPERT",
}
"""What each has on top of that, or has not: none of them BTF, or sites of the function tracer."""
_BUILD_S = 3600


def build(name: str) -> Path:
    """Return the boot image of one of ``KERNELS``, in the tree that it was built in."""
    if not _SOURCE.exists():
        pytest.skip(f"no {_SOURCE}: `make matrix` installs it")
    words = f"{_PLAIN} {KERNELS[name]}".split()
    kept = [word for word in words if not word.startswith("-") and f"-{word}" not in words]
    config = "".join(f"CONFIG_{word}=y\n" for word in kept) + f'CONFIG_LOCALVERSION="-{name}"\n'
    age = str(_SOURCE.stat().st_mtime_ns)
    key = hashlib.sha256((config + age).encode()).hexdigest()[:16]
    tree = directories.cache() / "built" / f"{name}-{key}"
    image = tree / "arch" / "x86" / "boot" / "bzImage"
    if not image.exists():
        source = _unpacked(tree.parent / f"source-{age}")
        tree.mkdir(parents=True, exist_ok=True)
        (tree / "all.config").write_text(config)
        _make(source, f"O={tree}", f"KCONFIG_ALLCONFIG={tree / 'all.config'}", "allnoconfig")
        _make(tree, f"-j{os.cpu_count()}", "bzImage")
    return image


def _unpacked(source: Path) -> Path:
    if not source.exists():
        part = source.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        unpack = ["tar", "-x", "-f", _SOURCE, "-C", part, "--strip-components=1"]
        subprocess.run(unpack, check=True, timeout=_BUILD_S)
        part.rename(source)
    return source


def _make(directory: Path, *words: str) -> None:
    done = subprocess.run(
        ["make", "-C", directory, "ARCH=x86", *words],
        capture_output=True,
        text=True,
        timeout=_BUILD_S,
        check=False,
    )
    assert done.returncode == 0, f"make {' '.join(words)}\n{done.stderr[-2000:]}"
