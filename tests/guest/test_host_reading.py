"""Our reader beside the kernel's own ``trace`` of the same records, in guests of every kernel.

``trace`` shows a task by the last name that was noted for its pid, our reader by its name at the
hit; so where tasks get new names, names are judged by the kernel's own events about that.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.build import host_reading
from tests.guest.conftest import SUITES, boot_or_skip, host_options

pytestmark = pytest.mark.guest

SCRIPT = Path(host_reading.__file__)
OPEN = (
    "p:kp/open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring flags=+0($arg3):x64"
    " bytes=+0($arg2):x8[4] both=+0($arg3):u32[2]"
)
OPENED = "r:kp/opened do_sys_openat2 fd=$retval:s64 low=$retval:b4@2/32 x=$retval:x16"
PPID = (
    "p:kp/ppid __x64_sys_getppid where=%ip:symbol me=$comm:string bad=+0($stack0):string"
    " a=%sp:u8 b=%sp:s8 c=%sp:s16 d=%cs:u32 e=%sp:u64 f=@jiffies:x64"
)
DEFINITIONS = [OPEN, OPENED, PPID]
CLOCKS = ("local", "global", "mono", "mono_raw", "boot", "counter", "uptime", "perf", "x86-tsc")
LINE = re.compile(
    rb"(?P<comm>.{16})-(?P<pid>\d+) +(?P<rest>\[\d+\] \S+ +[\d.]+: (?P<event>\w+): .*)"
)
RENAMED = re.compile(rb"pid=(\d+) oldcomm=(.*) newcomm=(.*) oom_score_adj=.*")
NEW = re.compile(rb"pid=(\d+) comm=(.*) clone_flags=.*")


RUNS: dict[str, dict[str, Any]] = {
    "plain": {"definitions": DEFINITIONS},
    "tasks": {"definitions": DEFINITIONS, "workload": "tasks", "is_named": True},
    "flood": {"definitions": [PPID], "workload": "flood", "size_kb": 64},
    **{f"clock {clock}": {"definitions": DEFINITIONS, "clock": clock} for clock in CLOCKS},
}


@dataclass(frozen=True)
class Read:
    """What came of a run."""

    kernel: bytes
    ours: bytes
    lost: int
    count: int


Reading = Callable[[str], Read]


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def reading(request: pytest.FixtureRequest) -> Iterator[Reading]:
    """All runs of a kernel, by name."""
    options = host_options(request.param, files={"/root/host_reading.py": SCRIPT})
    with boot_or_skip(options) as guest:
        command = ["python3", "-W", "error", "/root/host_reading.py", "/tmp", json.dumps(RUNS)]
        done = guest.run(command, timeout_s=300)
        assert done.status == 0, done.output.decode()

        def read(name: str) -> Read:
            files = [guest.run(["cat", f"/tmp/{name}/{it}"]).output for it in ("kernel", "ours")]
            told = json.loads(guest.run(["cat", f"/tmp/{name}/told"]).output)
            return Read(files[0], files[1], told["lost"], told["count"])

        yield read


def test_our_text_is_the_kernels_byte_for_byte(reading: Reading) -> None:
    run = reading("plain")

    assert run.ours == run.kernel
    assert run.count > 1000
    assert run.lost == 0


@pytest.mark.parametrize("clock", CLOCKS)
def test_every_clock_is_shown_as_the_kernel_shows_it(reading: Reading, clock: str) -> None:
    run = reading(f"clock {clock}")

    assert run.ours == run.kernel


def test_tasks_have_the_names_that_they_had_at_the_hit(reading: Reading) -> None:
    run = reading("tasks")
    names: dict[int, bytes] = {}
    expected: list[bytes] = []
    for found in filter(None, map(LINE.fullmatch, run.kernel.splitlines())):
        words = found["rest"].partition(b": ")[2].partition(b": ")[2]
        pid = int(found["pid"])
        if found["event"] == b"task_rename" and (renamed := RENAMED.fullmatch(words)):
            names[int(renamed[1])] = renamed[3]
        elif found["event"] == b"task_newtask" and (new := NEW.fullmatch(words)):
            names[int(new[1])] = new[2]
        else:
            comm = names.get(pid, found["comm"].lstrip())
            expected.append(b"%16b-%-7d %b" % (comm, pid, found["rest"]))

    shown = [line for line in run.ours.splitlines() if not line.startswith(b"#")]

    assert shown == expected
    assert {b"ls", b"busybox", b"python3"} <= {line[:16].strip() for line in shown}


def test_what_a_small_ring_lost_is_counted(reading: Reading) -> None:
    run = reading("flood")
    counts = re.search(rb"entries-written: (\d+)/(\d+)", run.kernel)
    assert counts is not None
    kept, written = int(counts[1]), int(counts[2])

    shown = [line for line in run.kernel.splitlines() if not line.startswith(b"#")]

    assert run.lost == written - kept > 10_000
    assert run.count == kept
    assert run.ours.splitlines()[-kept:] == shown
