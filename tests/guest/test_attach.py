"""Looking at a guest beside its tracer: when there is a window, and when it is shut."""

import os

import pytest
from msgspec.structs import replace

from kprobes.arch.registry import machine
from kprobes.errors import TargetError
from kprobes.guest.attach import attach_readonly, registers_of, tracer_at_work
from kprobes.guest.journal import RamMap, process_start
from tests.build.journals import dead_pid, make_entry
from tests.build.stub import FakeStub
from tests.build.stub_client import opened

WINDOW = RamMap(
    pid=os.getpid(),
    started=process_start(os.getpid()),
    runs=(),
    arch="x86_64",
    registers={"cr3": 0x1000},
)


def test_the_tracer_at_work_is_the_one_that_lives_and_left_a_window() -> None:
    dead = replace(make_entry("qemu:/s.sock"), window=WINDOW)
    closed = make_entry("qemu:/s.sock", is_live=True)
    open_ = replace(make_entry("qemu:/s.sock", is_live=True), window=WINDOW)

    assert tracer_at_work([dead, closed]) is None
    assert tracer_at_work([dead, closed, open_]) is open_


@pytest.mark.parametrize(
    "window",
    [
        replace(WINDOW, pid=dead_pid()),
        replace(WINDOW, started="1"),
        replace(WINDOW, pid=dead_pid(), started=""),
    ],
)
def test_a_qemu_that_has_ended_is_not_looked_into(window: RamMap) -> None:
    with pytest.raises(TargetError, match="has ended"), attach_readonly(window):
        pass


def test_runs_that_cannot_be_are_told() -> None:
    window = replace(WINDOW, runs=((0x1000, 0x1000, 0), (0, 0x1000, 0)))

    with pytest.raises(TargetError, match="cannot be looked into"), attach_readonly(window):
        pass


def test_memory_without_a_kernel_is_told() -> None:
    # A page of this process, which is not a page table.
    data = bytearray(0x2000)
    at = id(data)

    with (
        pytest.raises(TargetError),
        attach_readonly(replace(WINDOW, runs=((0, 0x1000, at & -0x1000),))),
    ):
        pass


def test_a_stub_without_the_register_that_leads_to_the_page_tables_is_told() -> None:
    with opened(FakeStub()) as stub:
        first, _ = registers_of(stub, machine("x86_64"))

    with pytest.raises(TargetError, match="does not show register cr3 of vCPU 1"):
        first["cr3"]
