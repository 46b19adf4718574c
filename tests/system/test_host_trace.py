"""``kprobe`` on the kernel that it runs on: end to end, refusals, foreign state, faults."""

import re
import shlex

import pytest

from kprobes.transport.qemu import Machine
from tests.build.json_lines import objects
from tests.build.waiting import becomes_true
from tests.system.foreign import (
    NO_OTHERS,
    OTHERS,
    RUNS,
    STATE,
    TRACING,
    attempt,
    ours,
    run,
    text_of,
)

pytestmark = pytest.mark.guest

_OPEN = "'p:open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring how->flags'"
_HELD = "'touch /tmp/up; until [ -e /tmp/down ]; do sleep 0.1; done; rm /tmp/up /tmp/down'"
_LEFT = "rm -f /tmp/up /tmp/down"
"""What a command leaves that its trace has killed."""
_HELD_STILL = "ps -o args | grep -c '^/bin/sh -c touch /tmp/up' || true"
"""How many of these commands run."""
_STOP = f"""
cd {TRACING}/instances/kprobes-*
tracer=${{PWD#*/kprobes-}}
kill -STOP ${{tracer%%-*}}
"""
_CONTINUE = "kill -CONT ${tracer%%-*}"
# Its tracer looks once a second, and would find them disabled and still there.
_TAKE_AWAY = f"""
{_STOP}
cd {TRACING}
for i in instances/kprobes-*; do echo 0 > $i/events/enable; done
for e in $(cut -d: -f2 kprobe_events | cut -d' ' -f1); do echo -:$e >> kprobe_events; done
{_CONTINUE}
touch /tmp/down
"""
_HIDDEN = """
sysctl -qw kernel.kptr_restrict=2
kprobe doctor --target host
sysctl -qw kernel.kptr_restrict=0
"""
_UNMOUNTED = f"""
umount {TRACING}
kprobe trace -q 'p:quiet do_sys_openat2' --comm cat -- 'cat /proc/version'
mount | grep -c tracefs
mount -t tracefs none {TRACING}
"""
_FLOOD_WHILE_IT_IS_STOPPED = f"""
{_STOP}
for i in 1 2; do dd if=/dev/zero of=/dev/null bs=1 count=20000 2>/dev/null & done; wait
echo 0 > tracing_on
cat per_cpu/cpu*/stats
{_CONTINUE}
touch /tmp/down
"""
_PATIENCE_S = 240
"""A guest starts Python within seconds, but beside other guests takes minutes."""
_once = pytest.mark.parametrize("any_host_guest", ["bookworm"], ids=["6.1"], indirect=True)


def test_a_trace_of_a_command_on_this_machine(any_host_guest: Machine) -> None:
    guest = any_host_guest

    shown = run(guest, f"kprobe trace {_OPEN} 'r:back do_sys_openat2 $retval' --comm cat "
                "--exit-status=ignore -- 'cat /proc/version /no/such'")  # fmt: skip

    assert re.search(r"cat-\d+ .*: open: \(do_sys_openat2\+0x\w+/0x\w+\) dfd=-100 "
                     r'path="/no/such" arg3=\d+\n', shown)  # fmt: skip
    assert re.search(r": back: \(\w+\+0x\w+/0x\w+ <- do_sys_openat2\) arg1=-2\n", shown)
    assert re.search(r"open +2 +do_sys_openat2", shown)
    assert "cat /proc/version /no/such: exit status 1" in shown
    assert "guest" not in shown
    assert ours(guest) == ""


@_once
def test_a_command_and_its_children_are_recorded_and_nobody_else(any_host_guest: Machine) -> None:
    guest = any_host_guest
    others = guest.start("while :; do cat /etc/group; sleep 0.1; done")
    command = "cat /etc/passwd; setsid sh -c 'cat /etc/passwd; echo up $$' & wait; exit 3"
    try:
        words = f"kprobe trace {_OPEN} 'r:got vfs_read' -- {shlex.quote(command)}"
        told = attempt(guest, words, _PATIENCE_S)
    finally:
        others.kill()

    shown = text_of(told)
    assert told.status == 3, shown
    assert len(re.findall(r' cat-\d+ .* path="/etc/passwd"', shown)) == 2
    assert "/etc/group" not in shown
    assert not re.search(r" (kprobe|python3?|kworker\S*)-\d+ +\[", shown)
    assert ours(guest) == ""


def test_a_refusal_in_the_middle_takes_the_earlier_ones_back(any_host_guest: Machine) -> None:
    guest = any_host_guest

    refused = attempt(guest, "kprobe trace 'p:a vfs_read' 'p:b vfs_read+1' 'p:c vfs_write' -- true")

    assert refused.status == 4
    assert "error: " in text_of(refused)
    assert "  Command: p:b vfs_read+1\n               ^\n" in text_of(refused)
    assert "Traceback" not in text_of(refused)
    assert ours(guest) == ""


@_once
def test_the_state_of_others_survives_runs_that_are_killed(any_host_guest: Machine) -> None:
    guest = any_host_guest
    run(guest, OTHERS)
    try:
        before = run(guest, STATE)
        run(guest, f"cat > /tmp/runs.py <<'EOF'\n{RUNS}\nEOF\n")

        ran = run(guest, "python3 /tmp/runs.py 7 10", 300)
        restored = run(guest, "kprobe restore")

        killed = re.search(r"killed (\d+) of 10", ran)
        assert killed is not None
        assert int(killed[1]) >= 1
        assert run(guest, STATE) == before
        assert ours(guest) == "", restored
    finally:
        run(guest, NO_OTHERS)


@_once
def test_a_live_tracer_is_not_restored_away(any_host_guest: Machine) -> None:
    guest = any_host_guest
    running = guest.start(
        f"kprobe trace -q --all-tasks 'p:alive vfs_write' -o /tmp/alive.txt -- {_HELD}"
    )
    _await(guest, "[ -e /tmp/up ]")

    told = run(guest, "kprobe restore --target host")
    shown = run(guest, "kprobe status --target host")
    (listed,) = objects("status", run(guest, "kprobe status --format json"))
    run(guest, "touch /tmp/down")

    assert "left alone" in told
    assert re.match(r"this machine's kernel: 1 event of process \d+, which is at work\n"
                    r"    p:kprobes_\w+/alive  vfs_write\n", shown)  # fmt: skip
    assert listed["is_at_work"]
    assert listed["events"][0].endswith("/alive vfs_write")
    assert running.wait(180).status == 0
    assert ": alive: (vfs_write+0x" in run(guest, "tail -n 3 /tmp/alive.txt")


@_once
def test_events_that_somebody_takes_away_end_the_trace(any_host_guest: Machine) -> None:
    guest = any_host_guest
    running = guest.start(f"kprobe trace -q 'p:gone vfs_write' -o /tmp/gone.txt -- {_HELD}")
    _await(guest, "[ -e /tmp/up ]")
    run(guest, _TAKE_AWAY)

    ended = running.wait(180)
    run(guest, _LEFT)

    assert ended.status == 1
    assert "took this session's events away" in text_of(ended)
    assert ours(guest) == ""


@_once
def test_events_that_somebody_disables_end_the_trace_at_once(any_host_guest: Machine) -> None:
    guest = any_host_guest
    running = guest.start(f"kprobe trace 'p:off vfs_write' -o /tmp/off.txt -- {_HELD}")
    _await(guest, "[ -e /tmp/up ]")
    run(guest, f"cd {TRACING}/instances/kprobes-*/events/kprobes_*; echo 0 > off/enable")

    # Its command would run on.
    ended = running.wait(180)
    run(guest, _LEFT)

    assert ended.status == 1
    assert run(guest, _HELD_STILL) == "0\n"
    assert "rm /tmp/up /tmp/down: killed, because the trace was over" in text_of(ended)
    assert "somebody else enabled or disabled this session's events" in text_of(ended)
    assert ours(guest) == ""


@_once
def test_a_ring_that_overruns_is_told_with_the_kernels_own_counts(any_host_guest: Machine) -> None:
    guest = any_host_guest
    running = guest.start(
        "kprobe trace 'p:many vfs_write' --all-tasks --comm dd --strict --buffer-size 64K "
        f"-o /dev/null -- {_HELD}"
    )
    _await(guest, "[ -e /tmp/up ]")

    counted = run(guest, _FLOOD_WHILE_IT_IS_STOPPED)
    told = running.wait(300)

    words = text_of(told)
    kernels = sum(int(found) for found in re.findall(r"(?:overrun|dropped events): (\d+)", counted))
    lost = re.search(r"([\d,]+) events? lost: a larger --buffer-size", words)
    recorded = re.search(r"([\d,]+) events", words)
    assert told.status == 6, words
    assert lost is not None
    assert recorded is not None
    assert int(lost[1].replace(",", "")) == kernels > 30_000
    assert 0 < int(recorded[1].replace(",", "")) < 10_000


@_once
def test_a_full_disk_ends_the_trace_and_puts_all_back(any_host_guest: Machine) -> None:
    guest = any_host_guest
    run(guest, "mkdir -p /tmp/small; mount -t tmpfs -o size=64k none /tmp/small")
    try:
        told = attempt(guest, "kprobe trace 'p:many vfs_write' -o /tmp/small/out.txt -- "
                    "'for i in $(seq 2000); do echo; done > /dev/null'")  # fmt: skip
    finally:
        run(guest, "umount /tmp/small")

    assert told.status == 1
    assert "No space left on device" in text_of(told)
    assert ours(guest) == ""


@_once
def test_a_recording_of_this_machine_has_each_event_and_its_task(any_host_guest: Machine) -> None:
    guest = any_host_guest
    command = "dd if=/dev/zero of=/dev/null bs=1 count=5000 2>/dev/null; cat /proc/version"
    probes = f"{_OPEN} 'r:got vfs_read bytes=$retval:s64' --comm dd --comm cat"

    told = run(guest, f"kprobe record -t host -o /tmp/x.rec {probes} -- '{command}'")
    shown = run(guest, "kprobe report /tmp/x.rec -o /tmp/x.txt; cat /tmp/x.txt")
    (info,) = objects("info", run(guest, "kprobe info /tmp/x.rec --format json"))
    run(guest, "rm /tmp/x.rec /tmp/x.txt")

    lines = shown.splitlines()
    assert re.search(r"\n  got +5,\d+ +vfs_read\n", told)
    assert len([line for line in lines if re.search(r" dd-\d+ .* bytes=1$", line)]) == 5000
    assert len([line for line in lines if 'path="/proc/version"' in line and "cat-" in line]) == 1
    assert not any("<...>" in line for line in lines)
    assert info["recorded"] == len([line for line in lines if not line.startswith("#")])
    assert (info["target"], info["lost"], info["is_ended"]) == ("host", 0, True)
    assert ours(guest) == ""


@_once
def test_handlers_are_refused_with_what_works_instead(any_host_guest: Machine) -> None:
    run(any_host_guest, "echo > /tmp/handlers.py")

    told = attempt(
        any_host_guest, "kprobe trace --target host --python /tmp/handlers.py 'p vfs_read'"
    )

    assert told.status == 2
    assert "for event in kernel.events()" in text_of(told)


@_once
def test_check_shows_what_the_kernel_is_given(any_host_guest: Machine) -> None:
    shown = attempt(any_host_guest, "kprobe check --format json 'p vfs_read file->f_mode' "
                 "'p vfs_read now=$current->pid'")  # fmt: skip
    printed = [line for line in text_of(shown).splitlines() if line[:1] == "{"]
    first, second = objects("check", "\n".join(printed))

    assert re.fullmatch(r"p:kprobes/p_vfs_read_0 vfs_read arg1=\+\d+\(%di\):u32",
                        first["places"][0]["spelled"])  # fmt: skip
    assert second["verdict"] == "refused"


@_once
def test_obstacles_are_told_with_what_helps(any_host_guest: Machine) -> None:
    guest = any_host_guest
    hidden = run(guest, _HIDDEN)
    unmounted = run(guest, _UNMOUNTED)

    assert "kernel.kptr_restrict" in hidden
    assert ": quiet: (do_sys_openat2+0x" in unmounted
    assert unmounted.splitlines()[-1] == "0"


def _await(guest: Machine, condition: str) -> None:
    if not becomes_true(lambda: guest.run(condition, _PATIENCE_S).status == 0, _PATIENCE_S):
        # What its tracer does instead.
        state = f"ps; cat /proc/loadavg /proc/[0-9]*/stack; ls {TRACING}/instances; dmesg | tail"
        raise AssertionError(f"{condition}\n{text_of(guest.run(state, _PATIENCE_S))}")
