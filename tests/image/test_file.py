"""Kernel files to kernels."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.errors import FormatError, MemoryFault, TargetError
from kprobes.image.file import KernelImage, check_same_build, kernel_from_image, read_image
from tests.build.elf import build_id_note, bzimage, gzip, vmlinux
from tests.build.linux import BANNER, BUILD_ID, LINK, LinuxSpec, boot


@pytest.fixture
def image(tmp_path: Path) -> KernelImage:
    guest = boot(LinuxSpec(slide=0))
    data = guest.ram.read(guest.phys(LINK), 0x4_0000)
    file = vmlinux([(0, b"percpu"), (LINK, data)], notes=build_id_note(BUILD_ID))
    path = tmp_path / "vmlinuz"
    path.write_bytes(bzimage(gzip(file)))
    return read_image(path)


def test_a_files_kernel_is_at_its_link_addresses(image: KernelImage) -> None:
    kernel = kernel_from_image(image)

    assert (kernel.banner, kernel.build_id, kernel.slide) == (BANNER, BUILD_ID, 0)
    assert kernel.symbols.named("_etext").addr == kernel.text[1]
    assert kernel.types is not None


def test_a_file_can_be_read_as_memory(image: KernelImage) -> None:
    assert image.read(LINK, 4) == b"\x90" * 4
    assert image.read(1, 3) == b"erc"
    with pytest.raises(MemoryFault, match="not in vmlinuz"):
        image.read(LINK + 0x4_0000 - 2, 4)
    with pytest.raises(MemoryFault):
        image.read(LINK - 1, 1)


def test_a_running_kernel_of_the_same_build_is_accepted(image: KernelImage) -> None:
    check_same_build(kernel_from_image(image), image)


@pytest.mark.parametrize("other", [b"\xab\xcd", b""])
def test_another_build_is_refused_and_both_are_named(image: KernelImage, other: bytes) -> None:
    kernel = replace(kernel_from_image(image), build_id=other)

    with pytest.raises(TargetError) as caught:
        check_same_build(kernel, image)

    assert BUILD_ID.hex() in str(caught.value)
    assert (other.hex() or "unknown") in str(caught.value)


def test_no_build_id_on_either_side_is_no_proof(image: KernelImage) -> None:
    kernel = replace(kernel_from_image(image), build_id=b"")

    with pytest.raises(TargetError):
        check_same_build(kernel, replace(image, build_id=b""))


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"cannot read .*absent: No such file"):
        read_image(tmp_path / "absent")


def test_a_file_that_is_no_kernel_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")

    with pytest.raises(FormatError, match="text: neither a vmlinux nor"):
        read_image(tmp_path / "text")


def test_a_kernel_for_another_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vmlinux").write_bytes(vmlinux([(LINK, b"")], machine=243))

    with pytest.raises(TargetError, match="number 243 is not supported"):
        read_image(tmp_path / "vmlinux")


def _make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((4 << 30) + 1)


def _make_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _make_none(path: Path) -> None:
    del path


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "not a regular file"),
        (_make_zero, "not a regular file"),
        (Path.mkdir, "not a regular file"),
        (_make_huge, "larger than 4 GiB"),
        (_make_none, "No such file"),
    ],
)
def test_what_has_no_end_is_not_read(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "vmlinux"
    make(path)

    with pytest.raises(TargetError, match=rf"^cannot read {path}: {why}"):
        read_image(path)
