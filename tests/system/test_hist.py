"""Hist triggers in guests: the kernel's own hist files of the same hits, and exact sums of many."""

import os
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

import kprobes
from kprobes.column_hist import check_hist
from kprobes.errors import DefinitionError, RefusedError, UsageError
from kprobes.event_table import TraceProbe
from kprobes.histogram import Histogram
from kprobes.model.resolved import RecordLayout
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.command import WAIT_S
from tests.build.dialect import DIALECTS
from tests.build.programs import counting_loop
from tests.system.conftest import SUITES
from tests.system.hist_corpus import LINES, NEWER, NOT_OURS
from tests.system.oracle import Tracefs

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("7.x"),
]

_ENTRY = "vfs_read count=$arg3 small=$arg3:s8 where=$arg2"
_RETURN = "vfs_read got=$retval:s32"
_OPEN = "do_sys_openat2 path=+0($arg2):ustring flags=+0($arg3):x64"
_DEFINED = {
    "counted": f"p:%s/counted {_ENTRY}",
    "returned": f"r:%s/returned {_RETURN}",
    "opened": f"p:%s/opened {_OPEN}",
}
_NAMED = "p:ours/named vfs_read name=file->f_path.dentry->d_name.name:string count=$arg3"
_PROBES: dict[str, TraceProbe] = {}
_WORKLOAD = """
i=1
while [ $i -le %d ]; do
    taskset 1 dd if=/dev/zero of=/dev/null bs=$((i * i)) count=3 2>/dev/null
    taskset 2 dd if=/dev/zero of=/dev/null bs=77 count=2 2>/dev/null
    i=$((i + 1))
done
taskset 1 dd if=/tmp of=/dev/null count=1 2>/dev/null
taskset 1 dd if=/dev/null of=/dev/null count=1 2>/dev/null
true
"""
_TURNS = 60
_TURNS_FULL = 140
"""More than a small table has entries."""
_IF = 'if comm == "dd"'
_AT_ONCE = 40
"""Lines that a guest is given at once."""
TRIGGERS = [
    ("opened", "keys=path,flags.hex:vals=flags:sort=path.descending,flags"),
    ("opened", "keys=common_pid,path:sort=common_pid,path:size=4096"),
    ("counted", "keys=common_pid.execname:sort=common_pid"),
    ("counted", "keys=count:vals=count:sort=count"),
    ("counted", "keys=small:vals=small,count:sort=small.descending"),
    ("counted", "keys=count.log2:vals=small.hex:sort=count.descending"),
    ("counted", "keys=count.buckets=1000:sort=count"),
    ("counted", "keys=common_cpu,count:sort=common_cpu,count:size=4096"),
    ("counted", "keys=common_pid,count.log2,common_cpu:sort=common_pid,count"),
    ("counted", "keys=__probe_ip.sym:vals=count"),
    ("counted", "keys=__probe_ip.sym-offset"),
    ("counted", "keys=count.hex:sort=hitcount.descending,count"),
    ("counted", "keys=count-small:vals=count*2-small,small:sort=count-small:size=4096"),
    ("counted", "keys=count/1000,small+1:vals=count.log2-small,small:sort=count/1000,small+1"),
    ("counted", "keys=small*3/small:x=count,y=count+1:sort=small*3/small"),
    ("counted", "keys=common_cpu:x=count:sort=common_cpu:onmax($x).save(small,where)"),
    ("counted", "keys=small:x=count/7,y=count:vals=count:sort=small:onmax($x).save(count,where)"),
    ("returned", "keys=common_cpu:x=got:sort=common_cpu:onmax($x).save(got)"),
    ("returned", "keys=-(got+1):vals=$left:left=got:sort=-(got+1)"),
    ("returned", "keys=got:vals=got:sort=got"),
    ("returned", "keys=got.log2,common_cpu:sort=got,common_cpu"),
    ("returned", "keys=__probe_func.sym,got:sort=got:size=1024"),
]


@pytest.fixture(scope="module", params=["6.1", "7.x"])
def guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    files = {_PROGRAM: counting_loop(_CALL, _TIMES, arch=arch)}
    options = MachineOptions(suite=SUITES[request.param], arch=arch, files=files)
    with kprobes.boot(options) as session:
        assert session.run(f"chmod 755 {_PROGRAM}").status == 0
        for name, definition in _DEFINED.items():
            _PROBES[name] = session.probe(definition % "ours")
            Tracefs(session).run(f"echo '{definition % 'theirs'}' >> kprobe_events")
        _PROBES["named"] = session.probe(_NAMED)
        yield session


@contextmanager
def natively(session: GuestSession, name: str, trigger: str) -> Generator[None]:
    """Have the kernel count by a trigger of its own."""
    file = f"events/theirs/{name}/trigger"
    Tracefs(session).run(f"echo 'hist:{trigger}' > {file}")
    try:
        yield
    finally:
        Tracefs(session).run(f"echo '!hist:{trigger}' > {file}")


@contextmanager
def counting(session: GuestSession, name: str, trigger: str) -> Generator[None]:
    """Count by ours."""
    session.options = replace(session.options, trigger=trigger)
    try:
        with session.recording(_PROBES[name]):
            yield
    finally:
        session.options = replace(session.options, trigger="")


def both(
    session: GuestSession, name: str, trigger: str, arch: str, turns: int = _TURNS
) -> tuple[Histogram, str]:
    """Return what ours and what the kernel's trigger has counted of a workload."""
    ours, theirs = counting(session, name, trigger), natively(session, name, trigger)
    # The kernel's is in front of ours: on arm64 ours must be there first.
    first, second = (ours, theirs) if arch == "arm64" else (theirs, ours)
    with first, second:
        assert session.run(_WORKLOAD % turns).status == 0
        file = f"events/theirs/{name}/hist"
        found = session.driver.histogram()
        text = Tracefs(session).run(f"cat {file}")
    # Some print it twice: hist_field_print() of 7.2.
    text = text.replace("common_cpu" * 2, "common_cpu")
    assert found is not None
    return found, text


@pytest.mark.parametrize(("name", "trigger"), TRIGGERS, ids=[f"{a}:{b}" for a, b in TRIGGERS])
def test_the_hist_file_is_the_kernels(
    guest: GuestSession, name: str, trigger: str, arch: str
) -> None:
    found, text = both(guest, name, f"{trigger} {_IF}", arch)

    assert found.hits > 2 * _TURNS
    assert str(found) == text


def test_a_full_table_is_the_kernels(guest: GuestSession, arch: str) -> None:
    # Of one CPU, which has one table as the kernel has.
    found, text = both(
        guest, "counted", f"keys=count:sort=count:size=128 {_IF} && cpu == 0", arch, _TURNS_FULL
    )

    assert len(found) == 128
    assert found.dropped > 0
    assert str(found) == text


def test_what_the_kernel_has_not_is_counted_too(guest: GuestSession) -> None:
    trigger = f"keys=comm,tgid:vals=count.min,count.max,count.avg,count {_IF}"
    with counting(guest, "counted", trigger):
        guest.run(_WORKLOAD % _TURNS)
        found = guest.driver.histogram()

    assert found is not None
    columns = found.columns()
    assert set(columns["comm"].tolist()) == {"dd"}
    assert len(set(columns["tgid"].tolist())) == len(found) == 2 * _TURNS + 2
    sums = columns["count"] / columns["hitcount"]
    assert (columns["count.avg"] == sums).all()
    assert (columns["count.min"] <= columns["count.max"]).all()
    assert int(columns["count.max"].max()) >= _TURNS**2


def test_percentiles_are_within_a_128th_of_those_of_all_numbers(guest: GuestSession) -> None:
    trigger = f"vals=count.p50,count.p90,count.p99.9,count.min,count.max:size=4096 {_IF}"
    found: list[Histogram] = []
    for keys in (f"keys=comm:{trigger}", f"keys=count:sort=count:size=4096 {_IF}"):
        with counting(guest, "counted", keys):
            assert guest.run(_WORKLOAD % _TURNS_FULL).status == 0
            histogram = guest.driver.histogram()
        assert histogram is not None
        found.append(histogram)

    (half,), (most,), (last,), (least,), (greatest,) = (found[0].value(at) for at in range(5))
    numbers = found[1].keys[0].repeat(found[1].hitcount.astype(np.int64))
    assert found[0].hits == len(numbers) > 500
    assert (least, greatest) == (numbers[0], numbers[-1])
    for value, percent in ((half, 50), (most, 90), (last, 99.9)):
        exact = float(np.percentile(numbers, percent, method="inverted_cdf"))
        assert abs(value - exact) <= exact / 128


def test_stacks_that_a_guest_counts_are_those_that_it_records(guest: GuestSession) -> None:
    probe = guest.probe("p:ours/stacked vfs_read count=$arg3", stacktrace=True)
    try:
        with guest.counting(f"keys=stack {_IF}", probe) as counted:
            guest.run(_WORKLOAD % _TURNS)
        with guest.record(probe) as trace:
            guest.run(_WORKLOAD % _TURNS)
    finally:
        probe.delete()

    recorded = trace["stacked"].histogram(f"keys=stack {_IF}")
    assert counted.read().hits == recorded.hits > 2 * _TURNS
    ours, theirs = (
        dict(zip(each.columns()["stack"].tolist(), each.hitcount.tolist(), strict=True))
        for each in (counted.read(), recorded)
    )
    assert ours == theirs
    assert any("ksys_read+" in stack for stack in ours)


def test_what_a_guest_cannot_count_by_is_refused(guest: GuestSession) -> None:
    for trigger, told in (("common_timestamp", "is not recorded"), ("nosuch", "find field")):
        with (
            pytest.raises(DefinitionError, match=told),
            counting(guest, "counted", f"keys={trigger}"),
        ):
            pass


def test_a_probe_whose_key_is_of_another_kind_does_not_join_a_table(guest: GuestSession) -> None:
    with guest.counting("keys=comm") as counted:
        with pytest.raises(RefusedError, match="of other kinds"):
            guest.probe("p:other vfs_write comm=$arg3")
        assert guest.run("taskset 1 dd if=/dev/zero of=/dev/null bs=7 count=5").status == 0

    found = counted.read()
    assert dict(zip(found.keys[0].tolist(), found.hitcount.tolist(), strict=True))[b"dd"] >= 5
    with pytest.raises(UsageError, match="no such event"):
        guest.select("other")


_BUSY = """
for cpu in 1 2; do
    taskset $cpu dd if=/dev/zero of=/dev/null bs=1 count=%d 2>/dev/null &
done
wait
"""
_READS = 400_000
_PROGRAM, _CALL, _LOOPS = "/loop", "sched_get_priority_min", 4
_TIMES = int(os.environ.get("KPROBES_HITS", "1000000")) // _LOOPS
"""Calls of each program, each of which gives its number, and that nobody else makes."""
_RUNS = 10


@pytest.mark.parametrize("of", [("counted", "common_pid,common_cpu"), ("named", "name,common_cpu")])
def test_while_it_is_read_and_cleared_no_hit_of_many_is_lost_or_counted_twice(
    guest: GuestSession, of: tuple[str, str]
) -> None:
    totals: list[int] = []
    parts: list[Histogram] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            found = guest.driver.histogram()
            totals.append(-1 if found is None else found.hits)
            parts.append(counted.clear())

    name, keys = of
    trigger = f"keys={keys}:vals=count {_IF} && count == 1"
    with guest.counting(trigger, _PROBES[name]) as counted:
        reader = threading.Thread(target=read)
        reader.start()
        try:
            assert guest.run(_BUSY % _READS, timeout_s=WAIT_S).status == 0
        finally:
            ended.set()
            reader.join()
    found = guest.driver.histogram()
    parts.append(counted.clear())

    assert found is not None
    missed = sum(guest.counts().missed.values())
    assert len(totals) > 10
    assert totals == sorted(totals)
    assert found.hits + found.dropped + missed == 2 * _READS
    assert found.hits >= 2 * _READS * 0.999
    assert found.vals[0].tolist() == found.hitcount.tolist()
    assert sum(part.hits for part in parts) == found.hits
    assert sum(part.dropped for part in parts) == found.dropped


def test_each_of_many_hits_is_in_one_reading(guest: GuestSession, arch: str) -> None:
    # 100 million of them take a minute on amd64: KPROBES_HITS=100000000.
    argument, random = "+112($arg1)" if arch == "amd64" else "+0($arg1)", Random(7)
    probe = guest.probe(f"p:ours/calls {DIALECTS[arch].syscall}{_CALL} n={argument}:u64")
    parts: list[Histogram] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(random.random() * 0.2):
            if random.getrandbits(1):
                counted.read()
            else:
                parts.append(counted.clear())

    try:
        with guest.counting("keys=common_pid,n.log2:vals=n:size=4096", probe) as counted:
            reader = threading.Thread(target=read)
            reader.start()
            try:
                loops = " & ".join([_PROGRAM] * _LOOPS)
                assert guest.run(f"{loops} & wait", timeout_s=20 * WAIT_S).status == 0
            finally:
                ended.set()
                reader.join()
        parts.append(counted.clear())
    finally:
        probe.delete()

    assert sum(guest.counts().missed.values()) == 0
    assert sum(part.hits for part in parts) == _LOOPS * _TIMES
    assert sum(int(part.vals[0].sum()) for part in parts) == _LOOPS * _TIMES * (_TIMES + 1) // 2
    assert sum(part.dropped for part in parts) == 0


def test_what_an_action_keeps_is_of_one_hit_whenever_it_is_read(
    guest: GuestSession, arch: str
) -> None:
    argument = "+112($arg1)" if arch == "amd64" else "+0($arg1)"
    definition = f"p:ours/kept {DIALECTS[arch].syscall}{_CALL} num={argument}:u64 again={argument}"
    probe = guest.probe(definition)
    numbers: list[int] = []
    under_way = 0
    try:
        # Each hit of a program is kept: its numbers go down.
        trigger = f"keys=common_pid:x={_TIMES + 1}-num:onmax($x).save(num,again):size=128"
        with guest.counting(trigger, probe) as counted:
            running = guest.start(f"for i in $(seq {_RUNS}); do {_PROGRAM}; done")
            deadline = time.monotonic() + WAIT_S
            while len(numbers) < _RUNS or numbers.count(_TIMES) < _RUNS:
                columns = counted.read().columns()
                numbers = columns["onmax(x)"].tolist()
                saved = columns["save(num)"].tolist()
                assert saved == columns["save(again)"].tolist() == [_TIMES + 1 - n for n in numbers]
                under_way += len(numbers) - numbers.count(_TIMES)
                assert time.monotonic() < deadline
            assert running.wait(WAIT_S).status == 0
    finally:
        probe.delete()

    assert numbers == [_TIMES] * _RUNS
    assert under_way > _RUNS


def test_every_line_of_syntax_has_the_kernels_verdict(guest: GuestSession) -> None:
    tracefs = Tracefs(guest)
    layouts = [layout for layout in guest.driver.layouts if layout.event == "counted"]
    lines = [*LINES.splitlines(), *NEWER.splitlines(), *NOT_OURS.splitlines()]
    file = "events/theirs/counted/trigger"
    tries = [
        f"if echo '{line}' 2>/dev/null > {file}; then echo yes; else echo no; fi\n"
        f"echo '!{line}' > {file} 2>/dev/null || true\n"
        for line in lines
    ]
    told = [
        word
        for at in range(0, len(tries), _AT_ONCE)
        for word in tracefs.run("".join(tries[at : at + _AT_ONCE])).split()
    ]
    assert len(told) == len(lines)
    differing = {
        line
        for line, word in zip(lines, told, strict=True)
        if (word == "yes") is not _is_accepted(line, layouts, guest)
    }

    newer = NEWER.splitlines() if guest.kernel.version < (7, 0) else []
    assert differing == {*NOT_OURS.splitlines(), *newer}


def _is_accepted(line: str, layouts: Sequence[RecordLayout], guest: GuestSession) -> bool:
    try:
        check_hist(line, layouts, guest.source)
    except DefinitionError:
        return False
    return True
