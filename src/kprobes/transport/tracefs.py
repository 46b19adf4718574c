"""Files of this machine's tracing system, Documentation/trace/ftrace.rst, and its tasks' names.

Where tracefs is mounted it is used there. Where it is not, it is mounted for this process alone,
at no place at all (fsmount(2), Linux 5.2): nothing of it is left, however the process ends.
Names of tasks are from /proc, and from what the tracer has noted.
"""

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kprobes.errors import TracefsError
from kprobes.model.resolved import COMM_SIZE

_MOUNTS = Path("/proc/self/mountinfo")
_NAME = "tracefs"
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
"""System calls; these numbers are the same on every architecture."""
_CLOEXEC = 1
_CREATE = 6
"""FSCONFIG_CMD_CREATE."""


class Tracefs:
    """Tracing files by their names below the root, such as ``instances/mine/tracing_on``.

    Every method raises TracefsError when the kernel refuses.

    Attributes:
        root: where they are.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str) -> str:
        """Return a file's whole text."""
        try:
            return self.path(name).read_text(errors="surrogateescape")
        except OSError as e:
            raise _error(name, e, "read") from e

    def write(self, name: str, text: str) -> None:
        """Write a text in one go, after what is there: nothing is truncated."""
        try:
            handle = os.open(self.path(name), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(handle, text.encode(errors="surrogateescape"))
            finally:
                os.close(handle)
        except OSError as e:
            raise _error(name, e, "write") from e

    def has(self, name: str) -> bool:
        """Whether there is such a file or directory.

        Raises:
            TracefsError: nobody may tell us.
        """
        try:
            return self.path(name).exists()
        except OSError as e:
            raise _error(name, e, "look for") from e

    def names(self, directory: str) -> list[str]:
        """Return what is in a directory, sorted."""
        try:
            return sorted(path.name for path in self.path(directory).iterdir())
        except OSError as e:
            raise _error(directory, e, "list") from e

    def make(self, directory: str) -> None:
        """Make a directory."""
        try:
            self.path(directory).mkdir()
        except OSError as e:
            raise _error(directory, e, "make") from e

    def remove(self, directory: str) -> None:
        """Remove a directory; its files go with it."""
        try:
            self.path(directory).rmdir()
        except OSError as e:
            raise _error(directory, e, "remove") from e

    def path(self, name: str) -> Path:
        """Return where a file is."""
        return self.root / name


def open_tracefs() -> Tracefs:
    """Return this machine's tracefs, mounting it for this process where nobody has.

    Raises:
        TracefsError: the kernel has none, or we may not.
    """
    for place in mounted(_MOUNTS.read_text()):
        return Tracefs(place)
    return Tracefs(Path(f"/proc/self/fd/{_mount()}"))


def mounted(mountinfo: str) -> Iterator[Path]:
    """Yield where tracefs is mounted, from the text of /proc/PID/mountinfo (proc(5))."""
    for line in mountinfo.splitlines():
        fields, _, source = line.partition(" - ")
        words = fields.split()
        if source.split(" ")[0] == _NAME and len(words) > 4 and words[3] == "/":
            yield Path(words[4].encode().decode("unicode_escape"))


def _mount() -> int:
    # The file descriptor of the mount lives as long as the process.
    handle = _call(_FSOPEN, ctypes.c_char_p(_NAME.encode()), _CLOEXEC)
    try:
        _call(_FSCONFIG, handle, _CREATE, None, None, 0)
        return _call(_FSMOUNT, handle, _CLOEXEC, 0)
    finally:
        os.close(handle)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise TracefsError("the root", ctypes.get_errno(), verb="mount")
    return int(result)


def _error(name: str, error: OSError, verb: str) -> TracefsError:
    return TracefsError(name, error.errno or 0, verb=verb)


_PROCESSES = Path("/proc/self/ns/pid")
_ALL_PROCESSES = "pid:[4026531836]"
"""PROC_PID_INIT_INO, include/linux/proc_ns.h: the namespace that the machine began with."""


def has_kernels_pids() -> bool:
    """Whether processes have the numbers here that the kernel has, and its events."""
    try:
        return str(_PROCESSES.readlink()) == _ALL_PROCESSES
    except OSError:
        # A kernel without such namespaces.
        return True


PROC = Path("/proc")
_WORKER = re.compile(rb"kworker/(?!R-)[^-+]*")


def running_comms(proc: Path = PROC) -> dict[int, bytes]:
    """Return the names of all tasks that run now, threads too, by pid."""
    found: dict[int, bytes] = {}
    for comm in proc.glob("[0-9]*/task/[0-9]*/comm"):
        # Tasks end while we look.
        with suppress(OSError):
            found[int(comm.parent.name)] = _own_name(comm.read_bytes().removesuffix(b"\n"))
    return found


def saved_comms(tracing: Path) -> Mapping[int, bytes]:
    """Return what ``saved_cmdlines`` of a tracefs has, by pid; nothing when it has no such."""
    try:
        lines = (tracing / "saved_cmdlines").read_bytes().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(b" ") for line in lines)
    return {int(pid): comm for pid, _, comm in pairs if pid.isdigit()}


def _own_name(name: bytes) -> bytes:
    # proc_task_name(): the whole name of a kernel's thread, and what a worker works on behind
    # its own; rescuers are called R-NAME.
    worker = _WORKER.match(name)
    return (name if worker is None else worker[0])[: COMM_SIZE - 1]
