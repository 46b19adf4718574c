"""Guests of tests: each kind is booted once in a run, and others of it go on from there.

A boot takes 3.5 s of CPU under TCG, and there are 600 in a run; going on takes 0.4 s.
"""

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import asdict

from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import GIB

BootMachine = Callable[..., Machine]
"""``Machine.boot``, or what stands for it."""
_SPARE = 8 * GIB
"""What the saved guests of a run, 0.1 GiB each, leave of a disk."""


class SavedGuests:
    """Guests that were booted in a run of tests, in a directory that its processes share."""

    def __init__(self, directory: Path, boot: BootMachine) -> None:
        self._directory = directory
        self._boot = boot

    def boot(
        self, options: MachineOptions | None = None, *, is_early: bool = False, **more: object
    ) -> Machine:
        """Do as ``Machine.boot``, but go on with such a guest where one has been booted."""
        options = MachineOptions() if options is None else options
        if is_early or not (name := _name_of(options)):
            return self._boot(options, is_early=is_early, **more)
        place = self._directory / name
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                return self._first(options, place, **more)
        again = MachineOptions(saved=place, boot_timeout_s=options.boot_timeout_s)
        return self._boot(again, **more)

    def _first(self, options: MachineOptions, place: Path, **more: object) -> Machine:
        machine = self._boot(options, **more)
        if shutil.disk_usage(self._directory).free > _SPARE:
            try:
                machine.save(place)
            except BaseException:
                machine.close()
                raise
        return machine


@contextmanager
def shared_directory(directory: Path) -> Generator[Path]:
    """Give a directory that several processes use; the last of them removes it."""
    directory.mkdir(exist_ok=True)
    with (directory / "users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield directory
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(directory)


def _name_of(options: MachineOptions) -> str:
    """Return a name for all guests that are booted alike; "" of one with directories, or saved."""
    values = asdict(options)
    files = values.pop("files")
    paths = [what for what in files.values() if isinstance(what, Path)]
    if options.saved is not None or any(path.is_dir() for path in paths):
        return ""
    values["kernel"] = options.kernel and _state_of(options.kernel)
    del values["boot_timeout_s"]
    told = hashlib.sha256(repr(sorted(values.items())).encode())
    for where, what in sorted(files.items()):
        held = what if isinstance(what, bytes) else what.read_bytes()
        mode = 0 if isinstance(what, bytes) else what.stat().st_mode
        told.update(f"{where} {mode} {hashlib.sha256(held).hexdigest()}\n".encode())
    return told.hexdigest()


def _state_of(path: Path) -> tuple[str, int, int]:
    found = path.stat()
    return str(path.absolute()), found.st_size, found.st_mtime_ns
