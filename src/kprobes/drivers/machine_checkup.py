"""What this machine has of all that booting guests and compiling probes needs."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kprobes import directories
from kprobes.drivers.finding import Finding, Verdict, ok
from kprobes.drivers.journal import directory
from kprobes.errors import KprobesError, StateError
from kprobes.transport.accel import Accel, choose
from kprobes.transport.boards import BOARDS, DEFAULT_ARCH, Board
from kprobes.transport.image_cache import images
from kprobes.transport.packages import is_static
from kprobes.units import MIB

_SHARED_MEMORY = Path("/dev/shm")
_GUEST_SIZE = 512 * MIB
_APT = ("apt-get", "apt-cache", "dpkg-deb")
_TIMEOUT_S = 10
_CODE_IS_LOCKED = (8, 1)
"""Since then QEMU keeps others from writing what it is about to translate: docs/design.md."""


def check_machine() -> Iterator[Finding]:
    """Look at everything in turn."""
    for arch, board in BOARDS.items():
        yield _qemu(arch, board)
    yield _accelerator()
    yield _packages()
    yield _kernel()
    yield _busybox()
    yield _writable("cache", images())
    yield _writable("journal", directory())
    yield _shared_memory()
    yield _compiler()


def _qemu(arch: str, board: Board) -> Finding:
    is_default = arch == DEFAULT_ARCH
    subject = "QEMU" if is_default else f"QEMU {arch}"
    path = shutil.which(board.program)
    if path is None:
        absent = f"no {board.program}"
        advice = f"apt-get install {board.package} (not needed to attach to guests)"
        if is_default:
            return _missing(subject, absent, advice)
        return _note(subject, absent, f"to boot {arch} guests: {advice}")
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return _missing(subject, f"{path} does not run: {error}", f"reinstall {board.package}")
    return _version(subject, path, done.stdout)


def _version(subject: str, path: str, said: str) -> Finding:
    version = re.search(r"version ((\d+)\.(\d+)\S*)", said)
    if version is None:
        return ok(subject, f"of an unknown version, {path}")
    if (int(version[2]), int(version[3])) < _CODE_IS_LOCKED:
        advice = (
            "emulated guests that patch their own text (their own ftrace or kprobes) may crash by "
            "this QEMU's fault: 8.1 and later are right (Debian 12 has one in its backports)"
        )
        return _note(subject, f"{version[1]}, {path}", advice)
    return ok(subject, f"{version[1]}, {path}")


def _accelerator() -> Finding:
    of_this_kind = [board for board in BOARDS.values() if board.native == os.uname().machine]
    if any(choose("auto", each.native, signs=each.kvm) is Accel.KVM for each in of_this_kind):
        return ok("KVM", "usable: guests of this machine's kind run at full speed")
    reason = (
        "/dev/kvm opens, but is not Intel's or AMD's (kvm_intel, kvm_amd)"
        if os.access("/dev/kvm", os.R_OK | os.W_OK)
        else "/dev/kvm may not be opened: are you in the group kvm?"
        if Path("/dev/kvm").exists()
        else "there is no /dev/kvm"
    )
    return _note("KVM", reason, "guests are translated (TCG): 5 to 20 times slower, else the same")


def _packages() -> Finding:
    absent = [program for program in _APT if shutil.which(program) is None]
    if absent:
        advice = "boot a kernel of your own with --kernel"
        return _note("apt", f"no {', '.join(absent)}", advice)
    return ok("apt", "kernels come from Debian's packages, by name")


def _kernel() -> Finding:
    cached = sorted(path.name for path in images().glob("linux-*") if path.is_dir())
    if cached:
        return ok("kernel", f"in the cache: {', '.join(cached)}")
    return _note("kernel", "none in the cache", "the first boot downloads one (27 MB)")


def _busybox() -> Finding:
    path = shutil.which("busybox")
    if path is not None and is_static(Path(path), arch=DEFAULT_ARCH):
        return ok("busybox", f"{path}, static")
    found = "none installed" if path is None else f"{path} is not static"
    return _note("busybox", found, "Debian's is downloaded; or apt-get install busybox-static")


def _writable(subject: str, path: Path) -> Finding:
    try:
        directories.check(path, top=path.parent)
    except StateError as error:
        return _missing(subject, str(error), "nothing is traced before that")
    # What does not exist yet is made in the nearest directory that does.
    base = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(base, os.W_OK | os.X_OK):
        return _missing(subject, f"{base} cannot be written", "check who owns it")
    room = shutil.disk_usage(base).free // MIB
    if room < _GUEST_SIZE // MIB:
        return _note(subject, f"{path}: {room} MiB free", "a kernel takes 200 MiB unpacked")
    return ok(subject, f"{path}, {room} MiB free")


def _shared_memory() -> Finding:
    try:
        room = shutil.disk_usage(_SHARED_MEMORY).free
    except OSError as error:
        room, why = 0, f"{_SHARED_MEMORY}: {error.strerror}"
    else:
        why = f"{_SHARED_MEMORY}, {room // MIB} MiB free"
    if room < _GUEST_SIZE:
        return _note("memory", why, "a guest of 512 MiB is kept in a file on disk instead")
    return ok("memory", why)


def _compiler() -> Finding:
    try:
        from kprobes.codegen.compile import load_compiler

        load_compiler()
    except (ImportError, OSError, KprobesError) as error:
        return _missing("LLVM", f"llvmlite does not load: {error}", "pip install llvmlite")
    return ok("LLVM", "llvmlite loads")


def _note(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject=subject, verdict=Verdict.NOTE, found=found, advice=advice)


def _missing(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject=subject, verdict=Verdict.MISSING, found=found, advice=advice)
