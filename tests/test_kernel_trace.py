"""Events that others recorded: files of trace-cmd, and pages copied from tracefs."""

import io
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import kprobes
from kprobes.errors import FormatError, KprobesError
from kprobes.export.trace_dat import TraceDatFile
from kprobes.formats.ring_page import PageData, encode_pages, header_page
from kprobes.formats.trace_dat import PartId
from kprobes.formats.trace_dat_reader import TraceDat
from kprobes.kernel_trace import KernelTrace
from kprobes.model.events import Events, each_event
from kprobes.open_recording import opened_recording
from kprobes.sinks.json import NdjsonSink
from kprobes.sinks.text import TextSink
from tests.build.json_lines import objects
from tests.build.recorded import recorded
from tests.build.trace_cmd_files import FORMAT, Rings, Written, version_6, version_7

_COMMON = FORMAT.partition("\tfield:u64 a")[0]
WAKING = (
    _COMMON
    + """\
\tfield:char comm[16];\toffset:8;\tsize:16;\tsigned:0;
\tfield:pid_t pid;\toffset:24;\tsize:4;\tsigned:1;
\tfield:int prio;\toffset:28;\tsize:4;\tsigned:1;
\tfield:int target_cpu;\toffset:32;\tsize:4;\tsigned:1;

print fmt: "comm=%s pid=%d prio=%d target_cpu=%03d", REC->comm, REC->pid, REC->prio, REC->target_cpu
"""
).format("sched_waking", 300)
NAMED = (
    _COMMON
    + """\
\tfield:__data_loc char[] name;\toffset:8;\tsize:4;\tsigned:0;
\tfield:__data_loc u32[] words;\toffset:12;\tsize:4;\tsigned:0;

print fmt: "name=%s", __get_str(name)
"""
).format("named", 301)
PRINT = (
    _COMMON
    + """\
\tfield:unsigned long ip;\toffset:8;\tsize:8;\tsigned:0;
\tfield:char buf[];\toffset:16;\tsize:0;\tsigned:0;

print fmt: "%ps: %s", (void *)REC->ip, REC->buf
"""
).format("print", 5)
OPEN = (
    _COMMON
    + """\
\tfield:unsigned long __probe_ip;\toffset:8;\tsize:8;\tsigned:0;
\tfield:s32 dfd;\toffset:16;\tsize:4;\tsigned:1;
\tfield:__data_loc char[] path;\toffset:20;\tsize:4;\tsigned:1;

print fmt: "(%lx) dfd=%d path=\\"%s\\"", REC->__probe_ip, REC->dfd, __get_str(path)
"""
).format("open", 302)
EVENTS = {"sched": [WAKING, NAMED], "kprobes": [OPEN]}
TEXT = 0xFFFF_FFFF_8100_0000
SYMBOLS = b"ffffffff81000000 T _text\nffffffff81000100 T _etext\n"

NAMES = ["sched_waking", "open", "print", "sched_waking", "named"]

Record = tuple[int, bytes]
"""A time, and the data of its event."""


def waking(comm: bytes, pid: int, target: int) -> bytes:
    return struct.pack("<HBBi16siii", 300, 1, 2, 7, comm, pid, 120, target)


def named(name: bytes, words: Sequence[int] = ()) -> bytes:
    size, room = len(name) + 1, 4 * len(words)
    begin = struct.pack("<HBBi", 301, 0, 0, 8)
    locations = struct.pack("<II", size << 16 | 16, room << 16 | (16 + size) if room else 0)
    return begin + locations + name + b"\0" + struct.pack(f"<{len(words)}I", *words)


def printed(text: bytes, ip: int = TEXT) -> bytes:
    return struct.pack("<HBBiQ", 5, 0, 0, 7, ip) + text + b"\0"


def opened(path: bytes, ip: int = TEXT + 0x10) -> bytes:
    begin = struct.pack("<HBBiQi", 302, 0, 0, 7, ip, -100)
    return begin + struct.pack("<I", (len(path) + 1) << 16 | 24) + path + b"\0"


def pages_of(records: Sequence[Record], *, lost: int = 0) -> bytes:
    """Return a ring's pages."""
    padded = [data + bytes(-len(data) % 4) for _, data in records]
    data = PageData(
        words=np.frombuffer(b"".join(padded), "<u4").copy(),
        sizes=np.array([len(each) // 4 for each in padded], np.int64),
        ts=np.array([ts for ts, _ in records], np.uint64),
    )
    return encode_pages(data, lost=lost).tobytes()


RINGS = {
    0: [(1000, waking(b"cat", 5, 1)), (3000, printed(b"marker\n")), (5000, named(b"x y", [1, 2]))],
    1: [(2000, opened(b"/etc/passwd")), (4000, waking(b"a longer name!!", 6, 0))],
}
LINES = [
    (
        "          a task-7       [000] d..2.     0.000001: sched_waking: comm=cat pid=5 prio=120 "
        "target_cpu=001"
    ),
    (
        "          a task-7       [001] .....     0.000002: open: (_text+0x10/0x100) dfd=-100 "
        'path="/etc/passwd"'
    ),
    "          a task-7       [000] .....     0.000003: _text: marker",
    (
        "          a task-7       [001] d..2.     0.000004: sched_waking: comm=a longer name!! "
        "pid=6 prio=120 target_cpu=000"
    ),
    "           other-8       [000] .....     0.000005: named: name=x y",
]


def written(
    rings: Sequence[Rings] | None = None, *, options: Sequence[tuple[int, bytes]] = ()
) -> Written:
    found = rings or [Rings(pages={cpu: pages_of(records) for cpu, records in RINGS.items()})]
    uname = (PartId.UNAME, b"Linux host 6.1.0-9-amd64 #1 SMP Debian 6.1 x86_64\0")
    return Written(
        cpus=2,
        ftrace=[PRINT],
        events=EVENTS,
        rings=found,
        options=[uname, *options],
        kallsyms=SYMBOLS,
    )


def read(data: bytes) -> tuple[list[Events], KernelTrace, bytes]:
    """Return what is read of a file, and its text."""
    trace = KernelTrace(TraceDat(io.BytesIO(data)), "x.dat")
    (boot,) = trace.boots()
    out, rounds = io.BytesIO(), list(boot.rounds)
    sink = TextSink(out, boot.source)
    for events in rounds:
        sink.write(events)
    sink.close()
    return rounds, trace, out.getvalue()


def lines_of(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if not line.startswith("#")]


FILES = {
    "6": version_6(written()),
    "7": version_7(written()),
    "7-zlib": version_7(written(), "zlib"),
    "7-zstd": version_7(written(), "zstd"),
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_events_of_all_cpus_are_printed_in_the_order_of_time(data: bytes) -> None:
    _, trace, text = read(data)

    assert lines_of(text) == LINES
    assert trace.counted.counts.recorded.keys() == {5, 300, 301, *trace.layouts}
    assert sum(trace.counted.counts.recorded.values()) == 5
    assert trace.lost == trace.damaged == 0


def test_long_rings_are_put_in_order_as_they_are_read() -> None:
    # More pages than are read at once, of CPUs of which one is much busier.
    busy = pages_of([(1000 + 10 * n, waking(b"cat", n, 0)) for n in range(150_000)])
    idle = pages_of([(1000 + 70_007 * n, waking(b"dd", n, 1)) for n in range(20)])

    rounds, _, _ = read(version_7(written([Rings(pages={0: busy, 1: idle})])))

    times = np.concatenate([_times(events) for events in rounds])
    assert len(rounds) > 2
    assert len(times) == 150_020
    assert (times[1:] >= times[:-1]).all()


def _times(events: Events) -> NDArray[np.uint64]:
    batches = [batch.ts for batch in events.batches]
    starts = np.cumsum([0, *map(len, batches)])[:-1]
    return np.concatenate([np.empty(0, np.uint64), *batches])[starts[events.batch] + events.row]


def test_fields_have_their_names_and_types() -> None:
    rounds, _, _ = read(FILES["7"])

    events = [event for each in rounds for event in each_event(each)]

    assert [event.name for event in events] == NAMES
    assert events[0].args == {"comm": "cat", "pid": 5, "prio": 120, "target_cpu": 1}
    assert events[1].args == {"dfd": -100, "path": "/etc/passwd"}
    assert events[1].function == "_text"
    assert events[4].args == {"name": "x y", "words": "\x01\0\0\0\x02\0\0\0"}
    assert [event.comm for event in events] == ["a task"] * 4 + ["other"]


def test_lines_of_json_are_valid() -> None:
    trace = KernelTrace(TraceDat(io.BytesIO(FILES["7"])), "x.dat")
    (boot,) = trace.boots()
    out = io.BytesIO()
    sink = NdjsonSink(out, boot.source)
    for events in boot.rounds:
        sink.write(events)
    sink.close()

    found = objects("line", out.getvalue())

    assert [each["event"] for each in found[1:]] == NAMES
    assert found[1]["function"] == ""
    assert found[5]["args"] == {"name": "x y", "words": "\x01\0\0\0\x02\0\0\0"}


def test_lost_events_are_counted_where_they_are_missing() -> None:
    rings = [Rings(pages={1: pages_of(RINGS[1], lost=7)})]
    trace = KernelTrace(TraceDat(io.BytesIO(version_7(written(rings)))), "x.dat")
    (boot,) = trace.boots()

    lost = [boot.new_lost() for _ in boot.rounds]

    assert [each for each in lost if each] == [[(1, 7)]]
    assert trace.lost == trace.counted.counts.lost == 7


def test_what_the_statistics_say_is_not_counted_again() -> None:
    rings = [Rings(pages={1: pages_of(RINGS[1], lost=7)})]
    told = [(PartId.CPU_STATISTICS, b"CPU: 1\nentries: 2\noverrun: 9\ncommit overrun: 0\n\0")]

    _, trace, _ = read(version_7(written(rings, options=told)))

    assert trace.lost == 9


def test_times_are_dated_as_the_file_says() -> None:
    _, _, text = read(version_7(written(options=[(PartId.DATE, b"0x10\0")])))

    assert "0.000017: sched_waking: comm=cat" in text.decode()


def test_counts_of_a_clock_are_printed_as_they_are() -> None:
    rings = [Rings(clock="x86-tsc", pages={0: pages_of(RINGS[0])})]

    _, _, text = read(version_7(written(rings)))

    assert lines_of(text)[0].split("         1000: ")[1].startswith("sched_waking: comm=cat")


def test_one_instance_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    rings = [
        Rings(pages={0: pages_of(RINGS[0])}),
        Rings(name="other", pages={1: pages_of(RINGS[1])}),
    ]
    path = tmp_path / "x.dat"
    path.write_bytes(version_7(written(rings)))

    done = kprobe("report", path)

    assert done.returncode == 0
    assert len(lines_of(done.stdout)) == 3
    assert b"not read: instance other" in done.stderr


def test_ours_is_read_as_what_it_was_converted_from(tmp_path: Path) -> None:
    ours = tmp_path / "x.rec"
    ours.write_bytes(recorded(2000))
    out = tmp_path / "x.dat"
    with opened_recording(ours) as recording:
        for boot in recording.boots():
            file = TraceDatFile(out, boot.kernel, boot.source)
            for events in boot.rounds:
                file.write(events)
            file.close()

    found, wanted = kprobes.load(out), kprobes.load(ours)

    assert len(found) == len(wanted) == 2000
    for got, want in zip(found, wanted, strict=True):
        # A task has one name in such a file.
        head = ("name", "ts", "cpu", "pid", "caller")
        assert [getattr(got, name) for name in head] == [getattr(want, name) for name in head]
    assert found["read"]["a0"].tolist() == wanted["read"]["a0"].tolist()


def kprobe(*words: object, stdin: int | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "kprobes", *map(str, words)]
    return subprocess.run(command, capture_output=True, check=False, stdin=stdin)


def test_a_file_comes_through_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "x.dat"
    path.write_bytes(FILES["7-zstd"])
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as pipe:
        assert pipe.stdout is not None
        done = kprobe("report", "-", stdin=pipe.stdout.fileno())

    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == LINES


def copy_of(path: Path) -> Path:
    (path / "events/sched/sched_waking").mkdir(parents=True)
    (path / "events/sched/named").mkdir()
    (path / "events/kprobes/open").mkdir(parents=True)
    (path / "events/ftrace/print").mkdir(parents=True)
    (path / "events/header_page").write_text(header_page(is_char_signed=True))
    (path / "events/sched/sched_waking/format").write_text(WAKING)
    (path / "events/sched/named/format").write_text(NAMED)
    (path / "events/kprobes/open/format").write_text(OPEN)
    (path / "events/ftrace/print/format").write_text(PRINT)
    (path / "trace_clock").write_text("local [global] counter\n")
    (path / "saved_cmdlines").write_bytes(b"7 a task\n8 other\n")
    (path / "kallsyms").write_bytes(SYMBOLS)
    (path / "uname").write_text("Linux host 6.1.0-9-amd64 #1 SMP x86_64 GNU/Linux\n")
    for cpu, records in RINGS.items():
        (path / f"per_cpu/cpu{cpu}").mkdir(parents=True)
        (path / f"per_cpu/cpu{cpu}/trace_pipe_raw").write_bytes(pages_of(records))
    return path


def test_a_copy_of_tracefs_is_read(tmp_path: Path) -> None:
    done = kprobe("report", copy_of(tmp_path))

    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == LINES
    assert b"Linux 6.1.0-9-amd64, x86_64, 2 CPUs" in kprobe("info", tmp_path).stdout


def test_what_cannot_be_printed_is_named_and_printed_by_its_fields(tmp_path: Path) -> None:
    path = copy_of(tmp_path)
    (path / "events/syscalls/sys_enter_write").mkdir(parents=True)
    text = NAMED.replace("name: named", "name: sys_enter_write").replace("] name;", "] __buf_val;")
    text = text.replace("__get_str(name)", "__print_dynamic_array(__buf_val, 1)")
    (path / "events/syscalls/sys_enter_write/format").write_text(text)
    (path / "events/sched/named/format").unlink()

    done = kprobe("report", path)

    assert "     0.000005: sys_enter_write: __buf_val=x y words=" in lines_of(done.stdout)[4]
    assert b"sys_enter_write (the function print_syscall_enter())" in done.stderr


def test_without_names_there_are_numbers(tmp_path: Path) -> None:
    path = copy_of(tmp_path)
    for name in ("kallsyms", "saved_cmdlines", "trace_clock", "uname"):
        (path / name).unlink()

    shown = lines_of(kprobe("report", path).stdout)

    assert len(shown) == len(LINES)
    assert 'open: (0xffffffff81000010) dfd=-100 path="/etc/passwd"' in shown[1]
    assert shown[0].startswith("           <...>-7 ")


def test_only_ours_become_files_of_trace_cmd(tmp_path: Path) -> None:
    for name in ("a.dat", "b.dat"):
        (tmp_path / name).write_bytes(FILES["7"])

    done = kprobe("convert", tmp_path / "a.dat", tmp_path / "b.dat")

    assert done.returncode == 2
    assert b"`trace-cmd convert`" in done.stderr
    assert (tmp_path / "b.dat").read_bytes() == FILES["7"]


def test_files_without_a_real_time_are_not_shifted_and_it_is_said(tmp_path: Path) -> None:
    for name in ("a.dat", "b.dat"):
        (tmp_path / name).write_bytes(FILES["7"])

    done = kprobe("report", tmp_path / "a.dat", tmp_path / "b.dat")

    assert done.returncode == 0, done.stderr
    assert len(lines_of(done.stdout)) == 2 * len(LINES)
    assert b"b.dat: its real time is not known" in done.stderr


@pytest.mark.parametrize("missing", ["per_cpu", "events/header_page"])
def test_what_must_be_there_is_named(tmp_path: Path, missing: str) -> None:
    path = copy_of(tmp_path / "copy")
    (path / missing).rename(tmp_path / "away")

    done = kprobe("report", path)

    assert done.returncode == 1
    assert missing in done.stderr.decode()


@pytest.mark.parametrize("seed", range(6))
def test_mutations_end_with_one_message_or_well(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        data = bytearray(rng.choice(list(FILES.values())))
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        try:
            read(bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data))
        except KprobesError as error:
            assert "\n" not in str(error)  # noqa: PT017 - both ends are good


def test_events_that_cannot_be_are_one_message() -> None:
    events = {"sched": [WAKING.replace("offset:8;", "offset:65000;")]}
    file = Written(cpus=2, ftrace=[PRINT], events=events, rings=written().rings)

    with pytest.raises(FormatError, match="pages of CPU 0"):
        read(version_7(file))
