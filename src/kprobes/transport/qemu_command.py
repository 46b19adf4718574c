"""What a guest should be, and the QEMU command line that follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kprobes.errors import UsageError
from kprobes.transport.accel import Accel
from kprobes.transport.boards import BOARDS, DEFAULT_ARCH, Board


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """A guest to boot.

    Attributes:
        kernel: a boot image, or None for the Debian kernel of ``suite``.
        append: added to the kernel command line.
        files: absolute path in the guest to a file or directory of this machine, or to bytes.
        accel: ``auto``, ``kvm`` or ``tcg``.
        arch: Debian's name of it.
        mirror: URL of Debian's archive, or "" for $KPROBES_DEBIAN_MIRROR, else this host's own.
        boot_timeout_s: how long the guest may take until it can run commands.
    """

    memory_mib: int = 512
    cpus: int = 2
    kernel: Path | None = None
    append: str = ""
    files: Mapping[str, Path | bytes] = field(default_factory=dict[str, Path | bytes])
    accel: str = "auto"
    arch: str = DEFAULT_ARCH
    suite: str = "bookworm"
    mirror: str = ""
    boot_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.arch not in BOARDS:
            raise UsageError(f"no guests of {self.arch!r}; there are: {', '.join(BOARDS)}")
        if not 64 <= self.memory_mib <= 1 << 20:
            raise UsageError(f"a guest with {self.memory_mib} MiB of memory: 64 is the least")
        if not 1 <= self.cpus <= 255:
            raise UsageError(f"a guest with {self.cpus} CPUs: 1 to 255")
        if any(char in self.append for char in "\n\0"):
            raise UsageError("a kernel command line has one line")

    @property
    def board(self) -> Board:
        """The machine for this architecture."""
        return BOARDS[self.arch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where one guest's files and sockets are: private directories that end with it.

    Attributes:
        directory: of sockets and logs.
        ram_directory: of the RAM file; may be the same.
    """

    directory: Path
    ram_directory: Path

    @property
    def ram(self) -> Path:
        """The guest's memory, shared."""
        return self.ram_directory / "ram"

    @property
    def stub(self) -> Path:
        """The gdb stub's socket."""
        return self.directory / "gdb.sock"

    @property
    def qmp(self) -> Path:
        """QEMU's own control socket."""
        return self.directory / "qmp.sock"

    @property
    def console(self) -> Path:
        """The first serial port's socket: kernel log and shell."""
        return self.directory / "console.sock"

    @property
    def console_log(self) -> Path:
        """All that the first serial port printed."""
        return self.directory / "console.log"

    @property
    def agent(self) -> Path:
        """The start of the names of the agent's two FIFOs, which end in .in and .out."""
        return self.directory / "agent"

    @property
    def initramfs(self) -> Path:
        """The guest's file system."""
        return self.directory / "initramfs.cpio"

    @property
    def qemu_log(self) -> Path:
        """What QEMU itself says."""
        return self.directory / "qemu.log"


def command_line(
    options: MachineOptions, *, kernel: Path, accel: Accel, places: Places
) -> list[str]:
    """Return the command that boots this guest."""
    board = options.board
    tcg = ",thread=multi" if accel is Accel.TCG else ""
    ram = f"size={options.memory_mib}M,share=on,mem-path={_escaped(places.ram)}"
    return [
        *(board.program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", f"{board.machine},memory-backend=ram", "-accel", f"{accel}{tcg}"),
        *("-cpu", board.cpu[accel], "-smp", str(options.cpus), "-m", f"{options.memory_mib}M"),
        *("-object", f"memory-backend-file,id=ram,{ram}"),
        *("-kernel", str(kernel), "-initrd", str(places.initramfs)),
        *("-append", kernel_command_line(options)),
        *_console(places),
        # A FIFO takes QEMU's single bytes at 950 KB/s, a socket at 280.
        *("-chardev", f"pipe,id=agent,path={_escaped(places.agent)}", *board.agent_port),
        *("-chardev", f"{_server('gdb', places.stub)}", "-gdb", "chardev:gdb"),
        *("-chardev", f"{_server('qmp', places.qmp)}", "-mon", "qmp,mode=control"),
    ]


def kernel_command_line(options: MachineOptions) -> str:
    """Return what the guest's kernel is told; the user's words are last and win."""
    board = options.board
    # cryptomgr.notests: the kernel's tests of its ciphers take 0.25 s of 1.8 under TCG.
    words = (f"console={board.console} quiet", board.words, "panic=-1 cryptomgr.notests")
    return " ".join(part for part in (*words, options.append) if part)


def _console(places: Places) -> list[str]:
    # QEMU itself keeps the log, so that the guest never waits for a reader.
    log = f"logfile={_escaped(places.console_log)},logappend=on"
    return ["-chardev", f"{_server('console', places.console)},{log}", "-serial", "chardev:console"]


def _server(name: str, path: Path) -> str:
    return f"socket,id={name},path={_escaped(path)},server=on,wait=off"


def _escaped(path: Path) -> str:
    # A comma ends a value in QEMU's option strings; two of them are one.
    return str(path).replace(",", ",,")
