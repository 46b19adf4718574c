"""The machine that runs the tests, read as it is; modules that another has loaded."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.errors import TargetError
from kprobes.host import machine as host_machine
from kprobes.host.machine import SysfsModules, open_machine
from kprobes.image.file import check_own_build
from kprobes.transport.tracefs import open_tracefs
from tests.build.kernel import make_kernel
from tests.build.loaded_module import BUILD_ID, NOTE, loaded
from tests.build.objects import FOLDER


def test_this_machine_is_read_as_uname_and_its_files_say() -> None:
    try:
        machine = open_machine()
    except TargetError as error:
        pytest.skip(f"this machine hides its kernel: {error}")

    assert machine.kernel.release == os.uname().release
    assert machine.kernel.symbols.named("vfs_read").is_text
    assert 1 <= machine.online <= machine.cpus
    assert not machine.traceable or "vfs_read" in machine.traceable


def test_tracefs_is_reached_without_being_mounted_for_others() -> None:
    def mounts() -> list[str]:
        with open("/proc/self/mounts") as file:  # noqa: PTH123 - a line each
            return [line for line in file if "tracefs" in line]

    before = mounts()
    try:
        tracefs = open_tracefs()
    except TargetError as error:
        pytest.skip(f"no tracefs for us: {error}")

    assert "available_events" in tracefs.names("")
    assert mounts() == before


def test_modules_are_told_of_by_sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_machine, "_MODULES", tmp_path)
    told, module = SysfsModules(), loaded()
    assert (told.build_ids(module), told.sections(module)) == (frozenset(), {})

    notes, sections = (tmp_path / "module" / name for name in ("notes", "sections"))
    notes.mkdir(parents=True)
    sections.mkdir()
    (notes / ".note.gnu.build-id").write_bytes(NOTE)
    (sections / ".data").write_text("0xffffffffc0200000\n")
    (sections / ".init.text").write_text("0xffffffffc0210000\n")
    # Whoever may not see where it is sees this.
    (sections / ".bss").write_text("0x0000000000000000\n")

    assert told.build_ids(module) == {BUILD_ID}
    assert told.sections(module) == {".data": 0xFFFF_FFFF_C020_0000}


def test_a_file_of_another_build_is_refused() -> None:
    kernel = make_kernel([], release="6.1.0")
    check_own_build(replace(kernel, build_id=BUILD_ID), FOLDER / "module.ko")

    with pytest.raises(TargetError, match=r"module\.ko is not this machine's kernel: its build id"):
        check_own_build(replace(kernel, build_id=bytes(20)), FOLDER / "module.ko")
    with pytest.raises(TargetError, match=r"its build id is unknown, .* 6\.1\.0 is unknown"):
        check_own_build(replace(kernel, build_id=b""), FOLDER / "module.c")
