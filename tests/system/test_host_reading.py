"""Our reader beside the kernel's own ``trace`` of the same records, in guests of every kernel.

``trace`` shows a task by the last name that was noted for its pid, our reader by its name at the
hit; so where tasks get new names, names are judged by the kernel's own events about that.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from kprobes.transport.qemu import Machine
from tests.build import host_reading, host_steps
from tests.system.conftest import SUITES, boot_or_skip, host_options

pytestmark = pytest.mark.guest

SCRIPT = Path(host_reading.__file__)
STEPS = Path(host_steps.__file__)
BACKENDS = ("mapped", "spliced")
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
    **{
        f"clock {clock}": {"definitions": DEFINITIONS, "workload": "few calls", "clock": clock}
        for clock in CLOCKS
    },
}


class Read(Struct, frozen=True):
    """What came of a run."""

    kernel: bytes
    ours: bytes
    lost: int
    count: int
    is_mapped: bool


Reading = Callable[[str], Read]


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def kernel(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A guest that all runs of its kernel share."""
    here = Path("/root/tests/build")
    files = {f"{here / path.name}": path for path in (SCRIPT, STEPS)}
    with boot_or_skip(host_options(request.param, files=files)) as guest:
        yield guest


@pytest.fixture(scope="module")
def reading(kernel: Machine) -> Reading:
    """All runs of a kernel, by name."""
    _run(kernel, f"host_reading /tmp {shlex.quote(json.dumps(RUNS))}")
    return lambda name: _read(kernel, name)


@pytest.fixture(scope="module")
def stepwise(kernel: Machine) -> Reading:
    """What was read between bursts of hits, by the way it was."""
    _run(kernel, "host_steps /tmp/steps")
    return lambda name: _read(kernel, f"steps/{name}")


def _run(kernel: Machine, script: str) -> None:
    done = kernel.run(f"cd /root && python3 -W error -m tests.build.{script}", timeout_s=300)
    assert done.status == 0, done.output.decode()


def _read(kernel: Machine, name: str) -> Read:
    files = [kernel.run(["cat", f"/tmp/{name}/{it}"]).output for it in ("kernel", "ours")]
    told = json.loads(kernel.run(["cat", f"/tmp/{name}/told"]).output)
    return Read(files[0], files[1], told["lost"], told["count"], told.get("is_mapped", False))


def test_our_text_is_the_kernels_byte_for_byte(reading: Reading) -> None:
    run = reading("plain")

    assert run.ours == run.kernel
    assert run.count > 1000
    assert run.lost == 0


@pytest.mark.parametrize("clock", CLOCKS)
def test_every_clock_is_shown_as_the_kernel_shows_it(reading: Reading, clock: str) -> None:
    run = reading(f"clock {clock}")

    assert run.ours == run.kernel
    assert run.count > 100


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


@pytest.mark.kernels("7.x")
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_that_are_read_while_they_fill_are_the_kernels_byte_for_byte(
    stepwise: Reading, backend: str
) -> None:
    run = stepwise(backend)

    assert run.ours == run.kernel
    assert run.count == run.kernel.count(b"\n") > 1000
    assert run.count + run.lost == 2 * sum(host_steps.BURSTS)
    assert run.lost > 1000


@pytest.mark.kernels("7.x")
def test_rings_are_mapped_where_the_kernel_can(stepwise: Reading, kernel: Machine) -> None:
    release = kernel.run("uname -r").output.decode()
    major, minor = (int(word) for word in release.split(".")[:2])

    assert stepwise("mapped").is_mapped == ((major, minor) >= (6, 10))
    assert not stepwise("spliced").is_mapped
