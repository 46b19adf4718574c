from pathlib import Path

import pytest

from kprobes.errors import UsageError
from kprobes.transport.qemu_command import (
    MACHINE_TYPES,
    Accel,
    MachineOptions,
    Places,
    command_line,
)
from kprobes.units import GIB, MIB

PLACES = Places(directory=Path("/run/a,b"), ram_directory=Path("/dev/shm/x"))
KERNEL = Path("/boot/vmlinuz")


def command(options: MachineOptions, accel: Accel = Accel.TCG) -> list[str]:
    return command_line(options, kernel=KERNEL, accel=accel, places=PLACES)


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_a_comma_in_a_path_is_doubled() -> None:
    words = command(MachineOptions())

    paths = [word for word in words if "path=/run" in word]
    assert paths
    assert all("path=/run/a,,b/" in word for word in paths)


def test_options_reach_qemu() -> None:
    words = command(MachineOptions(memory_mib=300, cpus=3, append="nokaslr"))

    assert (after(words, "-m"), after(words, "-smp")) == ("300M", "3")
    assert "size=300M" in after(words, "-object")
    assert after(words, "-append").endswith(" nokaslr")


def test_the_clock_is_reliable_and_a_panic_ends_the_guest() -> None:
    words = command(MachineOptions())

    told = set(after(words, "-append").split())
    assert {"tsc=reliable", "no_timer_check", "panic=-1", "console=ttyS0"} <= told
    assert "-no-reboot" in words


def test_only_a_translated_guest_lacks_cmpxchg16b() -> None:
    assert after(command(MachineOptions()), "-cpu") == "max,-cx16"
    assert after(command(MachineOptions()), "-accel") == "tcg,thread=multi"
    assert after(command(MachineOptions(), Accel.KVM), "-cpu") == "host"
    assert after(command(MachineOptions(), Accel.KVM), "-accel") == "kvm"


def test_ram_that_fits_below_the_hole_is_in_one_piece_beside_the_vga() -> None:
    assert MACHINE_TYPES["amd64"].ram(512) == ((0, 0xA0000, 0), (0x100000, 511 * MIB, 0x100000))


@pytest.mark.parametrize(("mib", "low"), [(3583, 3583), (3584, 3072), (8192, 3072)])
def test_ram_from_3584_mib_on_goes_on_at_4_gib(mib: int, low: int) -> None:
    runs = MACHINE_TYPES["amd64"].ram(mib)

    assert runs[1].start + runs[1].size == low * MIB
    assert [(run.start, run.size, run.offset) for run in runs[2:]] == (
        [(4 * GIB, (mib - low) * MIB, low * MIB)] if mib > low else []
    )


def test_an_arm64_guest_has_its_own_machine_and_ports() -> None:
    words = command(MachineOptions(arch="arm64", append="nokaslr"))

    assert words[0] == "qemu-system-aarch64"
    assert after(words, "-machine") == "virt,gic-version=max,memory-backend=ram"
    assert after(words, "-cpu") == "max,pauth-impdef=on"
    assert (after(words, "-device"), words.count("-serial")) == ("pci-serial,chardev=agent", 1)
    assert after(words, "-append").split() == (
        ["console=ttyAMA0", "quiet", "panic=-1", "cryptomgr.notests", "nokaslr"]
    )


@pytest.mark.parametrize("mib", [64, 512, 8192])
def test_an_arm64_guests_ram_is_in_one_piece_from_1_gib_on(mib: int) -> None:
    assert MACHINE_TYPES["arm64"].ram(mib) == ((GIB, mib * MIB, 0),)


@pytest.mark.parametrize(
    ("arch", "head", "boots"),
    [
        ("amd64", bytes(0x202) + b"HdrS", True),
        ("amd64", bytes(56) + b"ARMd", False),
        ("arm64", bytes(56) + b"ARMd", True),
        ("arm64", b"MZ\0\0zimg", True),
        ("arm64", b"\x1f\x8b\x08", True),
        ("arm64", bytes(0x202) + b"HdrS", False),
        ("arm64", b"", False),
    ],
)
def test_a_boot_image_is_known_by_its_first_bytes(arch: str, head: bytes, boots: bool) -> None:
    machine_type = MACHINE_TYPES[arch]

    assert machine_type.boots(head[: machine_type.head_size]) == boots


@pytest.mark.parametrize(
    "wrong",
    [{"arch": "riscv64"}, {"memory_mib": 8}, {"cpus": 0}, {"append": "a\nb"}],
    ids=str,
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, str | int]) -> None:
    with pytest.raises(UsageError):
        MachineOptions(**wrong)  # pyright: ignore[reportArgumentType] - several types in one table
