"""What a guest should be, and the QEMU command line and RAM map that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kprobes.errors import UsageError
from kprobes.transport.accel import Accel
from kprobes.units import GIB, MIB, Phys


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What differs between the machines of two architectures.

    Attributes:
        program: QEMU's.
        package: of Debian, that holds it.
        magic: offset and bytes by which a boot image is known.
        cpu: by accelerator.
    """

    program: str
    package: str
    magic: tuple[int, bytes]
    machine: str
    console: str
    cpu: Mapping[Accel, str]


BOARDS: Mapping[str, Board] = {
    "amd64": Board(
        program="qemu-system-x86_64",
        package="qemu-system-x86",
        # Documentation/arch/x86/boot.rst, "header".
        magic=(0x202, b"HdrS"),
        machine="pc",
        console="ttyS0",
        # QEMU 7.2 translates cmpxchg16b with a segment wrongly: 6.12 dies in its slab allocator.
        cpu={Accel.KVM: "host", Accel.TCG: "max,-cx16"},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """A guest to boot.

    Attributes:
        kernel: a boot image, or None for the Debian kernel of ``suite``.
        append: added to the kernel command line.
        files: absolute path in the guest to a file or directory of this machine, or to bytes.
        accel: ``auto``, ``kvm`` or ``tcg``.
        arch: Debian's name of it.
        boot_timeout_s: how long the guest may take until it can run commands.
    """

    memory_mib: int = 512
    cpus: int = 2
    kernel: Path | None = None
    append: str = ""
    files: Mapping[str, Path | bytes] = field(default_factory=dict[str, Path | bytes])
    accel: str = "auto"
    arch: str = "amd64"
    suite: str = "bookworm"
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
        """ttyS0's socket: kernel log and shell."""
        return self.directory / "console.sock"

    @property
    def console_log(self) -> Path:
        """All that ttyS0 printed."""
        return self.directory / "console.log"

    @property
    def agent(self) -> Path:
        """The start of the names of ttyS1's two FIFOs, which end in .in and .out."""
        return self.directory / "agent"

    @property
    def initramfs(self) -> Path:
        """The guest's file system."""
        return self.directory / "initramfs.cpio"

    @property
    def qemu_log(self) -> Path:
        """What QEMU itself says."""
        return self.directory / "qemu.log"


class RamRun(NamedTuple):
    """A piece of guest RAM: ``offset`` is where it lies in the RAM file."""

    start: Phys
    size: int
    offset: int


def ram_runs(memory_mib: int) -> tuple[RamRun, ...]:
    """Return where the RAM of QEMU's ``pc`` machine lies, in ascending order.

    hw/i386/pc_piix.c, pc_init1: with 3.5 GiB or more, all beyond 3 GiB moves up to 4 GiB. From
    640 KiB to 1 MiB the guest sees the VGA's memory and firmware instead of its RAM.
    """
    size = memory_mib * MIB
    low = size if size < 7 * GIB // 2 else 3 * GIB
    hole, end = 0xA0000, 0x100000
    runs = [RamRun(Phys(0), hole, 0), RamRun(Phys(end), low - end, end)]
    if low < size:
        runs.append(RamRun(Phys(4 * GIB), size - low, low))
    return tuple(runs)


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
        *("-chardev", f"pipe,id=agent,path={_escaped(places.agent)}", "-serial", "chardev:agent"),
        *("-chardev", f"{_server('gdb', places.stub)}", "-gdb", "chardev:gdb"),
        *("-chardev", f"{_server('qmp', places.qmp)}", "-mon", "qmp,mode=control"),
    ]


def kernel_command_line(options: MachineOptions) -> str:
    """Return what the guest's kernel is told; the user's words are last and win."""
    # tsc=reliable: without it 5.10 and 6.1 give up the TSC under TCG and trace by a worse clock.
    # cryptomgr.notests: the kernel's tests of its ciphers take 0.25 s of 1.8 under TCG.
    words = "quiet tsc=reliable panic=-1 cryptomgr.notests"
    ours = f"console={options.board.console} {words}"
    return f"{ours} {options.append}".strip()


def _console(places: Places) -> list[str]:
    # QEMU itself keeps the log, so that the guest never waits for a reader.
    log = f"logfile={_escaped(places.console_log)},logappend=on"
    return ["-chardev", f"{_server('console', places.console)},{log}", "-serial", "chardev:console"]


def _server(name: str, path: Path) -> str:
    return f"socket,id={name},path={_escaped(path)},server=on,wait=off"


def _escaped(path: Path) -> str:
    # A comma ends a value in QEMU's option strings; two of them are one.
    return str(path).replace(",", ",,")
