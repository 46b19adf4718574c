"""Modules that KASLR has put out of a branch's reach of the kernel: arm64's, in most boots."""

from collections.abc import Iterator

import pytest

import kprobes
from kprobes.arch.aarch64 import encode
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB, Addr
from tests.build.module import LOAD, dummy
from tests.system.conftest import SUITES, boot_or_skip

pytestmark = pytest.mark.guest

BOOTS = 8
_PIECE = 1 * MIB + 4096
"""A piece of code memory, with its guard page."""


@pytest.fixture(scope="module", params=["6.1", "6.12", "7.x"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A guest whose module is far away from its kernel's text."""
    suite = SUITES[request.param]
    files = {"/dummy.ko": dummy(suite, "arm64")}
    for _ in range(BOOTS):
        with boot_or_skip(MachineOptions(suite=suite, arch="arm64", files=files)) as booted:
            assert booted.run(LOAD, 180).status == 0
            with kprobes.attach(str(booted.stub_address)) as session:
                is_far = _is_far(session)
            if is_far:
                yield booted
                return
    raise AssertionError(f"{BOOTS} boots have had their module near the kernel")


def _is_far(session: GuestSession) -> bool:
    session.driver.refresh_modules()
    kernel = session.driver.guest.kernel
    start, stop = kernel.text
    module = kernel.symbols.named("dummy_setup").addr
    # Code near the kernel's text is below it.
    return module > stop + encode.REACH or module < start - encode.REACH - 128 * MIB


def test_far_code_records_reads_and_returns_and_is_given_back(machine: Machine) -> None:
    allocated = _pieces(machine)

    with kprobes.attach(str(machine.stub_address)) as session:
        session.probe(
            "p:setup dummy:dummy_setup dev=$arg1:x64 text=+0($arg1):string\n"
            "r:made dummy:dummy_dev_init $retval\np:open do_sys_openat2 path=+0($arg2):ustring"
        )
        guest = session.driver.guest
        site = Addr(guest.kernel.symbols.named("dummy_setup").addr + 4)
        before = guest.memory.read(site, 64)
        with session.record() as trace:
            entry = encode.bl_target(site, guest.memory.read(site, 4))
            work = "ip link add d0 type dummy; cat /proc/version"
            assert machine.run(work, 180).status == 0
            taken = len(_pieces(machine)) - len(allocated)
        arena = session.driver._allocator.arena  # pyright: ignore[reportPrivateUsage] - nobody else asks
        assert arena is not None
        _, (first, stop) = arena.programs
        assert guest.memory.read(site, 64) == before

    assert entry is not None
    assert first <= entry < stop
    text = str(trace)
    assert 'path="/proc/version"' in text
    (setup,) = (line for line in text.splitlines() if " setup: " in line)
    assert "(dummy_setup" in setup
    assert 'text="' in setup
    assert text.count("<- dummy_dev_init) arg1=0") == 1
    assert taken == 2
    assert _pieces(machine) == allocated
    assert machine.run("dmesg | grep -E 'BUG:|WARNING:|Oops|Call Trace'", 180).output == b""


def _pieces(machine: Machine) -> list[str]:
    # What was given back stays in the list for a while, as unpurged.
    listed = machine.run("cat /proc/vmallocinfo", 180).output.decode().splitlines()
    return [area for area in listed if f" {_PIECE} " in area and " pages=" in area]
