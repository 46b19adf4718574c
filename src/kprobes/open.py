"""Open a session: with a guest that is booted, one that runs, or this machine's own kernel.

The engine for guests takes a third of a second to import; who opens this machine's does without.
"""

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

from msgspec.structs import replace

from kprobes.errors import FormatError, UnreachableError
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.registers import Registers
from kprobes.handlers.registry import Registry
from kprobes.model.events import Events
from kprobes.model.hist import PROGRAM_SHIFT
from kprobes.model.recording import RecordingEnd
from kprobes.session import Session
from kprobes.trace import Trace

if TYPE_CHECKING:
    from kprobes.driver import Driver
    from kprobes.gdbserver.server import GdbServer
    from kprobes.guest.arena import ArenaSize
    from kprobes.guest.attach import Access
    from kprobes.guest.driver import GuestDriver
    from kprobes.guest.guest import Guest
    from kprobes.guest.source_files import KernelFiles
    from kprobes.host.driver import HostDriver, HostOptions
    from kprobes.host.machine import HostMachine
    from kprobes.transport.agent import Commands
    from kprobes.transport.qemu import Machine
    from kprobes.transport.qemu_command import MachineOptions

AnySession: TypeAlias = "Session[Driver, Commands]"
GuestSession: TypeAlias = "Session[GuestDriver, Machine]"
HostSession: TypeAlias = "Session[HostDriver, HostMachine]"


def _ignore(words: str) -> None:
    del words


def boot(
    options: "MachineOptions | None" = None,
    *,
    size: "ArenaSize | None" = None,
    access: "Access | None" = None,
    progress: Callable[[str], None] = _ignore,
    is_early: bool = False,
) -> GuestSession:
    """Boot a guest of our own and attach to it; it ends with the session.

    ``with kprobes.boot() as kernel: print(kernel.run("uname -r").output)``

    Args:
        options: of the guest, ``kprobes.MachineOptions(suite="sid")``; a small one by default.
        size: of the memory that is taken from it.
        access: how it is looked at.
        progress: called with a line of text when a step begins.
        is_early: return before its initcalls, where it stands until a recording begins; commands
            wait for the end of its boot.

    Raises:
        UnreachableError: no QEMU, no kernel, or the guest does not come up.
        UsageError: the kernel has no such clock.
    """
    from kprobes.guest.attach import Access
    from kprobes.transport.qemu import Machine

    access = access or Access()
    with ExitStack() as undo:
        machine = Machine.boot(options, progress=progress, is_early=is_early)
        undo.enter_context(machine)
        if is_early:
            wait = access.wait or _deadline(machine.options.boot_timeout_s)
            access = replace(access, wait=_after(machine.let_run, wait))
        progress("reading its kernel's symbols and types")
        target = str(machine.stub_address)
        return _session(undo, target, size, machine=machine, access=access)


def _deadline(limit_s: float) -> Callable[[str], None]:
    until_s = time.monotonic() + limit_s

    def check(why: str) -> None:
        if time.monotonic() > until_s:
            raise UnreachableError(f"the guest was not up after {limit_s:g} s: {why}")

    return check


def _after(first: Callable[[], None], wait: Callable[[str], None]) -> Callable[[str], None]:
    is_first = True

    def check(why: str) -> None:
        nonlocal is_first
        if is_first:
            first()
            is_first = False
        wait(why)

    return check


def attach(
    target: str, *, size: "ArenaSize | None" = None, access: "Access | None" = None
) -> GuestSession:
    """Attach to a guest that runs already, and leave it as it was when the session ends.

    ``with kprobes.attach("qemu:localhost:1234") as kernel: print(kernel.kernel.release)``

    Args:
        target: ``qemu:HOST:PORT`` or ``qemu:/path.sock``, also without ``qemu:``, of a gdb stub, or
            of a monitor that can start one.
        size: of the memory that is taken from the guest.
        access: how it is looked at.

    Raises:
        UnreachableError: nothing answers there, or somebody else uses the stub.
        TargetError: no Linux that we understand runs there.
        UsageError: its kernel has no such clock.
    """
    with ExitStack() as undo:
        return _session(undo, target, size, access=access)


def load(path: "str | Path") -> Trace:
    """Return the events of a recording, which are read when they are asked for.

    ``trace = kprobes.load("kprobe.rec"); print(trace["open"][0]["path"])``

    Raises:
        FormatError: it is no recording of ours.
        UsageError: there is no such file.
    """
    from kprobes.open_recording import opened_recording

    with ExitStack() as undo:
        recording = undo.enter_context(opened_recording(Path(path)))
        boots = recording.boots()
        boot = next(boots, None)
        if boot is None:
            raise FormatError(f"{path}: a recording without a kernel")
        trace = Trace(boot.source)
        file = undo.pop_all()

    def rest() -> Generator[Events]:
        with file:
            yield from boot.rounds
            for other in boots:
                yield from other.rounds

    def end() -> RecordingEnd:
        len(trace)
        return recording.counted

    trace.end(lambda: end().counts, lambda: end().hits, rest())
    return trace


@contextmanager
def attached_guest(target: str, access: "Access | None" = None) -> "Generator[Guest]":
    """Attach to a guest that runs already, only to look at it: nothing is made ready to patch it.

    Args:
        target: as for ``attach``.
        access: how it is looked at.

    Raises:
        UnreachableError: nothing answers there, or somebody else uses the stub.
        TargetError: no Linux that we understand runs there.
    """
    from kprobes.guest.open import attached

    with attached(target, access) as guest:
        yield guest


def host(
    options: "HostOptions | None" = None,
    files: "KernelFiles | None" = None,
    progress: Callable[[str], None] = _ignore,
) -> HostSession:
    """Return a session with the kernel that this machine runs; it needs root.

    ``with kprobes.host() as kernel: kernel.probe("p vfs_read count")``

    Args:
        options: how it records.
        files: that may have its debug information.
        progress: called with a line of text when something will take long.

    Raises:
        UnreachableError: it cannot be probed; says why, and what to do.
    """
    from kprobes.host.driver import HostDriver, HostOptions
    from kprobes.host.machine import open_machine
    from kprobes.host.obstacles import check_possible
    from kprobes.host.reader import open_instance_reader, read_events

    check_possible()
    machine = open_machine(files, progress)
    driver = HostDriver(machine, options or HostOptions(), open_instance_reader, read_events)
    with ExitStack() as undo:
        undo.callback(driver.close)
        return Session(driver, undo.pop_all(), driver.machine)


def remember_programs(kernel: GuestSession, symfs: Path | None = None) -> None:
    """Look at what each program of a guest has mapped when it ends, until the session does.

    So text with the trace option ``sym-userobj``, and counts by ``ustack``, show files also of
    programs that have ended. Who ends waits for that.

    Args:
        kernel: the session with the guest.
        symfs: a directory that is as the guest's root: functions are shown of its files.

    Raises:
        RefusedError, UsageError: Python cannot be asked in this guest, or it has no types.
    """
    from kprobes.guest.programs import ProgramFiles

    programs = kernel.driver.programs
    if symfs is not None:
        programs.find_function = ProgramFiles(symfs)

    def end_of_program(mm: SupportsIndex, *, regs: Registers) -> None:
        pid, tgid = int(regs.task.pid), int(regs.task.tgid)
        program = int(regs.task.self_exec_id) << PROGRAM_SHIFT | tgid
        programs.note((pid, tgid, program), index(mm))

    kernel.entry("exit_mmap")(end_of_program)


def _session(
    undo: ExitStack,
    target: str,
    size: "ArenaSize | None",
    *,
    machine: "Machine | None" = None,
    access: "Access | None" = None,
) -> GuestSession:
    from kprobes.guest.open import open_driver

    driver = open_driver(undo, target, size, is_ours=machine is not None, access=access)

    def handlers() -> Registry:
        from kprobes.handlers.engine import GuestEngine

        return Registry(GuestEngine(driver), LiveKernel(lambda: driver.guest))

    def gdbserver(listen: str, warn: Callable[[str], None]) -> "GdbServer":
        from kprobes.gdbserver.server import GdbServer

        return GdbServer(driver, listen, warn)

    return Session(driver, undo.pop_all(), machine, handlers, gdbserver)
