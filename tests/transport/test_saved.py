"""Guests in directories: what is refused of them, without any guest."""

import os
from pathlib import Path

import pytest

from kprobes.errors import FormatError, UsageError
from kprobes.transport import saved
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions

_HOLE = 1 << 20
_WITHOUT_CPUS = (
    b'{"kernel": "/k", "accel": "tcg", "memory_mib": 512, "cpus": 0, "append": "", '
    b'"arch": "amd64", "suite": "sid"}'
)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (None, "No such file or directory"),
        (b"", "Input data was truncated"),
        (b"{}", "missing required field `kernel`"),
        (_WITHOUT_CPUS, "a guest with 0 CPUs"),
    ],
)
def test_what_is_no_saved_guest_is_refused(tmp_path: Path, written: bytes | None, why: str) -> None:
    if written is not None:
        (tmp_path / "saved.json").write_bytes(written)

    with pytest.raises(FormatError, match=f"no saved guest can be had from {tmp_path}: .*{why}"):
        Machine.boot(MachineOptions(saved=tmp_path))


def test_a_saved_guest_has_its_own_options_and_has_booted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has the options that it was booted with"):
        MachineOptions(saved=tmp_path, cpus=4)
    with pytest.raises(UsageError, match="is past its first instruction"):
        Machine.boot(MachineOptions(saved=tmp_path), is_early=True)


def test_holes_of_a_file_stay_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(8 * _HOLE)
        for at, data in ((_HOLE, b"first"), (5 * _HOLE - 2, b"second")):
            file.seek(at)
            file.write(data)

    saved.copy_with_holes(source, target)

    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks * 512 < _HOLE


def test_a_file_of_nothing_but_a_hole_is_copied(tmp_path: Path) -> None:
    for size in (0, _HOLE):
        source, target = tmp_path / f"source{size}", tmp_path / f"target{size}"
        source.touch()
        os.truncate(source, size)

        saved.copy_with_holes(source, target)

        assert target.stat().st_size == size
