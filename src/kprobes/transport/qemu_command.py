"""QEMU's command line: a guest's options, the machine that is emulated, and KVM where it truly is.

All that differs between architectures when booting is in a machine type.
"""

import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from kprobes.errors import UnreachableError, UsageError
from kprobes.formats.elf import EM_AARCH64, EM_X86_64
from kprobes.units import GIB, MIB, Phys

KVM = Path("/dev/kvm")
"""KVM's device."""


class Accel(StrEnum):
    """QEMU's name of an accelerator."""

    KVM = "kvm"
    TCG = "tcg"


def choose(
    wanted: str,
    native: str,
    *,
    signs: tuple[Path, ...],
    machine: str | None = None,
    device: Path = KVM,
) -> Accel:
    """Return the accelerator for ``auto``, ``kvm`` or ``tcg``.

    ``kvm`` is believed wherever its device opens, also without a sign that we know.

    Args:
        wanted: by the user.
        native: what a machine calls itself whose KVM runs such guests.
        signs: files, of which one is there where KVM is what it should be.
        machine: what this one calls itself.
        device: KVM's.

    Raises:
        UsageError: no such accelerator.
        UnreachableError: ``kvm`` where its device does not open, or is for other guests.
    """
    is_native = (machine or os.uname().machine) == native
    opens = is_native and os.access(device, os.R_OK | os.W_OK)
    match wanted:
        case "auto":
            return Accel.KVM if opens and any(path.exists() for path in signs) else Accel.TCG
        case "tcg":
            return Accel.TCG
        case "kvm" if opens:
            return Accel.KVM
        case "kvm":
            raise UnreachableError(f"no KVM here: {_why_not(native, is_native, device)}")
        case _:
            raise UsageError(f"accelerator {wanted!r} is none of auto, kvm, tcg")


def _why_not(native: str, is_native: bool, device: Path) -> str:
    if not is_native:
        return f"this machine is no {native}; leave the accelerator to auto"
    reason = "may not be opened" if device.exists() else "does not exist"
    return f"{device} {reason}; leave the accelerator to auto"


DEFAULT_ARCH = "amd64"
"""Debian's name of what is booted unless something else is asked for."""


class RamRun(NamedTuple):
    """A piece of guest RAM: ``offset`` is where it lies in the RAM file."""

    start: Phys
    size: int
    offset: int


class MachineType(Struct, frozen=True, kw_only=True):
    """What differs between the machines of two architectures.

    Attributes:
        program: QEMU's.
        package: of Debian, that holds it.
        magics: offset and bytes, by one of which a boot image is known.
        machine: QEMU's name of it.
        console: the guest's name of its first serial port.
        agent: the guest's name of the port that its agent speaks on.
        agent_port: what gives the machine that port, on the character device ``agent``.
        words: for the kernel's command line.
        cpu: by accelerator.
        native: what a machine that can run such guests with KVM calls itself.
        kvm: files, of which one is there where such a machine's KVM is what it should be.
        elf: ELF's number of it.
        ram: MiB of memory to where they lie.
    """

    program: str
    package: str
    magics: tuple[tuple[int, bytes], ...]
    machine: str
    console: str
    agent: str
    agent_port: tuple[str, str]
    words: str
    cpu: Mapping[Accel, str]
    native: str
    kvm: tuple[Path, ...]
    elf: int
    ram: Callable[[int], tuple[RamRun, ...]]

    @property
    def head_size(self) -> int:
        """Bytes of a boot image that tell what it is."""
        return max(offset + len(magic) for offset, magic in self.magics)

    def boots(self, head: bytes) -> bool:
        """Whether a boot image for this machine begins so."""
        return any(head[offset:].startswith(magic) for offset, magic in self.magics)


def _pc_ram(memory_mib: int) -> tuple[RamRun, ...]:
    # hw/i386/pc_piix.c, pc_init1: with 3.5 GiB or more, all beyond 3 GiB moves up to 4 GiB. From
    # 640 KiB to 1 MiB the guest sees the VGA's memory and firmware instead of its RAM.
    size = memory_mib * MIB
    low = size if size < 7 * GIB // 2 else 3 * GIB
    hole, end = 0xA0000, 0x100000
    runs = [RamRun(Phys(0), hole, 0), RamRun(Phys(end), low - end, end)]
    if low < size:
        runs.append(RamRun(Phys(4 * GIB), size - low, low))
    return tuple(runs)


def _virt_ram(memory_mib: int) -> tuple[RamRun, ...]:
    # hw/arm/virt.c, base_memmap: VIRT_MEM, in one piece however much it is.
    return (RamRun(Phys(GIB), memory_mib * MIB, 0),)


MACHINE_TYPES: Mapping[str, MachineType] = {
    DEFAULT_ARCH: MachineType(
        program="qemu-system-x86_64",
        package="qemu-system-x86",
        # Documentation/arch/x86/boot.rst, "header".
        magics=((0x202, b"HdrS"),),
        machine="pc",
        console="ttyS0",
        agent="ttyS1",
        agent_port=("-serial", "chardev:agent"),
        # Without the first 5.10 and 6.1 give up the TSC under TCG and trace by a worse clock. The
        # second leaves out a test of the timer's interrupt, which fails, and panics ("IO-APIC +
        # timer doesn't work!"), when this machine is so busy that some ticks come too late.
        words="tsc=reliable no_timer_check",
        # QEMU 7.2 translates cmpxchg16b with a segment wrongly: 6.12 dies in its slab allocator.
        cpu={Accel.KVM: "host", Accel.TCG: "max,-cx16"},
        native="x86_64",
        # The device alone proves nothing: on our build machines it opens, but is of a paravirtual
        # kind that does not run stock kernels.
        kvm=tuple(Path("/sys/module", name) for name in ("kvm_intel", "kvm_amd")),
        elf=EM_X86_64,
        ram=_pc_ram,
    ),
    "arm64": MachineType(
        program="qemu-system-aarch64",
        package="qemu-system-arm",
        # Documentation/arch/arm64/booting.rst, "magic"; drivers/firmware/efi/libstub/
        # zboot-header.S; gzip, which QEMU unpacks too.
        magics=((56, b"ARMd"), (4, b"zimg"), (0, b"\x1f\x8b")),
        machine="virt,gic-version=max",
        console="ttyAMA0",
        # Debian's cloud kernel has this driver built in and that of a virtio console not; a second
        # PL011 is to be had since QEMU 9.1 only.
        agent="ttyS0",
        agent_port=("-device", "pci-serial,chardev=agent"),
        words="",
        # An architected algorithm for pointer authentication would take TCG far longer.
        cpu={Accel.KVM: "host", Accel.TCG: "max,pauth-impdef=on"},
        native="aarch64",
        # KVM is not a module there.
        kvm=(KVM,),
        elf=EM_AARCH64,
        ram=_virt_ram,
    ),
}
"""By Debian's name."""


class MachineOptions(Struct, frozen=True, kw_only=True):
    """A guest to boot: ``kprobes.boot(MachineOptions(suite="sid", cpus=4))``.

    Attributes:
        memory_mib: of its memory.
        cpus: how many it has.
        kernel: a boot image, or None for the Debian kernel of ``suite``.
        append: added to the kernel command line.
        files: absolute path in the guest to a file or directory of this machine, or to bytes.
        accel: ``auto``, ``kvm`` or ``tcg``.
        arch: Debian's name of it.
        suite: the name of a Debian release.
        mirror: URL of Debian's archive, or "" for $KPROBES_DEBIAN_MIRROR, else this host's own.
        boot_timeout_s: how long the guest may take until it can run commands.
        saved: a directory of ``Machine.save``, or None. That guest goes on then, in a tenth of
            the time of a boot, and all other options but ``boot_timeout_s`` are its own. QEMU and
            the boot image have to be those of then; nothing is random anew, and its wall clock
            goes on from then.
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
    saved: Path | None = None

    def __post_init__(self) -> None:
        if self.saved is not None and self._has_others:
            raise UsageError("a saved guest has the options that it was booted with")
        if self.arch not in MACHINE_TYPES:
            raise UsageError(f"no guests of {self.arch!r}; there are: {', '.join(MACHINE_TYPES)}")
        if not 64 <= self.memory_mib <= 1 << 20:
            raise UsageError(f"a guest with {self.memory_mib} MiB of memory: 64 is the least")
        if not 1 <= self.cpus <= 255:
            raise UsageError(f"a guest with {self.cpus} CPUs: 1 to 255")
        if any(char in self.append for char in "\n\0"):
            raise UsageError("a kernel command line has one line")

    @property
    def _has_others(self) -> bool:
        none = MachineOptions()
        return replace(self, saved=None, boot_timeout_s=none.boot_timeout_s) != none

    @property
    def machine_type(self) -> MachineType:
        """The machine for this architecture."""
        return MACHINE_TYPES[self.arch]


class Places(Struct, frozen=True, kw_only=True):
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
    options: MachineOptions, *, kernel: Path, accel: Accel, places: Places, is_held: bool = False
) -> list[str]:
    """Return the command that boots this guest.

    Args:
        options: of the guest.
        kernel: its boot image.
        accel: how QEMU runs it.
        places: its sockets and files.
        is_held: whether it stands before its first instruction until it is let run.
    """
    machine_type = options.machine_type
    tcg = ",thread=multi" if accel is Accel.TCG else ""
    ram = f"size={options.memory_mib}M,share=on,mem-path={_escaped(places.ram)}"
    return [
        *(machine_type.program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", f"{machine_type.machine},memory-backend=ram", "-accel", f"{accel}{tcg}"),
        *(
            "-cpu",
            machine_type.cpu[accel],
            "-smp",
            str(options.cpus),
            "-m",
            f"{options.memory_mib}M",
        ),
        *("-object", f"memory-backend-file,id=ram,{ram}"),
        *("-kernel", str(kernel), "-initrd", str(places.initramfs)),
        *("-append", kernel_command_line(options)),
        *_console(places),
        # A FIFO takes QEMU's single bytes at 950 KB/s, a socket at 280.
        *("-chardev", f"pipe,id=agent,path={_escaped(places.agent)}", *machine_type.agent_port),
        *("-chardev", f"{_server('gdb', places.stub)}", "-gdb", "chardev:gdb"),
        *("-chardev", f"{_server('qmp', places.qmp)}", "-mon", "qmp,mode=control"),
        *(("-S",) if is_held else ()),
    ]


def kernel_command_line(options: MachineOptions) -> str:
    """Return what the guest's kernel is told; the user's words are last and win."""
    machine_type = options.machine_type
    # cryptomgr.notests: the kernel's tests of its ciphers take 0.25 s of 1.8 under TCG.
    words = (
        f"console={machine_type.console} quiet",
        machine_type.words,
        "panic=-1 cryptomgr.notests",
    )
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
