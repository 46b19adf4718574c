"""Kernels as people build them for themselves, without what a distribution's have.

They are built from Debian's source package, and kept in the cache by configuration and source.
"""

import hashlib
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from kprobes import directories

_SOURCE = Path("/usr/src/linux-source-6.1.tar.xz")
_PLAIN = """
SMP MODULES MODULE_UNLOAD KALLSYMS BUG PRINTK PRINTK_TIME
BLK_DEV_INITRD RD_GZIP BINFMT_ELF BINFMT_SCRIPT MULTIUSER SYSFS PROC_FS PROC_SYSCTL TMPFS DEVTMPFS
TTY UNIX98_PTYS SERIAL_8250 PCI HIGH_RES_TIMERS NO_HZ_IDLE
FUTEX EPOLL SIGNALFD TIMERFD EVENTFD SHMEM AIO POSIX_TIMERS FILE_LOCKING SYSVIPC NET UNIX INET
RELOCATABLE RANDOMIZE_BASE DEBUG_FS
"""
"""What a small guest needs; allnoconfig says no to all else."""


class Architecture(NamedTuple):
    """An architecture: the kernel's name of it, its boot image, and what a guest of it needs."""

    name: str
    image: str
    words: str


_ARCHITECTURES = {
    "amd64": Architecture(
        name="x86",
        image="bzImage",
        words="64BIT SERIAL_8250_CONSOLE ACPI HPET_TIMER HYPERVISOR_GUEST PARAVIRT KVM_GUEST "
        "CPU_MITIGATIONS RETPOLINE UNWINDER_ORC",
    ),
    "arm64": Architecture(
        name="arm64",
        image="Image",
        words="SERIAL_AMBA_PL011 SERIAL_AMBA_PL011_CONSOLE SERIAL_8250_PCI PCI_HOST_GENERIC",
    ),
}


class OwnKernel(NamedTuple):
    """A kernel: what it has on top of that, or with a ``-`` has not, and who compiles it."""

    words: str
    arch: str = "amd64"
    has_clang: bool = False


_CHECKED = "DEBUG_KERNEL LTO_CLANG_THIN CFI_CLANG STACKPROTECTOR STACKPROTECTOR_STRONG"
_DWARF = "DEBUG_KERNEL DEBUG_INFO_DWARF_TOOLCHAIN_DEFAULT"
KERNELS = {
    "bare": OwnKernel(""),
    "dwarf": OwnKernel(f"{_DWARF} KPROBES FTRACE KPROBE_EVENTS"),
    "preempt": OwnKernel("PREEMPT DEBUG_KERNEL KALLSYMS_ALL STACKPROTECTOR STACKPROTECTOR_STRONG"),
    "static": OwnKernel("-MODULES -MODULE_UNLOAD DEBUG_KERNEL KALLSYMS_ALL"),
    "nameless": OwnKernel("-KALLSYMS EXPERT"),
    "checked": OwnKernel(f"{_CHECKED} X86_KERNEL_IBT", has_clang=True),
    "shuffled": OwnKernel(f"RANDSTRUCT_FULL INIT_STACK_ALL_ZERO {_DWARF}", has_clang=True),
    "kasan": OwnKernel(
        "DEBUG_KERNEL KASAN KASAN_GENERIC KASAN_INLINE KASAN_VMALLOC VMAP_STACK PROVE_LOCKING "
        "DEBUG_PREEMPT PREEMPT DEBUG_ATOMIC_SLEEP STACKTRACE"
    ),
    "arm64-bare": OwnKernel("", arch="arm64", has_clang=True),
    "arm64-checked": OwnKernel(
        f"{_CHECKED} SHADOW_CALL_STACK ARM64_PTR_AUTH ARM64_PTR_AUTH_KERNEL ARM64_BTI "
        "ARM64_BTI_KERNEL",
        arch="arm64",
        has_clang=True,
    ),
}
"""None of them has BTF, or sites of the function tracer."""
_CLANG = "-19"
_BUILD_S = 3600


def build(name: str) -> Path:
    """Return the boot image of one of ``KERNELS``, in the tree that it was built in."""
    if not _SOURCE.exists():
        pytest.skip(f"no {_SOURCE}: `make matrix` installs it")
    kernel = KERNELS[name]
    architecture = _ARCHITECTURES[kernel.arch]
    words = f"{_PLAIN} {architecture.words} {kernel.words}".split()
    kept = [word for word in words if not word.startswith("-") and f"-{word}" not in words]
    config = "".join(f"CONFIG_{word}=y\n" for word in kept) + f'CONFIG_LOCALVERSION="-{name}"\n'
    age = str(_SOURCE.stat().st_mtime_ns)
    key = hashlib.sha256((config + age).encode()).hexdigest()[:16]
    tree = directories.cache() / "built" / f"{name}-{key}"
    image = tree / "arch" / architecture.name / "boot" / architecture.image
    if not image.exists():
        source = _unpacked(tree.parent / f"source-{age}")
        tree.mkdir(parents=True, exist_ok=True)
        (tree / "all.config").write_text(config)
        how = [f"ARCH={architecture.name}", *([f"LLVM={_CLANG}"] if kernel.has_clang else [])]
        _make(source, *how, f"O={tree}", f"KCONFIG_ALLCONFIG={tree / 'all.config'}", "allnoconfig")
        _check(tree / ".config", kept)
        _make(tree, *how, f"-j{os.cpu_count()}", architecture.image)
    return image


def _check(configured: Path, wanted: list[str]) -> None:
    # A word that depends on another is left out in silence.
    lines = set(configured.read_text().splitlines())
    missing = [word for word in wanted if f"CONFIG_{word}=y" not in lines]
    assert not missing, f"{configured} has no {', '.join(missing)}"


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
        ["make", "-C", directory, *words],
        capture_output=True,
        text=True,
        timeout=_BUILD_S,
        check=False,
    )
    assert done.returncode == 0, f"make {' '.join(words)}\n{done.stderr[-2000:]}"
