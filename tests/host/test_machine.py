"""The machine that runs the tests, read as it is."""

import os

import pytest

from kprobes.errors import TargetError
from kprobes.host.machine import open_machine
from kprobes.transport.tracefs import open_tracefs


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
