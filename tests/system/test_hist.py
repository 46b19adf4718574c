"""Hist triggers in guests: the kernel's own hist files of the same hits, and exact sums of many."""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

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
_PROBES: dict[str, TraceProbe] = {}
_NAMES = {"p": "counted", "r": "returned"}
_WORKLOAD = """
i=1
while [ $i -le 200 ]; do
    taskset 1 dd if=/dev/zero of=/dev/null bs=$((i * i)) count=3 2>/dev/null
    taskset 2 dd if=/dev/zero of=/dev/null bs=77 count=2 2>/dev/null
    i=$((i + 1))
done
taskset 1 dd if=/tmp of=/dev/null count=1 2>/dev/null
taskset 1 dd if=/dev/null of=/dev/null count=1 2>/dev/null
true
"""
_IF = 'if comm == "dd"'
_AT_ONCE = 40
"""Lines that a guest is given at once."""
TRIGGERS = [
    ("p", "keys=common_pid.execname:sort=common_pid"),
    ("p", "keys=count:vals=count:sort=count"),
    ("p", "keys=small:vals=small,count:sort=small.descending"),
    ("p", "keys=count.log2:vals=small.hex:sort=count.descending"),
    ("p", "keys=count.buckets=1000:sort=count"),
    ("p", "keys=common_cpu,count:sort=common_cpu,count:size=4096"),
    ("p", "keys=common_pid,count.log2,common_cpu:sort=common_pid,count"),
    ("p", "keys=__probe_ip.sym:vals=count"),
    ("p", "keys=__probe_ip.sym-offset"),
    ("p", "keys=count.hex:sort=hitcount.descending,count"),
    ("r", "keys=got:vals=got:sort=got"),
    ("r", "keys=got.log2,common_cpu:sort=got,common_cpu"),
    ("r", "keys=__probe_func.sym,got:sort=got:size=1024"),
]


@pytest.fixture(scope="module", params=["6.1", "7.x"])
def guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(suite=SUITES[request.param], arch=arch)) as session:
        for letter, words in (("p", _ENTRY), ("r", _RETURN)):
            _PROBES[letter] = session.probe(f"{letter}:ours/{_NAMES[letter]} {words}")
        Tracefs(session).run(
            f"echo 'p:theirs/counted {_ENTRY}' > kprobe_events\n"
            f"echo 'r:theirs/returned {_RETURN}' >> kprobe_events\n"
        )
        yield session


@contextmanager
def natively(session: GuestSession, letter: str, trigger: str) -> Generator[None]:
    """Have the kernel count by a trigger of its own."""
    file = f"events/theirs/{_NAMES[letter]}/trigger"
    Tracefs(session).run(f"echo 'hist:{trigger}' > {file}")
    try:
        yield
    finally:
        Tracefs(session).run(f"echo '!hist:{trigger}' > {file}")


@contextmanager
def counting(session: GuestSession, letter: str, trigger: str) -> Generator[None]:
    """Count by ours."""
    session.options = replace(session.options, trigger=trigger)
    try:
        with session.recording(_PROBES[letter]):
            yield
    finally:
        session.options = replace(session.options, trigger="")


def both(session: GuestSession, letter: str, trigger: str, arch: str) -> tuple[Histogram, str]:
    """Return what ours and what the kernel's trigger has counted of a workload."""
    ours, theirs = counting(session, letter, trigger), natively(session, letter, trigger)
    # The kernel's is in front of ours: on arm64 ours must be there first.
    first, second = (ours, theirs) if arch == "arm64" else (theirs, ours)
    with first, second:
        assert session.run(_WORKLOAD).status == 0
        file = f"events/theirs/{_NAMES[letter]}/hist"
        found = session.driver.histogram()
        text = Tracefs(session).run(f"cat {file}")
    # Some print it twice: hist_field_print() of 7.2.
    text = text.replace("common_cpu" * 2, "common_cpu")
    assert found is not None
    return found, text


@pytest.mark.parametrize(("letter", "trigger"), TRIGGERS, ids=[f"{a}:{b}" for a, b in TRIGGERS])
def test_the_hist_file_is_the_kernels(
    guest: GuestSession, letter: str, trigger: str, arch: str
) -> None:
    found, text = both(guest, letter, f"{trigger} {_IF}", arch)

    assert found.hits > 500
    assert str(found) == text


def test_a_full_table_is_the_kernels(guest: GuestSession, arch: str) -> None:
    # Of one CPU, which has one table as the kernel has.
    found, text = both(guest, "p", f"keys=count:sort=count:size=128 {_IF} && cpu == 0", arch)

    assert len(found) == 128
    assert found.dropped > 0
    assert str(found) == text


def test_what_the_kernel_has_not_is_counted_too(guest: GuestSession) -> None:
    trigger = f"keys=comm,tgid:vals=count.min,count.max,count.avg,count {_IF}"
    with counting(guest, "p", trigger):
        guest.run(_WORKLOAD)
        found = guest.driver.histogram()

    assert found is not None
    columns = found.columns()
    assert set(columns["comm"].tolist()) == {"dd"}
    assert len(set(columns["tgid"].tolist())) == len(found) == 402
    sums = columns["count"] / columns["hitcount"]
    assert (columns["count.avg"] == sums).all()
    assert (columns["count.min"] <= columns["count.max"]).all()
    assert int(columns["count.max"].max()) >= 200 * 200


def test_what_a_guest_cannot_count_by_is_refused(guest: GuestSession) -> None:
    for trigger, told in (("common_timestamp", "is not recorded"), ("nosuch", "find field")):
        with (
            pytest.raises(DefinitionError, match=told),
            counting(guest, "p", f"keys={trigger}"),
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
_READS = 1_000_000


def test_while_it_is_read_no_hit_of_millions_is_lost_or_counted_twice(guest: GuestSession) -> None:
    totals: list[int] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            found = guest.driver.histogram()
            totals.append(-1 if found is None else found.hits)

    with counting(guest, "p", f"keys=common_pid,common_cpu:vals=count {_IF} && count == 1"):
        reader = threading.Thread(target=read)
        reader.start()
        try:
            assert guest.run(_BUSY % _READS, timeout_s=WAIT_S).status == 0
        finally:
            ended.set()
            reader.join()
        found = guest.driver.histogram()
        missed = sum(guest.counts().missed.values())

    assert found is not None
    assert len(totals) > 10
    assert totals == sorted(totals)
    assert found.hits + found.dropped + missed == 2 * _READS
    assert found.hits >= 2 * _READS * 0.999
    assert found.vals[0].tolist() == found.hitcount.tolist()


def test_every_line_of_syntax_has_the_kernels_verdict(guest: GuestSession) -> None:
    tracefs = Tracefs(guest)
    layouts = [layout for layout in guest.driver.layouts if layout.event == _NAMES["p"]]
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
