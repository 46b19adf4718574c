"""The kernel that a command works on: this machine's own, or a guest's."""

import argparse
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from kprobes.cli.options import BOOT_OPTIONS, choose_target, is_host, print_reason
from kprobes.cli.terminal import Stop, print_message
from kprobes.errors import TargetError, UnreachableError, UsageError
from kprobes.transport.connect import parse_target
from kprobes.transport.qemu_command import MachineOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    # The engine for guests takes a third of a second to import, and the host's does without.
    from kprobes.guest.arena import ArenaSize
    from kprobes.guest.attach import Access
    from kprobes.guest.guest import Guest
    from kprobes.guest.journal import Boot
    from kprobes.guest.source_files import KernelFiles
    from kprobes.host.machine import HostMachine
    from kprobes.inspect.source import SourceKernel
    from kprobes.model.kernel import Kernel
    from kprobes.open import GuestSession, HostSession
    from kprobes.ports import Memory

ATTACHING_S = 2.0
"""How long a first Ctrl-C waits for a guest that is being looked at. An interrupt lets it go on."""
_POLL_S = 0.1
"""Between looks for a guest that is waited for."""
_RENAMED = {"memory": "memory_mib", "file": "files"}


def check_options(args: argparse.Namespace) -> None:
    """Settle the target, and refuse options that contradict each other; nothing is started.

    Raises:
        UsageError: such as options of a guest that is not booted.
    """
    choose_target(args)
    if args.target is None:
        waits = next((name for name in ("rearm", "wait") if getattr(args, name, False)), "")
        if waits:
            raise UsageError(f"--{waits} is for a guest that others start: name it with --target")
        machine_options(args)
        return
    if is_host(args):
        return
    try:
        parse_target(args.target)
    except UsageError as error:
        raise UsageError(f"{error}, host, guest, guest:SUITE:ARCH, auto") from None
    if getattr(args, "boot", False):
        raise UsageError("--boot is for a guest that is booted; one that others start: --wait")
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


class WaitedError(Exception):
    """The time to wait for a guest is over."""


class BootWait(Struct, kw_only=True):
    """The wait for a guest that is not there yet, or boots.

    Attributes:
        is_over: whether nobody waits any more.
        crashed: the boot of it that is not meant, or None.
        is_said: whether the user knows why.
    """

    is_over: Callable[[], bool]
    crashed: "Boot | None" = None
    is_said: bool = False

    def check(
        self, args: argparse.Namespace, stop: Stop, progress: Callable[[str], None], why: str
    ) -> None:
        """Tell why the target is waited for, or end that.

        Args:
            args: of the command, which names the target.
            stop: the user's wish.
            progress: is told what is done.
            why: it cannot be attached to.

        Raises:
            KeyboardInterrupt: the user does not want to wait.
            WaitedError: it is over.
        """
        words = f"waiting for {args.target}: {why}"
        if not self.is_said:
            print_message(f"kprobe: {words}")
            self.is_said = True
        progress(words)
        stop.check()
        if self.is_over():
            raise WaitedError


@contextmanager
def opened(
    args: argparse.Namespace,
    *,
    stop: Stop,
    progress: Callable[[str], None],
    waiting: BootWait | None = None,
) -> Generator["GuestSession"]:
    """Attach to the target, or boot a guest; ``--buffer-size`` and the kernel's files are minded.

    From then on a first Ctrl-C is kept: ``stop.is_asked`` tells of it.

    Args:
        args: of the command.
        stop: the user's wish.
        progress: is told what is done.
        waiting: for a guest that is not there yet, or boots; None where that is an error.

    Raises:
        KprobesError: there is no such guest, or it is not what the user says.
        KeyboardInterrupt: the user does not want to wait.
        WaitedError: the time to wait is over.
    """
    if args.target is not None:
        # Somebody else's guest must not be left in the middle of anything, but its stub may be
        # as slow as it likes.
        stop.defer(at_most_s=ATTACHING_S)
    begin = partial(_session, args, progress)
    if waiting is not None:
        begin = partial(_await, args, stop, progress, waiting)
    with begin() as session:
        stop.defer()
        stop.check()
        yield session


@contextmanager
def opened_host(
    args: argparse.Namespace, progress: Callable[[str], None]
) -> Generator["HostSession"]:
    """Open this machine's own kernel; ``--buffer-size``, ``--clock`` and its files are minded.

    Args:
        args: of the command.
        progress: is told what is done.

    Raises:
        UnreachableError: it cannot be probed; says why, and what to do.
        UsageError: there is no such file of its kernel.
    """
    from kprobes.host.driver import DEFAULT_CLOCK, DEFAULT_RING, HostOptions
    from kprobes.open import host

    options = HostOptions(
        ring=getattr(args, "buffer_size", None) or DEFAULT_RING,
        clock=getattr(args, "clock", None) or DEFAULT_CLOCK,
    )
    with host(options, _kernel_files(args), progress) as session:
        yield session


def this_machine(args: argparse.Namespace) -> "HostMachine":
    """Return this machine, to be looked at only.

    Raises:
        UnreachableError: its kernel cannot be probed; says why, and what to do.
        UsageError: there is no such file of its kernel.
    """
    from kprobes.host.machine import open_machine
    from kprobes.host.obstacles import check_possible

    check_possible()
    return open_machine(_kernel_files(args))


def _kernel_files(args: argparse.Namespace) -> "KernelFiles":
    # Of this machine's kernel, where a command has options for them.
    from kprobes.guest.source_files import KernelFiles

    vmlinux: Path | None = getattr(args, "vmlinux", None)
    if vmlinux is not None and not vmlinux.is_file():
        raise UsageError(f"--vmlinux {vmlinux}: there is no such file")
    return KernelFiles(
        named=() if vmlinux is None else (vmlinux,),
        modules=_module_files(args),
        tree=getattr(args, "source", None),
    )


@contextmanager
def this_kernel() -> Generator[tuple["Memory", "Kernel"]]:
    """Read this machine's kernel, and its memory through /proc/kcore.

    Raises:
        UnreachableError: there is no /proc/kcore for us.
        TargetError: its symbols are hidden.
    """
    from kprobes.formats.vmcoreinfo import find
    from kprobes.host.machine import read_kernel
    from kprobes.transport.kcore import Kcore

    with Kcore() as memory:
        slides = (info.slide for info in find(memory.notes) if info.slide is not None)
        yield memory, replace(read_kernel(), slide=next(slides, 0))


@contextmanager
def guest_of(args: argparse.Namespace) -> Generator["Guest"]:
    """Yield a guest that nothing is done to: the one that is named, or one that is booted."""
    from kprobes.cli.terminal import Progress
    from kprobes.open import attached_guest

    with Stop() as stop, Progress(is_quiet=args.quiet) as progress:
        if args.target is None:
            with opened(args, stop=stop, progress=progress) as session:
                yield session.driver.guest
                stop.check()
            return
        stop.defer(at_most_s=ATTACHING_S)
        progress(f"attaching to {args.target}")
        with attached_guest(args.target, access_of(args, progress)) as guest:
            stop.defer()
            stop.check()
            yield guest
            stop.check()


@contextmanager
def only_guest_of(args: argparse.Namespace, what: str) -> Generator["Guest"]:
    """Yield a guest as ``guest_of`` does, for what there is of guests only.

    Raises:
        UsageError: options make no sense, or mean this machine's own kernel.
    """
    check_options(args)
    if is_host(args):
        raise UsageError(f"{what} are listed of guests: --target must name one")
    with guest_of(args) as guest:
        yield guest


@contextmanager
def source_of(args: argparse.Namespace) -> Generator["SourceKernel"]:
    """Yield what is asked about the source of this machine's kernel, or of a guest's.

    Raises:
        UsageError: options make no sense.
    """
    from kprobes.inspect.source import source_of_guest

    check_options(args)
    if is_host(args):
        from kprobes.host.check import source_of_host

        yield source_of_host(this_machine(args))
        return
    with guest_of(args) as guest:
        yield source_of_guest(guest)


def access_of(
    args: argparse.Namespace,
    progress: Callable[[str], None],
    wait: Callable[[str], None] | None = None,
) -> "Access":
    """Return how the options say that a guest is looked at.

    Args:
        args: of the command.
        progress: is told what is done.
        wait: for a guest that boots; see ``Access``.
    """
    from kprobes.guest.attach import Access

    return Access(
        image=getattr(args, "vmlinux", None),
        symbols=getattr(args, "symbols", None),
        modules=_module_files(args),
        source=getattr(args, "source", None),
        clock=getattr(args, "clock", None),
        tell=progress,
        wait=wait,
    )


def _module_files(args: argparse.Namespace) -> "Sequence[Path]":
    files: Sequence[Path] = getattr(args, "module", None) or ()
    for each in files:
        if not each.is_file():
            raise UsageError(f"--module {each}: there is no such file")
    return files


def _session(
    args: argparse.Namespace,
    progress: Callable[[str], None],
    wait: Callable[[str], None] | None = None,
) -> "GuestSession":
    from kprobes.open import attach, boot

    size = _arena_size(args)
    access = access_of(args, progress, wait)
    if args.target is None:
        print_reason(args)
        return boot(
            machine_options(args),
            size=size,
            access=access,
            progress=progress,
            is_early=getattr(args, "boot", False),
        )
    progress(f"attaching to {args.target}")
    return attach(args.target, size=size, access=access)


def _await(
    args: argparse.Namespace, stop: Stop, progress: Callable[[str], None], waiting: BootWait
) -> "GuestSession":
    wait = partial(waiting.check, args, stop, progress)
    while True:
        try:
            session = _session(args, progress, wait)
        except (UnreachableError, TargetError) as error:
            why = str(error)
        else:
            if session.driver.boot != waiting.crashed:
                return session
            session.close()
            why = "it has crashed"
        wait(why)
        time.sleep(_POLL_S)


def _arena_size(args: argparse.Namespace) -> "ArenaSize | None":
    from kprobes.guest.arena import ArenaSize

    ring = getattr(args, "buffer_size", None)
    return None if ring is None else ArenaSize(ring=ring)
