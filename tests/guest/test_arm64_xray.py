"""An arm64 guest's own kprobe under the real ``kprobe xray``: before, and while it is enabled."""

import subprocess
import sys
from pathlib import Path

import pytest

from kprobes.transport.qemu import Machine

pytestmark = [pytest.mark.guest, pytest.mark.arches("arm64")]

KPROBE = Path(sys.executable).with_name("kprobe")
EVENTS = "/sys/kernel/tracing/kprobe_events"
ENABLE = "/sys/kernel/tracing/events/own/block/enable"


def xray(guest: Machine, place: str) -> str:
    command = [KPROBE, "xray", place, "--target", f"qemu:{guest.stub_address}"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True, text=True)
    return done.stdout


def test_the_guests_kprobe_is_a_brk_and_its_slot_has_the_original(guest: Machine) -> None:
    before = xray(guest, "blk_update_request+8")
    guest.run(f"echo 'p:own/block blk_update_request+8' > {EVENTS}; echo 1 > {ENABLE}")
    try:
        during = xray(guest, "blk_update_request+8")
    finally:
        guest.run(f"echo 0 > {ENABLE}; echo > {EVENTS}")

    assert "paciasp" in before
    assert "brk" not in before
    assert "the guest's own kprobe: a breakpoint; event block; before: 3f2303d5" in during
    assert [line.split()[-2:] for line in during.splitlines() if "80 00 20 d4" in line] == [
        ["brk", "#4"]
    ]
    slot = during[during.index("slot of the guest's kprobe") :].splitlines()[1:3]
    assert [line.split(maxsplit=5)[5] for line in slot] == ["paciasp", "brk     #6"]
