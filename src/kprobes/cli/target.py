"""The kernel that a command works on: a guest that runs already, or one that is booted for it."""

import argparse
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from kprobes.cli.options import BOOT_OPTIONS
from kprobes.cli.stop import Stop
from kprobes.drivers.guest.arena import ArenaSize
from kprobes.drivers.guest.attach import Access
from kprobes.errors import UsageError
from kprobes.session import Session, attach, boot
from kprobes.transport.connect import parse_target
from kprobes.transport.qemu_command import MachineOptions

_RENAMED = {"memory": "memory_mib", "file": "files"}


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before anything is started.

    Raises:
        UsageError: such as options of a guest that is not booted.
    """
    if args.target is None:
        machine_options(args)
        return
    parse_target(args.target)
    given = [name for name in BOOT_OPTIONS if getattr(args, name, None) is not None]
    if given:
        raise UsageError(f"--{given[0]} is for a guest that is booted, not for --target")


def machine_options(args: argparse.Namespace) -> MachineOptions:
    """Return the guest that the options describe.

    Raises:
        UsageError: options that make no sense.
    """
    given: dict[str, Any] = {
        _RENAMED.get(name, name): value
        for name in BOOT_OPTIONS
        if (value := getattr(args, name, None)) is not None
    }
    if "files" in given:
        given["files"] = dict(given["files"])
    if {"kernel", "suite"} <= given.keys():
        raise UsageError("--kernel and --suite both name the kernel to boot")
    return MachineOptions(**given)


@contextmanager
def opened(
    args: argparse.Namespace, *, stop: Stop, progress: Callable[[str], None]
) -> Generator[Session]:
    """Attach to the target, or boot a guest; ``--buffer-size`` and ``--vmlinux`` are minded.

    From then on a first Ctrl-C is kept: ``stop.is_asked`` tells of it.

    Raises:
        KprobesError: there is no such guest, or it is not what the user says.
        KeyboardInterrupt: the user does not want to wait.
    """
    if args.target is not None:
        # Somebody else's guest must not be left in the middle of anything.
        stop.defer()
    with _session(args, progress) as session:
        stop.defer()
        stop.check()
        yield session


def _session(args: argparse.Namespace, progress: Callable[[str], None]) -> Session:
    size = _arena_size(args)
    access = Access(image=getattr(args, "vmlinux", None))
    if args.target is None:
        return boot(machine_options(args), size=size, access=access, progress=progress)
    progress(f"attaching to {args.target}")
    return attach(args.target, size=size, access=access)


def _arena_size(args: argparse.Namespace) -> ArenaSize | None:
    ring = getattr(args, "buffer_size", None)
    return None if ring is None else ArenaSize(ring=ring)
