"""A Linux kernel that we boot ourselves in QEMU: the embedded guest."""

import shutil
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import GuestGoneError, UnreachableError, UsageError
from kprobes.transport import console, initramfs, saved
from kprobes.transport.address import listener_pid
from kprobes.transport.agent import Agent, Command, Finished, Running
from kprobes.transport.console import FifoPair
from kprobes.transport.debian import Progress, busybox, kernel_image
from kprobes.transport.monitor import Monitor
from kprobes.transport.qemu_command import (
    Accel,
    MachineOptions,
    Places,
    RamRun,
    choose,
    command_line,
)
from kprobes.transport.qemu_process import QemuSupervisor, make_places, remove
from kprobes.units import MIB

_STDIN, _STDOUT = 0, 1
_POLL_S = 0.01
_BOOTS = 3
"""How often a guest is booted whose kernel crashes: QEMU before 8.1 may keep a translation of code
that one vCPU patches while another runs it; Linux 7.2 dies of that in one boot of a hundred."""


class _CrashError(UnreachableError):
    """The guest's kernel crashed while it booted."""


def _quiet(words: str) -> None:
    del words


class Machine:
    """A booted guest; ``boot`` makes it, ``close`` or the end of this process ends it.

    Attributes:
        options: what it was booted with.
        kernel: the boot image that it runs.
        pid: of QEMU, on this machine.
    """

    def __init__(
        self, recipe: "_Recipe", places: Places, supervisor: QemuSupervisor, agent: Agent
    ) -> None:
        self.options = recipe.options
        self.kernel = recipe.kernel
        self._accel = recipe.accel
        self.pid = supervisor.pid
        self._places = places
        self._supervisor = supervisor
        self._agent = agent
        self._is_ready = False
        self._closing = ExitStack()

    def __repr__(self) -> str:
        """Return what it is: its kernel, and QEMU's process."""
        state = "" if self.is_alive else ", ended"
        return f"<Machine with {self.kernel.name}, pid {self.pid}{state}>"

    @classmethod
    def boot(
        cls,
        options: MachineOptions | None = None,
        *,
        progress: Progress = _quiet,
        is_early: bool = False,
    ) -> Self:
        """Boot a guest, or go on with a saved one, and return when it can run commands.

        Args:
            options: of the guest.
            progress: called with a line of text when a step begins.
            is_early: return at once, before its first instruction: it stands until ``let_run``.

        Raises:
            UsageError: options that make no sense.
            FormatError: no guest was saved there.
            UnreachableError: no QEMU, no kernel, no room, or a guest that does not come up.
        """
        options = MachineOptions() if options is None else options
        if options.saved is not None:
            return cls._load(options, options.saved, progress, is_early=is_early)
        recipe = _recipe(options, progress)
        progress(f"booting {recipe.kernel.name} with {recipe.accel}")
        for _ in range(0 if is_early else _BOOTS - 1):
            with suppress(_CrashError):
                return cls._boot(recipe)
            progress("its kernel crashed while it booted: once more")
        return cls._boot(recipe, is_early=is_early)

    @classmethod
    def _load(
        cls, wanted: MachineOptions, directory: Path, progress: Progress, *, is_early: bool
    ) -> Self:
        if is_early:
            raise UsageError("a saved guest has booted: it is past its first instruction")
        options = replace(saved.read(directory), boot_timeout_s=wanted.boot_timeout_s)
        recipe = _Recipe(
            options=options,
            program=_program(options),
            accel=Accel(options.accel),
            kernel=_kernel(options, progress),
        )
        progress(f"going on with the guest in {directory}")
        with ExitStack() as undo:
            machine = cls(recipe, *_started(recipe, undo, source=directory))
            machine._go_on(directory)
            machine._closing = undo.pop_all()
            return machine

    @classmethod
    def _boot(cls, recipe: "_Recipe", *, is_early: bool = False) -> Self:
        with ExitStack() as undo:
            machine = cls(recipe, *_started(recipe, undo, is_held=is_early))
            if is_early:
                machine._wait_for_sockets()
            else:
                machine._wait_ready()
            machine._closing = undo.pop_all()
            return machine

    @property
    def stub_address(self) -> Path:
        """The unix socket of the gdb stub."""
        return self._places.stub

    @property
    def qmp_address(self) -> Path:
        """The unix socket of QEMU's control protocol."""
        return self._places.qmp

    @property
    def ram_path(self) -> Path:
        """The file that is the guest's memory."""
        return self._places.ram

    @property
    def ram_runs(self) -> tuple[RamRun, ...]:
        """Where guest-physical memory lies in that file, in ascending order."""
        return self.options.machine_type.ram(self.options.memory_mib)

    @property
    def is_alive(self) -> bool:
        """Whether QEMU runs."""
        return self._supervisor.is_alive

    def save(self, directory: Path) -> None:
        """Write this guest to a new directory: ``MachineOptions.saved`` names it afterwards.

        It stands still for a moment, and goes on. No command of ours may be running in it, and
        what is armed is saved, too: save it before the first recording.

        Raises:
            UsageError: the directory exists, or cannot be made.
            StateError: it cannot be written.
            UnreachableError: QEMU's monitor does not answer, or does not save it.
        """
        self._wait_ready()
        options = replace(self.options, kernel=self.kernel, accel=str(self._accel))
        saved.save(options, self._places, directory)

    def let_run(self) -> None:
        """Let a guest begin to boot that stands before its first instruction.

        Raises:
            UnreachableError: QEMU has ended, or its monitor does not answer.
        """
        with Monitor.open(str(self.qmp_address)) as monitor:
            monitor.command("cont")

    def run(self, command: Command, timeout_s: float | None = None) -> Finished:
        """Run a command in the guest as root, to its end.

        A guest that a debugger has stopped is waited for.

        Args:
            command: a line for the guest's shell, or a list of words.
            timeout_s: after it the command is killed; None waits for ever.

        Raises:
            TargetError: not ended in time.
            GuestGoneError: the guest died.
            UnreachableError: it does not come up.
        """
        self._wait_ready()
        console.trim_log(self._places.console_log)
        return self._agent.run(command, timeout_s)

    def start(
        self, command: Command, timeout_s: float | None = None, *, is_held: bool = False
    ) -> Running:
        """Start a command in the guest; return when its pid is known, errors as for ``run``.

        Args:
            command: what is run.
            timeout_s: for the start, or None for no limit.
            is_held: it does not begin before ``go`` is called.
        """
        self._wait_ready()
        return self._agent.start(command, timeout_s, is_held=is_held)

    def console_log(self) -> str:
        """Return what the kernel and the shell printed on the first serial port."""
        return console.read_log(self._places.console_log)

    def shell(self) -> None:
        """Connect the user's terminal to the guest's shell until Ctrl-] or the guest's end.

        Raises:
            UsageError: standard input is not a terminal.
            GuestGoneError: the guest died before.
        """
        self._wait_ready()
        size = shutil.get_terminal_size()
        self._agent.resize(size.lines, size.columns)
        console.attach(self._places.console, source=_STDIN, sink=_STDOUT)

    def close(self) -> None:
        """End the guest and remove all that it had; the second time nothing happens."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait_for_sockets(self) -> None:
        deadline = time.monotonic() + self.options.boot_timeout_s
        # The last that QEMU makes.
        while listener_pid(str(self.qmp_address)) is None:
            if not self.is_alive or time.monotonic() > deadline:
                raise UnreachableError(f"the guest did not boot: {_gone(self._places)}")
            time.sleep(_POLL_S)

    def _go_on(self, directory: Path) -> None:
        self._wait_for_sockets()
        try:
            saved.go_on(directory, self._places, self.options.boot_timeout_s)
        except UnreachableError as e:
            why = console.last_words(console.read_log(self._places.qemu_log)) or f"  {e}"
            raise UnreachableError(f"the saved guest does not go on:\n{why}") from e
        self._is_ready = True

    def _wait_ready(self) -> None:
        if self._is_ready:
            return
        limit = self.options.boot_timeout_s
        try:
            is_ready = self._agent.wait_ready(limit)
        except GuestGoneError as e:
            crashed = console.has_crashed(self.console_log())
            kind = _CrashError if crashed else UnreachableError
            raise kind(f"the guest did not boot: {e}") from e
        if not is_ready:
            lines = console.last_words(self.console_log()) or "  (nothing printed)"
            raise UnreachableError(f"the guest was not up after {limit:g} s; it printed:\n{lines}")
        self._is_ready = True


class _Recipe(Struct, frozen=True, kw_only=True):
    """What a guest is booted from, however often."""

    options: MachineOptions
    program: Path
    accel: Accel
    kernel: Path
    archive: bytes = b""


def _started(
    recipe: _Recipe, undo: ExitStack, *, source: Path | None = None, is_held: bool = False
) -> tuple[Places, QemuSupervisor, Agent]:
    size_mib = recipe.options.memory_mib
    places = make_places(size_mib)
    undo.callback(remove, places)
    if source is None:
        places.initramfs.write_bytes(recipe.archive)
    else:
        saved.lay_out(source, places)
    fifos = FifoPair(places.agent)
    undo.callback(fifos.close)
    command = command_line(
        recipe.options, kernel=recipe.kernel, accel=recipe.accel, places=places, is_held=is_held
    )
    if source is not None:
        command += saved.INCOMING
    supervisor = undo.enter_context(QemuSupervisor([str(recipe.program), *command[1:]], places))
    wire = fifos.wire(supervisor, lambda: _gone(places))
    return places, supervisor, Agent(wire, longest_output=size_mib * MIB)


def _recipe(options: MachineOptions, progress: Progress) -> _Recipe:
    machine_type = options.machine_type
    return _Recipe(
        options=options,
        program=_program(options),
        accel=choose(options.accel, machine_type.native, signs=machine_type.kvm),
        kernel=_kernel(options, progress),
        archive=initramfs.build(
            busybox(arch=options.arch, mirror=options.mirror, progress=progress),
            options.files,
            agent=machine_type.agent,
        ),
    )


def _program(options: MachineOptions) -> Path:
    found = shutil.which(options.machine_type.program)
    if found is None:
        raise UnreachableError(
            f"there is no {options.machine_type.program}: install Debian's "
            f"{options.machine_type.package}"
        )
    return Path(found).absolute()


def _kernel(options: MachineOptions, progress: Progress) -> Path:
    if options.kernel is None:
        return kernel_image(
            suite=options.suite, arch=options.arch, mirror=options.mirror, progress=progress
        )
    if options.kernel.exists() and not options.kernel.is_file():
        # A FIFO would be waited for.
        raise UnreachableError(f"cannot read the kernel {options.kernel}: not a regular file")
    try:
        with options.kernel.open("rb") as file:
            head = file.read(options.machine_type.head_size)
    except OSError as e:
        raise UnreachableError(f"cannot read the kernel {options.kernel}: {e.strerror}") from e
    if not options.machine_type.boots(head):
        raise UnreachableError(f"{options.kernel} is not a bootable kernel for {options.arch}")
    return options.kernel.absolute()


def _gone(places: Places) -> GuestGoneError:
    said = console.read_log(places.qemu_log)
    printed = console.read_log(places.console_log)
    lines = console.last_words(printed + said)
    return GuestGoneError("QEMU ended" + (f"; last words:\n{lines}" if lines else ""))
