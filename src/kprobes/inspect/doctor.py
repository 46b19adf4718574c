"""Check-ups: of a guest, for tracing it, and of this machine, for guests and compiled probes."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from kprobes import directories
from kprobes.errors import KprobesError, StateError
from kprobes.guest.clock import current_clock, open_clock
from kprobes.guest.guest import Guest
from kprobes.guest.journal import directory
from kprobes.guest.kernel_abi import per_cpu_bases, readers, task_abi
from kprobes.guest.obstacles import allocators
from kprobes.guest.open import attached
from kprobes.guest.stacks import check_types
from kprobes.model.finding import Finding, Severity, ok
from kprobes.plan.ftrace import has_tracer, read_sites
from kprobes.transport.connect import parse_target
from kprobes.transport.debian import images, is_static
from kprobes.transport.qemu_command import DEFAULT_ARCH, MACHINE_TYPES, Accel, MachineType, choose
from kprobes.units import MIB

_WITH_BTF = (
    "a kernel with CONFIG_DEBUG_INFO_BTF, or `kprobe trace --vmlinux FILE`: its vmlinux with BTF "
    "or debug info in it"
)
_WITH_SITES = "a kernel with CONFIG_DYNAMIC_FTRACE"
_WITH_DATA = "a kernel with CONFIG_KALLSYMS_ALL"


def check_target(target: str) -> list[Finding]:
    """Connect to a guest and look at everything.

    Raises:
        UsageError: no target in the text.
    """
    parse_target(target)
    try:
        with attached(target) as guest:
            reached = Finding(subject="target", verdict=Severity.OK, found=target)
            return [reached, *check_guest(guest)]
    except KprobesError as error:
        return [Finding(subject="target", verdict=Severity.MISSING, found=str(error))]


def check_guest(guest: Guest) -> Iterator[Finding]:
    """Look at everything in turn; what is wrong is a finding, not an error."""
    checks: dict[str, tuple[Callable[[Guest], str], str]] = {
        "kernel": (_kernel, ""),
        "memory": (_memory, ""),
        "symbols": (_symbols, ""),
        "state": (_state, ""),
        "types": (_types, _WITH_BTF),
        "tasks": (_tasks, _WITH_DATA if guest.kernel.types else _WITH_BTF),
        "sites": (_sites, _WITH_DATA if has_tracer(guest.kernel) else _WITH_SITES),
        "CPUs": (_cpus, _WITH_DATA),
        "clock": (_clock, _WITH_DATA),
        "allocators": (_allocators, ""),
        "readers": (_readers, ""),
    }
    for subject, (read, advice) in checks.items():
        yield _finding(subject, read, guest, advice)


def _finding(subject: str, read: Callable[[Guest], str], guest: Guest, advice: str) -> Finding:
    try:
        return Finding(subject=subject, verdict=Severity.OK, found=read(guest))
    except KprobesError as error:
        return Finding(subject=subject, verdict=Severity.MISSING, found=str(error), advice=advice)


def _kernel(guest: Guest) -> str:
    kernel = guest.kernel
    build = f", build id {kernel.build_id.hex()}" if kernel.build_id else ", no build id"
    return f"{kernel.release} ({kernel.arch}), KASLR slide {kernel.slide:#x}{build}"


def _memory(guest: Guest) -> str:
    ram = guest.memory.ram
    size = sum(size for _, size in ram.runs) >> 20
    start, _ = ram.runs[0]
    if ram.view(start, 1) is not None:
        how = "mapped: no copies"
    elif guest.host is not None:
        how = f"read from QEMU's own memory (/proc/{guest.host.pid}/mem)"
    else:
        how = "read through the stub only (slow)"
    return f"{size} MiB, {how}"


def _symbols(guest: Guest) -> str:
    return f"{len(guest.kernel.symbols):,}"


def _types(guest: Guest) -> str:
    check_types(guest.kernel)
    if guest.kernel.types is None:
        return "none: registers and `$argN` by number, no names; tasks were found by their looks"
    return "BTF"


def _tasks(guest: Guest) -> str:
    task_abi(guest.kernel)
    return "the running one is found"


def _state(guest: Guest) -> str:
    return "paused by somebody else" if guest.stub.stands() else "running"


def _sites(guest: Guest) -> str:
    return f"{len(read_sites(guest.memory, guest.kernel).addrs):,} functions with an ftrace site"


def _cpus(guest: Guest) -> str:
    return str(len(per_cpu_bases(guest.memory, guest.kernel)))


def _clock(guest: Guest) -> str:
    memory, kernel = guest.memory, guest.kernel
    clock = open_clock(memory, kernel, per_cpu_bases(memory, kernel))
    return f"{current_clock(memory, kernel)}: {clock.words}"


def _allocators(guest: Guest) -> str:
    symbols = (guest.kernel.symbols.at(addr) for addr in allocators(guest))
    return ", ".join(symbol.name for symbol in symbols if symbol)


def _readers(guest: Guest) -> str:
    readers(guest.kernel)
    return "fault-safe readers of kernel and user memory"


_SHARED_MEMORY = Path("/dev/shm")
_GUEST_SIZE = 512 * MIB
_APT = ("apt-get", "apt-cache", "dpkg-deb")
_TIMEOUT_S = 10
_CODE_IS_LOCKED = (8, 1)
"""Since then QEMU keeps others from writing what it is about to translate: docs/kernel-facts.md."""


def check_machine() -> Iterator[Finding]:
    """Look at everything in turn."""
    for arch, machine_type in MACHINE_TYPES.items():
        yield _qemu(arch, machine_type)
    yield _accelerator()
    yield _packages()
    yield _own_kernel()
    yield _busybox()
    yield _writable("cache", images())
    yield _writable("journal", directory())
    yield _shared_memory()
    yield _compiler()


def _qemu(arch: str, machine_type: MachineType) -> Finding:
    is_default = arch == DEFAULT_ARCH
    subject = "QEMU" if is_default else f"QEMU {arch}"
    path = shutil.which(machine_type.program)
    if path is None:
        absent = f"no {machine_type.program}"
        advice = f"apt-get install {machine_type.package} (not needed to attach to guests)"
        if is_default:
            return _missing(subject, absent, advice)
        return _note(subject, absent, f"to boot {arch} guests: {advice}")
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return _missing(
            subject, f"{path} does not run: {error}", f"reinstall {machine_type.package}"
        )
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
    of_this_kind = [
        machine_type
        for machine_type in MACHINE_TYPES.values()
        if machine_type.native == os.uname().machine
    ]
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


def _own_kernel() -> Finding:
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
    return Finding(subject=subject, verdict=Severity.NOTE, found=found, advice=advice)


def _missing(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject=subject, verdict=Severity.MISSING, found=found, advice=advice)
