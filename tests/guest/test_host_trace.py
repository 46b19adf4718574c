"""``kprobe`` on the kernel that it runs on: end to end, refusals, foreign state, obstacles."""

import json
import re
import time

import pytest

from kprobes.transport.agent import Finished
from kprobes.transport.qemu import Machine

pytestmark = pytest.mark.guest

_TRACING = "/sys/kernel/tracing"
_OPEN = "'p:open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring how->flags'"
_STATE = f"""
cd {_TRACING}
cat kprobe_events uprobe_events set_event trace_options tracing_on trace_clock buffer_size_kb
cat saved_cmdlines_size tracing_cpumask current_tracer set_ftrace_filter set_event_pid
ls instances
for i in instances/*; do [ -d $i ] && cat $i/set_event $i/trace_options $i/buffer_size_kb; done
cat events/others/*/enable events/others/*/filter events/others/*/trigger
cat instances/theirs/events/others/mine/filter instances/theirs/tracing_on
"""
_OTHERS = f"""
cd {_TRACING}
echo 'p:others/mine vfs_write count=%dx:u64' >> kprobe_events
echo 'r:others/back vfs_read got=$retval:s64' >> kprobe_events
mkdir instances/theirs
echo 'count > 1' > events/others/mine/filter
echo 'count == 7' > instances/theirs/events/others/mine/filter
echo 1 > events/others/mine/enable
echo 1 > instances/theirs/events/others/back/enable
"""
_NO_OTHERS = f"""
cd {_TRACING}
echo 0 > events/others/mine/enable
rmdir instances/theirs
echo '-:others/mine' >> kprobe_events
echo '-:others/back' >> kprobe_events
"""
_RUNS = """
import os, random, signal, sys, time
from kprobes.cli.main import main
import kprobes.cli.tracing, kprobes.cli.trace, kprobes.host_session

rng = random.Random(int(sys.argv[1]))
words = ["trace", "-q", "--target", "host", "-o", "/tmp/out.txt",
         "p:a vfs_write count", "--filter", "count > 0",
         "r:b vfs_read $retval", "p:c do_sys_openat2 dfd=$arg1", "--", "ls / >/dev/null"]
longest, killed = 0.0, 0

def run():
    # A process of its own, which has imported everything already.
    child = os.fork()
    if child == 0:
        code = main(words)
        sys.stderr.flush()
        os._exit(code)
    return child

for number in range(int(sys.argv[2])):
    began = time.monotonic()
    child = run()
    if number % 2:
        time.sleep(rng.random() * longest)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    killed += os.WIFSIGNALED(status)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    if not number % 2:
        longest = max(longest, time.monotonic() - began)
print("killed", killed, "of", number + 1, "longest", longest)
"""
_HELD = "'touch /tmp/up; until [ -e /tmp/down ]; do sleep 0.1; done; rm /tmp/up /tmp/down'"
_TAKE_AWAY = f"""
cd {_TRACING}
for i in instances/kprobes-*; do echo 0 > $i/events/enable; done
for e in $(cut -d: -f2 kprobe_events | cut -d' ' -f1); do echo -:$e >> kprobe_events; done
touch /tmp/down
"""
_HIDDEN = """
sysctl -qw kernel.kptr_restrict=2
kprobe doctor --target host
sysctl -qw kernel.kptr_restrict=0
"""
_UNMOUNTED = f"""
umount {_TRACING}
kprobe trace -q 'p:quiet do_sys_openat2' --comm cat -- 'cat /proc/version'
mount | grep -c tracefs
mount -t tracefs none {_TRACING}
"""
_FLOOD = (
    "for i in 1 2 3 4; do dd if=/dev/zero of=/dev/null bs=1 count=20000 2>/dev/null & done; wait"
)
_once = pytest.mark.parametrize("any_host_guest", ["bookworm"], ids=["6.1"], indirect=True)


def _run(guest: Machine, command: str, timeout_s: float = 120) -> Finished:
    return guest.run(command, timeout_s)


def _text(finished: Finished) -> str:
    return finished.output.decode(errors="backslashreplace")


def _ok(guest: Machine, command: str, timeout_s: float = 120) -> str:
    finished = _run(guest, command, timeout_s)
    assert finished.status == 0, (command[:200], _text(finished))
    return _text(finished)


def _ours(guest: Machine) -> str:
    # What of ours is there: nothing, between runs.
    look = "cat kprobe_events; ls instances; ls ~/.local/state/kprobes/journal 2>/dev/null"
    return "\n".join(
        line
        for line in _ok(guest, f"cd {_TRACING}; {look}; true").splitlines()
        if "kprobes" in line
    )


def test_a_trace_of_a_command_on_this_machine(any_host_guest: Machine) -> None:
    guest = any_host_guest

    shown = _ok(guest, f"kprobe trace {_OPEN} 'r:back do_sys_openat2 $retval' --comm cat -- "
                "'cat /proc/version /no/such'")  # fmt: skip

    assert re.search(r"cat-\d+ .*: open: \(do_sys_openat2\+0x\w+/0x\w+\) dfd=-100 "
                     r'path="/no/such" arg3=\d+\n', shown)  # fmt: skip
    assert re.search(r": back: \(\w+\+0x\w+/0x\w+ <- do_sys_openat2\) arg1=-2\n", shown)
    assert re.search(r"open +2 +do_sys_openat2", shown)
    assert "cat /proc/version /no/such: exit status 1" in shown
    assert "guest" not in shown
    assert _ours(guest) == ""


def test_a_refusal_in_the_middle_takes_the_earlier_ones_back(any_host_guest: Machine) -> None:
    guest = any_host_guest

    refused = _run(guest, "kprobe trace 'p:a vfs_read' 'p:b vfs_read+1' 'p:c vfs_write' -- true")

    assert refused.status == 4
    assert "error: " in _text(refused)
    assert "  Command: p:b vfs_read+1\n               ^\n" in _text(refused)
    assert "Traceback" not in _text(refused)
    assert _ours(guest) == ""


@_once
def test_the_state_of_others_survives_runs_that_are_killed(any_host_guest: Machine) -> None:
    guest = any_host_guest
    _ok(guest, _OTHERS)
    try:
        before = _ok(guest, _STATE)
        _ok(guest, f"cat > /tmp/runs.py <<'EOF'\n{_RUNS}\nEOF\n")

        ran = _ok(guest, "python3 /tmp/runs.py 7 10", 300)
        restored = _ok(guest, "kprobe restore")

        assert "killed" in ran
        assert _ok(guest, _STATE) == before
        assert _ours(guest) == "", restored
    finally:
        _ok(guest, _NO_OTHERS)


@_once
def test_a_live_tracer_is_not_restored_away(any_host_guest: Machine) -> None:
    guest = any_host_guest
    running = guest.start(f"kprobe trace -q 'p:alive vfs_write' -o /tmp/alive.txt -- {_HELD}")
    _await(guest, "[ -e /tmp/up ]")

    told = _ok(guest, "kprobe restore --target host")
    _ok(guest, "touch /tmp/down")

    assert "left alone" in told
    assert running.wait(60).status == 0
    assert ": alive: (vfs_write+0x" in _ok(guest, "tail -n 3 /tmp/alive.txt")


@_once
def test_events_that_somebody_takes_away_end_the_trace(any_host_guest: Machine) -> None:
    guest = any_host_guest
    running = guest.start(f"kprobe trace -q 'p:gone vfs_write' -o /tmp/gone.txt -- {_HELD}")
    _await(guest, "[ -e /tmp/up ]")
    _ok(guest, _TAKE_AWAY)

    ended = running.wait(60)

    assert ended.status == 1
    assert "took this session's events away" in _text(ended)
    assert _ours(guest) == ""


@_once
def test_a_ring_that_overruns_is_told_with_counts(any_host_guest: Machine) -> None:
    told = _run(
        any_host_guest,
        "kprobe trace 'p:many vfs_write' 'p:more vfs_read' --comm dd --strict --buffer-size 64K "
        f"-o /dev/null -- '{_FLOOD}'",
    )

    lost = re.search(r"([\d,]+) events? lost: a larger --buffer-size", _text(told))
    recorded = re.search(r"([\d,]+) events", _text(told))
    assert lost is None or told.status == 6
    assert recorded is not None
    total = sum(int(found[1].replace(",", "")) for found in (lost, recorded) if found)
    assert total >= 160_000, _text(told)


@_once
def test_a_full_disk_ends_the_trace_and_puts_all_back(any_host_guest: Machine) -> None:
    guest = any_host_guest
    _ok(guest, "mkdir -p /tmp/small; mount -t tmpfs -o size=64k none /tmp/small")
    try:
        told = _run(guest, "kprobe trace 'p:many vfs_write' -o /tmp/small/out.txt -- "
                    "'for i in $(seq 2000); do echo; done > /dev/null'")  # fmt: skip
    finally:
        _ok(guest, "umount /tmp/small")

    assert told.status == 1
    assert "No space left on device" in _text(told)
    assert _ours(guest) == ""


@_once
def test_handlers_are_refused_with_what_works_instead(any_host_guest: Machine) -> None:
    _ok(any_host_guest, "echo > /tmp/handlers.py")

    told = _run(any_host_guest, "kprobe trace --target host --python /tmp/handlers.py 'p vfs_read'")

    assert told.status == 2
    assert "for event in kernel.events()" in _text(told)


@_once
def test_check_shows_what_the_kernel_is_given(any_host_guest: Machine) -> None:
    shown = _run(any_host_guest, "kprobe check --format json 'p vfs_read file->f_mode' "
                 "'p vfs_read now=$current->pid'")  # fmt: skip
    first, second = (json.loads(line) for line in _text(shown).splitlines() if line[:1] == "{")

    assert re.fullmatch(r"p:kprobes/p_vfs_read_0 vfs_read arg1=\+\d+\(%di\):u32",
                        first["places"][0]["spelled"])  # fmt: skip
    assert second["verdict"] == "refused"


@_once
def test_obstacles_are_told_with_what_helps(any_host_guest: Machine) -> None:
    guest = any_host_guest
    hidden = _ok(guest, _HIDDEN)
    unmounted = _ok(guest, _UNMOUNTED)

    assert "kernel.kptr_restrict" in hidden
    assert ": quiet: (do_sys_openat2+0x" in unmounted
    assert unmounted.splitlines()[-1] == "0"


def _await(guest: Machine, condition: str) -> None:
    deadline = time.monotonic() + 60
    while guest.run(condition).status:
        assert time.monotonic() < deadline, condition
