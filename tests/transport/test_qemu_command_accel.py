from functools import partial
from pathlib import Path

import pytest

from kprobes.errors import UnreachableError, UsageError
from kprobes.transport import qemu_command
from kprobes.transport.qemu_command import MACHINE_TYPES, Accel

choose = partial(qemu_command.choose, native="x86_64", machine="x86_64", signs=())


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "kvm"
    path.touch()
    return path


def test_a_device_without_its_module_is_not_believed(device: Path, tmp_path: Path) -> None:
    assert choose("auto", device=device, signs=(tmp_path / "kvm_intel",)) is Accel.TCG


def test_a_module_without_its_device_is_not_used(tmp_path: Path) -> None:
    assert choose("auto", device=tmp_path / "absent", signs=(tmp_path,)) is Accel.TCG


def test_module_and_device_together_give_kvm(device: Path, tmp_path: Path) -> None:
    signs = (tmp_path / "kvm_intel", tmp_path)

    assert choose("auto", device=device, signs=signs) is Accel.KVM


def test_the_user_may_insist(device: Path, tmp_path: Path) -> None:
    assert choose("kvm", device=device, signs=()) is Accel.KVM
    assert choose("tcg", device=device, signs=(tmp_path,)) is Accel.TCG


def test_kvm_without_a_device_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="absent does not exist"):
        choose("kvm", device=tmp_path / "absent", signs=())


def test_an_unknown_accelerator_is_refused() -> None:
    with pytest.raises(UsageError, match="none of auto, kvm, tcg"):
        choose("xen")


def test_kvm_runs_guests_of_this_machines_own_kind_only(device: Path, tmp_path: Path) -> None:
    foreign = partial(qemu_command.choose, native="aarch64", machine="x86_64", device=device)

    assert foreign("auto", signs=(tmp_path,)) is Accel.TCG
    with pytest.raises(UnreachableError, match="no aarch64"):
        foreign("kvm", signs=(tmp_path,))


@pytest.mark.parametrize("arch", MACHINE_TYPES)
def test_every_board_says_how_to_know_its_kvm(arch: str, tmp_path: Path) -> None:
    machine_type = MACHINE_TYPES[arch]
    absent = tmp_path / "absent"

    assert machine_type.kvm
    assert (
        qemu_command.choose("auto", machine_type.native, signs=machine_type.kvm, device=absent)
        is Accel.TCG
    )
