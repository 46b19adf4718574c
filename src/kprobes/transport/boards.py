"""The machines that QEMU emulates for us: all that differs between architectures when booting."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kprobes.formats.elf import EM_AARCH64, EM_X86_64
from kprobes.transport.accel import KVM, Accel
from kprobes.units import GIB, MIB, Phys

DEFAULT_ARCH = "amd64"
"""Debian's name of what is booted unless something else is asked for."""


class RamRun(NamedTuple):
    """A piece of guest RAM: ``offset`` is where it lies in the RAM file."""

    start: Phys
    size: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
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


BOARDS: Mapping[str, Board] = {
    DEFAULT_ARCH: Board(
        program="qemu-system-x86_64",
        package="qemu-system-x86",
        # Documentation/arch/x86/boot.rst, "header".
        magics=((0x202, b"HdrS"),),
        machine="pc",
        console="ttyS0",
        agent="ttyS1",
        agent_port=("-serial", "chardev:agent"),
        # Without it 5.10 and 6.1 give up the TSC under TCG and trace by a worse clock.
        words="tsc=reliable",
        # QEMU 7.2 translates cmpxchg16b with a segment wrongly: 6.12 dies in its slab allocator.
        cpu={Accel.KVM: "host", Accel.TCG: "max,-cx16"},
        native="x86_64",
        # The device alone proves nothing: on our build machines it opens, but is of a paravirtual
        # kind that does not run stock kernels.
        kvm=tuple(Path("/sys/module", name) for name in ("kvm_intel", "kvm_amd")),
        elf=EM_X86_64,
        ram=_pc_ram,
    ),
    "arm64": Board(
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
        # KVM is no module there.
        kvm=(KVM,),
        elf=EM_AARCH64,
        ram=_virt_ram,
    ),
}
"""By Debian's name."""
