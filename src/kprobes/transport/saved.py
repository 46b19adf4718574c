"""A booted guest in a directory, so that others like it go on from there instead of booting.

``saved.json`` says what it was booted with, ``initramfs.cpio`` is its file system, ``ram`` its
memory, with holes, and ``state`` the rest: a migration stream of QEMU (docs/devel/migration) with
its capability ``x-ignore-shared``, which leaves out memory that is a shared file.
"""

import os
import shlex
import shutil
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kprobes.errors import FormatError, StateError, UnreachableError, UsageError
from kprobes.transport.monitor import Monitor
from kprobes.transport.qemu_command import MachineOptions, Places

_NAME = "saved.json"
_ANSWER_S = 60.0
_POLL_S = 0.005
_LONGEST_JSON = 1 << 16


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to know of ``MachineOptions``; its files are in the initramfs."""

    kernel: str
    accel: str
    memory_mib: int
    cpus: int
    append: str
    arch: str
    suite: str


def save(options: MachineOptions, places: Places, directory: Path) -> None:
    """Write a guest that runs to a new directory; it stands still for a moment meanwhile.

    Args:
        options: that boot it, with the kernel and the accelerator that it has.
        places: of its files.
        directory: that is made.

    Raises:
        UsageError: the directory exists, or cannot be made.
        StateError: it cannot be written.
        UnreachableError: QEMU's monitor does not answer, or does not save.
    """
    written = msgspec.json.encode(replace(options, files={}), enc_hook=str)
    try:
        directory.mkdir()
    except OSError as error:
        raise UsageError(f"cannot save a guest to {directory}: {error.strerror}") from error
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            shutil.copyfile(places.initramfs, directory / places.initramfs.name)
            with _standing(places) as monitor:
                _save_state(monitor, directory / "state")
                copy_with_holes(places.ram, directory / places.ram.name)
            (directory / _NAME).write_bytes(written)
        except OSError as error:
            raise StateError(f"cannot save a guest to {directory}: {error.strerror}") from error
        undo.pop_all()


def read(directory: Path) -> MachineOptions:
    """Return what booted a saved guest; its files are in its initramfs.

    Raises:
        FormatError: no guest was saved there.
    """
    try:
        with (directory / _NAME).open("rb") as file:
            found = msgspec.json.decode(file.read(_LONGEST_JSON), type=_Saved)
        return _options(found)
    except (OSError, UsageError, msgspec.DecodeError) as error:
        raise _no_guest(directory, error) from error


def _options(found: _Saved) -> MachineOptions:
    return MachineOptions(
        kernel=Path(found.kernel),
        accel=found.accel,
        memory_mib=found.memory_mib,
        cpus=found.cpus,
        append=found.append,
        arch=found.arch,
        suite=found.suite,
    )


def lay_out(directory: Path, places: Places) -> None:
    """Copy a saved guest's files to where QEMU looks for them.

    Raises:
        FormatError: they are not there, or not to be read, or there is no room.
    """
    try:
        shutil.copyfile(directory / places.initramfs.name, places.initramfs)
        copy_with_holes(directory / places.ram.name, places.ram)
    except OSError as error:
        raise _no_guest(directory, error) from error


def _no_guest(directory: Path, error: Exception) -> FormatError:
    why = error.strerror if isinstance(error, OSError) else error
    return FormatError(f"no saved guest can be had from {directory}: {why}")


INCOMING = ("-incoming", "defer")
"""What QEMU's command line has beside for a saved guest: it waits for ``go_on``."""


def go_on(directory: Path, places: Places, timeout_s: float) -> None:
    """Have QEMU take a saved guest's state, and return when it runs.

    Args:
        directory: of ``save``.
        places: of the files that were laid out.
        timeout_s: for all of it.

    Raises:
        UnreachableError: it does not.
    """
    deadline = time.monotonic() + timeout_s
    with Monitor.open(str(places.qmp), timeout_s=timeout_s) as monitor, _without_memory(monitor):
        state = _quoted(f"cat {shlex.quote(str(directory.absolute() / 'state'))}")
        said = monitor.command(f'migrate_incoming "exec:{state}"').strip()
        while "inmigrate" in monitor.command("info status"):
            if said or "failed" in monitor.command("info migrate"):
                raise UnreachableError(said or "QEMU cannot read its state")
            if time.monotonic() > deadline:
                raise UnreachableError(f"its state was not read after {timeout_s:g} s")
            time.sleep(_POLL_S)
        # It stood when it was saved.
        monitor.command("cont")


def copy_with_holes(source: Path, target: Path) -> None:
    """Copy a file without what it has never held.

    Raises:
        OSError: one cannot be read, or the other written.
    """
    with source.open("rb") as old, target.open("xb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        end = 0
        while (begin := _next_data(old.fileno(), end)) is not None:
            end = os.lseek(old.fileno(), begin, os.SEEK_HOLE)
            new.seek(begin)
            while begin < end:
                begin += os.sendfile(new.fileno(), old.fileno(), begin, end - begin)


def _next_data(file: int, after: int) -> int | None:
    try:
        return os.lseek(file, after, os.SEEK_DATA)
    except OSError:
        # ENXIO: there is nothing but a hole until its end.
        return None


@contextmanager
def _standing(places: Places) -> Generator[Monitor]:
    with Monitor.open(str(places.qmp), timeout_s=_ANSWER_S) as monitor:
        runs = "status: running" in monitor.command("info status")
        monitor.command("stop")
        try:
            yield monitor
        finally:
            if runs:
                monitor.command("cont")


def _save_state(monitor: Monitor, path: Path) -> None:
    state = _quoted(f"cat >{shlex.quote(str(path.absolute()))}")
    with _without_memory(monitor):
        said = monitor.command(f'migrate -d "exec:{state}"').strip()
        while "completed" not in (status := monitor.command("info migrate")):
            if said or "failed" in status:
                raise UnreachableError(f"QEMU does not save the guest: {said or status}")
            time.sleep(_POLL_S)


@contextmanager
def _without_memory(monitor: Monitor) -> Generator[None]:
    monitor.command("migrate_set_capability x-ignore-shared on")
    try:
        yield
    finally:
        with suppress(UnreachableError):
            monitor.command("migrate_set_capability x-ignore-shared off")


def _quoted(words: str) -> str:
    # For the monitor, which knows these escapes.
    return words.replace("\\", "\\\\").replace('"', '\\"')
