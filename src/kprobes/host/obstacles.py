"""Obstacles to probing this machine's kernel, each with what to do about it.

Whether this machine's own kernel can be probed, and what is in the way.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from kprobes.arch.registry import arch
from kprobes.errors import KprobesError, TargetError, TracefsError, UnreachableError
from kprobes.host.machine import open_machine
from kprobes.model.finding import Finding, Severity, ok
from kprobes.model.kernel import version_of
from kprobes.transport.tracefs import Tracefs, has_kernels_pids, open_tracefs

_STATUS = Path("/proc/self/status")
_LOCKDOWN = Path("/sys/kernel/security/lockdown")
_KALLSYMS = Path("/proc/kallsyms")
_FILE_SYSTEMS = Path("/proc/filesystems")
_SYS_ADMIN = 21
"""CAP_SYS_ADMIN, capabilities(7)."""
_CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")
_FIRST_PROCESS = Path("/proc/1/environ")
_USERS = Path("/proc/self/uid_map")
_HEAD = 1 << 12
_FIRST = (5, 5)
"""The first release that knows all that definitions are spelled in."""


class Obstacle(Struct, frozen=True, kw_only=True):
    """One thing in the way.

    Attributes:
        subject: a word or two.
        found: what is so.
        advice: what to do.
    """

    subject: str
    found: str
    advice: str


def obstacles() -> list[Obstacle]:
    """Return what is in the way, the first to be dealt with first."""
    found = [*_of_system()]
    if found:
        # The rest cannot be looked at before.
        return found
    locked = [*_of_lockdown()]
    try:
        # What lockdown forbids needs no second word.
        found = [] if locked else [*_of_tracefs(open_tracefs())]
    except TracefsError as error:
        found = [_closed(error)]
    return [*locked, *found, *_of_symbols()]


def check_possible() -> None:
    """Return if this machine's kernel can be probed.

    Raises:
        UnreachableError: it cannot; with the first obstacle, and what to do.
    """
    for each in obstacles():
        raise UnreachableError(f"this machine's kernel cannot be probed: {words_for(each)}")


def words_for(obstacle: Obstacle) -> str:
    """Return an obstacle in one line."""
    return f"{obstacle.found} ({obstacle.advice})"


def _of_system() -> Iterator[Obstacle]:
    if sys.platform != "linux":
        yield Obstacle(subject="system", found="this is not Linux", advice="probe a guest")
        return
    try:
        arch(os.uname().machine)
    except TargetError:
        found = f"we do not know the architecture {os.uname().machine}"
        yield Obstacle(subject="system", found=found, advice="probe a guest")
    major, minor = version_of(os.uname().release)
    if (major, minor) < _FIRST:
        found = f"Linux {major}.{minor} is too old: {_FIRST[0]}.{_FIRST[1]} is the first"
        yield Obstacle(subject="release", found=found, advice="probe a guest")
    if os.geteuid() != 0:
        yield Obstacle(subject="root", found="you are not root", advice="use sudo")
    elif not _is_true_root():
        yield Obstacle(
            subject="rights",
            found=f"root {_here()} is root of a user namespace only",
            advice="use the machine's own root: outside, or in a container that is not rootless",
        )
    elif not _may_administer():
        yield Obstacle(
            subject="rights",
            found=f"root {_here()} has no CAP_SYS_ADMIN",
            advice="start it on the machine itself, or the container with --privileged",
        )


def _of_lockdown() -> Iterator[Obstacle]:
    # "none [integrity] confidentiality": security/lockdown/lockdown.c
    try:
        chosen = _LOCKDOWN.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return
    if chosen == "confidentiality":
        yield Obstacle(
            subject="lockdown",
            found="the kernel is locked down (confidentiality): no tracing, no kprobes",
            advice="boot without lockdown=confidentiality; with Secure Boot some systems set it",
        )


def _of_tracefs(tracefs: Tracefs) -> Iterator[Obstacle]:
    if not tracefs.has("kprobe_events"):
        yield Obstacle(
            subject="kprobes",
            found=f"the kernel {os.uname().release} has no probe events",
            advice="it was built without CONFIG_KPROBE_EVENTS: boot another, or probe a guest",
        )
        return
    try:
        tracefs.read("kprobe_events")
        os.close(os.open(tracefs.path("kprobe_events"), os.O_WRONLY | os.O_APPEND))
    except TracefsError as error:
        yield _closed(error)
    except OSError as error:
        yield _closed(TracefsError("kprobe_events", error.errno or 0, verb="open"))
    if not tracefs.has("instances"):
        found = "its tracing system has no instances"
        yield Obstacle(subject="tracefs", found=found, advice="boot another kernel")


def _closed(error: TracefsError) -> Obstacle:
    if error.number == errno.ENODEV or "tracefs" not in _FILE_SYSTEMS.read_text():
        found = f"the kernel {os.uname().release} has no tracefs"
        advice = "it was built without CONFIG_TRACING: boot another, or probe a guest"
        return Obstacle(subject="tracefs", found=found, advice=advice)
    advice = (
        f"somebody keeps root {_here()} from it: a container's rules, SELinux, a read-only mount"
    )
    return Obstacle(subject="tracefs", found=str(error), advice=advice)


def _of_symbols() -> Iterator[Obstacle]:
    try:
        with _KALLSYMS.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        head = b""
    if not head:
        found = "the kernel shows no symbols (/proc/kallsyms)"
        yield Obstacle(subject="symbols", found=found, advice="CONFIG_KALLSYMS is needed")
    elif not _has_addresses(head):
        yield Obstacle(
            subject="symbols",
            found="/proc/kallsyms hides the kernel's addresses",
            advice="sysctl -w kernel.kptr_restrict=1",
        )


def _has_addresses(head: bytes) -> bool:
    return any(line.split(b" ")[0].strip(b"0") for line in head.splitlines())


def _may_administer() -> bool:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _SYS_ADMIN & 1)
    return False


def _is_true_root() -> bool:
    # user_namespaces(7): only the first namespace has every user as it is.
    try:
        return _USERS.read_text().split() == ["0", "0", str((1 << 32) - 1)]
    except OSError:
        # A kernel without user namespaces.
        return True


def _here() -> str:
    return "in this container" if _is_container() else "here"


def _is_container() -> bool:
    if any(Path(each).exists() for each in _CONTAINERS):
        return True
    # https://systemd.io/CONTAINER_INTERFACE
    with suppress(OSError):
        said = _FIRST_PROCESS.read_bytes().split(b"\0")
        if any(word.startswith(b"container=") for word in said):
            return True
    # Kubernetes' say nothing, but their processes are in a namespace of their own.
    return not has_kernels_pids()


def check_host(*, is_wanted: bool) -> Iterator[Finding]:
    """Look at everything in turn.

    Args:
        is_wanted: whether nothing else will do; else an obstacle is a note: guests are there.
    """
    found = obstacles()
    for each in found:
        yield Finding(
            subject=f"host: {each.subject}",
            verdict=Severity.MISSING if is_wanted else Severity.NOTE,
            found=each.found,
            advice=each.advice if is_wanted else f"{each.advice} (guests can be probed without)",
        )
    if found:
        return
    yield ok("host", f"this machine's Linux {os.uname().release} can be probed")
    if is_wanted:
        yield from _details()


def _details() -> Iterator[Finding]:
    try:
        machine = open_machine()
    except KprobesError as error:
        yield Finding(subject="host: kernel", verdict=Severity.MISSING, found=str(error))
        return
    kernel = machine.kernel
    yield ok("host: symbols", f"{len(kernel.symbols):,} in /proc/kallsyms")
    if kernel.types is None:
        yield Finding(
            subject="host: types",
            verdict=Severity.NOTE,
            found="the kernel carries none (CONFIG_DEBUG_INFO_BTF)",
            advice="no parameters by name, no -> and no casts: registers and $argN remain",
        )
    else:
        yield ok("host: types", "names of parameters, -> and casts are understood")
    number = len(machine.traceable)
    yield ok("host: functions", f"{number:,} can be probed" if number else "any may be probed")
