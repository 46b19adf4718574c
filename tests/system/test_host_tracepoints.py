"""Tracepoints of the kernel that ``kprobe`` itself runs on: as the kernel's own events there."""

import re

import pytest

from kprobes.transport.qemu import Machine
from tests.system.conftest import SUITES
from tests.system.foreign import TRACING, run

pytestmark = pytest.mark.guest

_EVENT = "sched_process_exit pid=p->pid comm=p->comm:string state=p->exit_state"
_BEGIN = f"""
cd {TRACING}
mkdir instances/theirs
echo 't:others/own {_EVENT}' >> dynamic_events
echo 1 > instances/theirs/events/others/own/enable
"""
_END = f"""
cd {TRACING}
echo 0 > instances/theirs/events/others/own/enable
cat instances/theirs/trace
rmdir instances/theirs
echo '-:others/own' >> dynamic_events
"""
_TRACE = (
    f"kprobe trace -t host --all-tasks 't:own {_EVENT}' 'p:opened do_sys_openat2' --comm cat "
    "--exit-status=ignore -- 'for i in 1 2 3; do cat /proc/version; done >/dev/null' 2>&1"
)
_LINE = re.compile(r": own: (\(.*)")


@pytest.mark.parametrize("any_host_guest", [SUITES["7.x"]], ids=["7.x"], indirect=True)
def test_what_a_tracepoint_gives_is_what_the_kernels_own_event_has(any_host_guest: Machine) -> None:
    run(any_host_guest, _BEGIN)
    try:
        shown = run(any_host_guest, _TRACE)
    finally:
        theirs = run(any_host_guest, _END)

    ours, own = (
        [line for line in _LINE.findall(text) if 'comm="cat"' in line] for text in (shown, theirs)
    )
    assert len(ours) == 3
    assert ours == own
    # Each is counted where the kernel has put it, after an endbr64.
    opened = len(re.findall(r": opened: \(do_sys_openat2\+0x", shown))
    assert re.search(rf"^{opened + 3} events, 0 missed, 0 lost$", shown, re.MULTILINE), shown
    assert re.search(r"^ *own +3 ", shown, re.MULTILINE), shown
    assert re.search(rf"^ *opened +{opened} ", shown, re.MULTILINE), shown
    assert run(any_host_guest, f"cat {TRACING}/dynamic_events") == ""


@pytest.mark.parametrize("any_host_guest", [SUITES["6.1"]], ids=["6.1"], indirect=True)
def test_before_it_has_such_events_it_is_said(any_host_guest: Machine) -> None:
    shown = run(any_host_guest, f"kprobe check -t host 't {_EVENT}' 2>&1 || true")

    assert "tracepoints by t: Linux 6.5 has them, this kernel is 6.1" in shown
