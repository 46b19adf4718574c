from pathlib import Path

import pytest

from kprobes.errors import UnreachableError, UsageError
from kprobes.transport.accel import Accel, choose


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "kvm"
    path.touch()
    return path


def test_a_device_without_its_module_is_not_believed(device: Path, tmp_path: Path) -> None:
    assert choose("auto", device=device, modules=(tmp_path / "kvm_intel",)) is Accel.TCG


def test_a_module_without_its_device_is_not_used(tmp_path: Path) -> None:
    assert choose("auto", device=tmp_path / "absent", modules=(tmp_path,)) is Accel.TCG


def test_module_and_device_together_give_kvm(device: Path, tmp_path: Path) -> None:
    modules = (tmp_path / "kvm_intel", tmp_path)

    assert choose("auto", device=device, modules=modules) is Accel.KVM


def test_the_user_may_insist(device: Path, tmp_path: Path) -> None:
    assert choose("kvm", device=device, modules=()) is Accel.KVM
    assert choose("tcg", device=device, modules=(tmp_path,)) is Accel.TCG


def test_kvm_without_a_device_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="absent does not exist"):
        choose("kvm", device=tmp_path / "absent", modules=())


def test_an_unknown_accelerator_is_refused() -> None:
    with pytest.raises(UsageError, match="none of auto, kvm, tcg"):
        choose("xen")
