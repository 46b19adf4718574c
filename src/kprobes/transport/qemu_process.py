"""QEMU as a process that cannot outlive us, and the private directories that end with it."""

import os
import select
import shutil
import subprocess
import tempfile
import weakref
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from kprobes.errors import UnreachableError
from kprobes.transport.qemu_command import Places
from kprobes.units import MIB

_SHARED_MEMORY = Path("/dev/shm")
_LAST_WORD_S = 10.0
# sun_path has 108 bytes, and the longest name in the directory is console.sock.
_LONGEST_DIRECTORY = 90
# Room that is left to others beside the guest's memory.
_SPARE = 16 * MIB


class QemuSupervisor:
    """QEMU under a small shell that ends it, and removes its directories, when we are gone.

    Nothing is left behind: not after ``close``, not when this object is forgotten, not when
    this process or QEMU is killed.
    """

    def __init__(self, command: list[str], places: Places) -> None:
        script = resources.files("kprobes.transport") / "guest" / "keeper.sh"
        directories = [str(places.directory), str(places.ram_directory)]
        process = subprocess.Popen(
            # Its own session: Ctrl-C in our terminal is for us to handle, not for QEMU.
            ["/bin/sh", "-c", script.read_text(), "kprobes-keeper", *directories, *command],
            # QEMU takes its firmware from the directory where it stands, if it is there.
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # With a buffer, the end of a QEMU that ends at once would be read along with its pid,
            # and nobody who waits for the descriptor would learn of it.
            bufsize=0,
            start_new_session=True,
        )
        assert process.stdout is not None
        self._end = weakref.finalize(self, _end, process, places, os.getpid())
        self._out: IO[bytes] = process.stdout
        self.pid = int(self._out.readline())
        """Of QEMU."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when QEMU ends."""
        return self._out.fileno()

    @property
    def is_alive(self) -> bool:
        """Whether QEMU runs."""
        return not self.is_closed and not select.select([self._out], [], [], 0)[0]

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._end.alive

    def close(self) -> None:
        """Kill QEMU and remove its directories; the second time nothing happens."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def make_places(memory_mib: int) -> Places:
    """Return new private directories, the RAM file's in shared memory where that has room.

    Raises:
        UnreachableError: no room, or not enough memory for such a guest.
    """
    size = memory_mib * MIB
    if (free := _available_memory()) < size:
        raise UnreachableError(
            f"a guest with {memory_mib} MiB does not fit: this machine has {free // MIB} MiB "
            "of memory available"
        )
    try:
        directory = Path(tempfile.mkdtemp(prefix="kprobes-", dir=_base()))
    except OSError as e:
        raise UnreachableError(f"cannot make a directory for a guest: {e}") from e
    if not _has_room(_SHARED_MEMORY, size):
        if _has_room(directory, size):
            return Places(directory=directory, ram_directory=directory)
        directory.rmdir()
        raise UnreachableError(
            f"no room for {memory_mib} MiB of guest memory in {_SHARED_MEMORY} "
            f"or {directory.parent}"
        )
    ram = Path(tempfile.mkdtemp(prefix="kprobes-", dir=_SHARED_MEMORY))
    return Places(directory=directory, ram_directory=ram)


def remove(places: Places) -> None:
    """Remove a guest's directories."""
    shutil.rmtree(places.directory, ignore_errors=True)
    shutil.rmtree(places.ram_directory, ignore_errors=True)


def own_stubs() -> list[Path]:
    """Return the stubs' sockets of this user's guests that are booted now."""
    places = (
        Places(directory=path.parent, ram_directory=path.parent)
        for path in sorted(_base().glob("kprobes-*/gdb.sock"))
    )
    # A tracer makes such a directory, too, for a stub that it asks a monitor for.
    return [each.stub for each in places if _is_own(each.directory) and each.qmp.exists()]


def _base() -> Path:
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    base = runtime if runtime.is_absolute() and _is_own(runtime) else Path(tempfile.gettempdir())
    return base if len(os.fsencode(base)) < _LONGEST_DIRECTORY - 20 else Path("/tmp")


def _is_own(directory: Path) -> bool:
    # Under sudo it may be another's, who could put something else in our place.
    try:
        owner = directory.stat().st_uid
    except OSError:
        return False
    return owner == os.geteuid() and os.access(directory, os.W_OK | os.X_OK)


def _has_room(directory: Path, size: int) -> bool:
    try:
        room = os.statvfs(directory)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize >= size + _SPARE and os.access(directory, os.W_OK)


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    words = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return (int(words["MemAvailable"]) + int(words.get("SwapFree", "0"))) * 1024


def _end(process: subprocess.Popen[bytes], places: Places, owner: int) -> None:
    # A fork of ours has a copy of this object, and may end long before the guest is to.
    if os.getpid() != owner:
        return
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_LAST_WORD_S)
    except subprocess.TimeoutExpired:
        # Only a QEMU that the kernel cannot end, in uninterruptible sleep, comes here.
        process.kill()
        process.wait()
    process.stdout.close()
    # For the case that the keeper itself was killed.
    remove(places)
