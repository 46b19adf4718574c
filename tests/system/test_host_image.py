"""The guests that the tests of the host target run in."""

import pytest

from kprobes.transport.qemu import Machine
from tests.system.conftest import Boot

pytestmark = pytest.mark.guest


def test_our_package_and_numpy_run_inside(any_host_guest: Machine) -> None:
    lines = "import numpy, kprobes.ring.merge, kprobes.sinks; print(numpy.arange(3).sum())"

    ran = any_host_guest.run(["python3", "-W", "error", "-c", lines])
    helped = any_host_guest.run("kprobe --help")

    assert (ran.status, ran.output) == (0, b"3\n")
    assert helped.status == 0
    assert helped.output.startswith(b"usage: kprobe")


def test_tracefs_is_mounted(any_host_guest: Machine) -> None:
    listed = any_host_guest.run("cat /sys/kernel/tracing/kprobe_events")

    assert (listed.status, listed.output) == (0, b"")


def test_the_tracers_of_others_run_inside(boot_host: Boot) -> None:
    guest = boot_host("bookworm", "trace-cmd", "perf")

    recorded = guest.run(
        "cd /tmp && trace-cmd record -q -e sched_switch sleep 0.2 && trace-cmd report"
    )
    told = guest.run("perf version")

    assert recorded.status == 0, recorded.output
    assert b"sched_switch" in recorded.output
    assert told.output.startswith(b"perf version 6.1")
