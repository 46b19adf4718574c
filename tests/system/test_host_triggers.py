"""Triggers of the kernel that ``kprobe`` runs on: its own, in an instance of ours."""

import re

import pytest

from kprobes.transport.qemu import Machine
from tests.system.conftest import SUITES
from tests.system.foreign import attempt, ours, run, text_of

pytestmark = pytest.mark.guest

# Before, tracing is turned on and off for all instances at once.
_since_5_18 = pytest.mark.parametrize(
    "any_host_guest",
    [suite for name, suite in SUITES.items() if name != "5.10"],
    ids=[name for name in SUITES if name != "5.10"],
    indirect=True,
)

_READ = "dd if=/dev/zero of=/dev/null bs={} count={} 2>/dev/null"
_TWICE = f"{_READ.format(16, 3)}; {_READ.format(64, 2)}; {_READ.format(16, 5)}"
_LEFT = f"""
import glob, pathlib
import kprobes

def listed(probe):
    # What the kernel has in the files of ours, and what we say.
    own = pathlib.Path(*glob.glob("/sys/kernel/tracing/instances/kprobes-*"))
    (read,) = own.glob("events/kprobes_*/read/trigger")
    return read.read_text().splitlines(), list(probe.triggers)

with kprobes.host() as kernel:
    kernel.choose_tasks(comms=["dd"])
    read = kernel.probe("p:read vfs_read count", triggers=["traceoff:3 if count == 64"])
    wide = kernel.probe("p:wide vfs_write count", enabled=False)
    read.trigger("enable_event:kprobes:wide:1 if count == 64")
    with kernel.record() as trace:
        before = listed(read)
        kernel.run(["sh", "-c", {_TWICE!r}])
        after = listed(read)
        read.trigger("!traceoff")
        wide.disable()
        kernel.run(["sh", "-c", {_READ.format(16, 7)!r}])
    print("before", *before, sep="\\n")
    print("after", *after, sep="\\n")
    print("end", read.triggers, sep="\\n")
    sizes = [(e.name, e["count"]) for e in trace if e["count"] in (16, 64)]
    print("sizes", sizes)
"""


@_since_5_18
def test_tracing_ends_with_a_hit_and_what_the_command_does_goes_on(
    any_host_guest: Machine,
) -> None:
    guest = any_host_guest

    shown = run(guest, "kprobe trace -t host 'p:read vfs_read count' --trigger "
                       "'traceoff if count == 64' 'p:back vfs_write count' --comm dd --all-tasks "
                       f"-- '{_TWICE}; echo done >&2'")  # fmt: skip

    counts = re.findall(r"(read|back): .*count=(\d+)$", shown, re.MULTILINE)
    assert counts[-1] == ("read", "64"), shown
    assert counts.count(("read", "16")) == counts.count(("back", "16")) == 3
    assert "done" in shown
    assert ours(guest) == ""


@_since_5_18
def test_what_is_left_is_what_its_files_say_and_an_event_is_enabled_by_a_hit(
    any_host_guest: Machine,
) -> None:
    guest = any_host_guest
    run(guest, f"cat > /tmp/left.py <<'EOF'\n{_LEFT}\nEOF\n")

    told = run(guest, "python3 -W error /tmp/left.py").splitlines()

    before, after, end = (told.index(word) for word in ("before", "after", "end"))
    kernels, own = told[before + 1 : before + 3]
    comm = '(comm == "dd") && (count == 64)'
    named = re.sub(r"kprobes_\w+:", "kprobes:", kernels)
    # The tasks that are chosen stand in the kernel's filters.
    assert named.replace(comm, "count == 64") == own, told
    assert f"traceoff:count=3 if {comm}" in kernels
    left, own_left = told[after + 1 : after + 3]
    assert "traceoff:count=2" in left
    assert "wide:count=0" in left
    assert own_left == own.replace("count=3", "count=2").replace("count=1", "count=0")
    assert told[end + 1] == "('enable_event:kprobes:wide:count=0 if count == 64',)"
    sizes = told[-1]
    # The write of the first one that was enabled comes when tracing is off.
    assert sizes.count("('read', 64)") == 1
    assert sizes.count("('read', 16)") == 3 + 7
    assert sizes.count("wide") == 0
    assert ours(guest) == ""


@_since_5_18
def test_a_stop_ends_the_trace_at_the_hit(any_host_guest: Machine) -> None:
    guest = any_host_guest

    told = attempt(guest, "kprobe trace -t host 'p:read vfs_read count' --trigger "
                          "'stop if count == 64' --comm dd --all-tasks "
                          f"-- '{_TWICE}; sleep 1000'")  # fmt: skip

    counts = re.findall(r"read: .*count=(\d+)$", text_of(told), re.MULTILINE)
    assert counts[-1] == "64", text_of(told)
    assert counts.count("16") == 3
    assert ours(guest) == ""


def test_what_would_see_the_hits_of_everybody_is_refused_with_words(
    any_host_guest: Machine,
) -> None:
    guest = any_host_guest

    told = attempt(guest, "kprobe trace -t host 'p vfs_read' --trigger traceoff -- true")

    assert told.status not in (0, None)
    assert "--all-tasks" in text_of(told)
    assert "Traceback" not in text_of(told)
    assert ours(guest) == ""


@pytest.mark.parametrize("any_host_guest", ["bullseye"], ids=["5.10"], indirect=True)
def test_a_trigger_that_is_everybodys_is_refused_and_that_of_an_event_is_not(
    any_host_guest: Machine,
) -> None:
    guest = any_host_guest
    probes = "kprobe trace -t host 'p:read vfs_read count' --trigger '{}' 'p:back vfs_write count' "
    chosen = f"--comm dd --all-tasks -- {_TWICE!r}"

    told = attempt(guest, probes.format("traceoff") + chosen)
    shown = run(guest, probes.format("enable_event:kprobes:back:1 if count == 64")
                       + "--disabled " + chosen)  # fmt: skip

    assert "before Linux 5.18" in text_of(told)
    counts = re.findall(r"back: .*count=(\d+)$", shown, re.MULTILINE)
    assert [each for each in counts if each in ("16", "64")] == ["64"] * 2 + ["16"] * 5
    assert ours(guest) == ""
