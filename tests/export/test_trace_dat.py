"""Files of trace-cmd, read back by the kernel's own formats; trace-cmd itself is in system/."""

import os
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import FormatError
from kprobes.export.trace_dat import TraceDatFile
from kprobes.model.events import Batch, Event, Events, each_event
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.open_recording import opened_recording
from kprobes.ring.ftrace import Contexts
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import CPUS, EVENTS, KERNEL, LAYOUTS, SYMBOLS, recorded
from tests.build.ring import make_layout
from tests.build.trace_dat import Dat, read_dat

SOURCE = TraceSource(version=(6, 1), cpus=CPUS)
READ = make_layout(1, ("u64",), event="read")


def write(path: Path, *steps: Events | tuple[int, int], source: TraceSource = SOURCE) -> Dat:
    """Write events, and between them what was lost: a CPU, and how many."""
    file = TraceDatFile(path, KERNEL, source)
    for step in steps:
        if isinstance(step, Events):
            file.write(step)
        else:
            file.lose(*step)
    file.close()
    return read_dat(path.read_bytes())


def of_rows(layout: RecordLayout, *rows: Row) -> Events:
    return make_events([make_batch(layout, rows)])


def many(count: int, layout: RecordLayout = READ) -> Events:
    """Return events of both CPUs by turns."""
    numbers = np.arange(count)
    batch = Batch(
        layout=layout,
        ts=(numbers * 700).astype(np.uint64),
        cpu=(numbers % CPUS).astype(np.uint16),
        pid=np.full(count, 1, np.int32),
        context=np.full(count, 1 << 31, np.uint32),
        comm=np.full(count, b"sh", "S16"),
        columns=tuple(numbers.astype(np.uint64) for _ in layout.fields),
        faulted=(None,) * len(layout.fields),
    )
    order = np.arange(count, dtype=np.uint32)
    return Events(batches=(batch,), batch=np.zeros(count, np.uint16), row=order)


def by_cpu(rounds: Sequence[Events]) -> list[Event]:
    """Return events as a file has them: CPU after CPU, each in the order of time."""
    events = [event for each in rounds for event in each_event(each)]
    return sorted(events, key=lambda event: event.cpu)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "x.rec"
    path.write_bytes(recorded(EVENTS))
    return path


@pytest.fixture(scope="module")
def dat(recording: Path) -> Dat:
    out = recording.with_suffix(".dat")
    with opened_recording(recording) as found:
        for boot in found.boots():
            file = TraceDatFile(out, boot.kernel, boot.source)
            for events in boot.rounds:
                file.write(events)
            file.close()
    return read_dat(out.read_bytes())


def test_the_values_are_the_batches(recording: Path, dat: Dat) -> None:
    layouts = {layout.event: layout for layout in LAYOUTS}

    found = list(dat.events())

    wanted = by_cpu(list(kprobes.load(recording).batches()))
    assert len(found) == len(wanted) == EVENTS
    for got, want in zip(found, wanted, strict=True):
        layout = layouts[want.name]
        head = {"event": want.name, "cpu": want.cpu, "ts": want.ts, "common_pid": want.pid}
        assert {key: got[key] for key in head} == head
        own = ("__probe_ip",) if want.caller is None else ("__probe_func", "__probe_ret_ip")
        places = [int(layout.ip)] if want.caller is None else [int(layout.ip), want.caller]
        assert [got[name] for name in own] == places
        arguments = {name: value for name, value in got.items() if name[0] == "a"}
        assert arguments == _arguments(layout, want)


def _arguments(layout: RecordLayout, event: Event) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in layout.fields:
        value = event.args[each.name]
        if each.storage is Storage.STRING and each.count:
            found |= {f"{each.name}_{i}": _raw(each, one) for i, one in enumerate(value)}
        else:
            found[each.name] = _raw(each, value)
    return found


def _raw(each: Field, value: Any) -> Any:
    if each.storage is Storage.NUMBER and each.type != "symstr":
        return value if value is not None else [0] * each.count if each.count else 0
    if each.storage is Storage.DURATION:
        return value or 0
    if value is None:
        return b"(fault)"
    if isinstance(value, int):
        symbol = SYMBOLS.at(value)
        return (f"{value:#x}" if symbol is None else symbol.place(value)).encode()
    return value.encode("latin-1") if "\\x" not in value else _bytes(value)


def _bytes(text: str) -> bytes:
    # Of ``backslashreplace``; what tests record has no backslash of its own.
    return text.encode().decode("unicode_escape").encode("latin-1")


def test_an_event_has_one_format_and_a_number_of_its_own(dat: Dat) -> None:
    numbers = [text.splitlines()[1] for _, text in dat.texts]

    assert {group for group, _ in dat.texts} == {"kprobes"}
    assert len(set(numbers)) == len(numbers) == len(LAYOUTS)


def test_the_functions_of_a_pattern_are_one_event_unless_their_arguments_differ(
    tmp_path: Path,
) -> None:
    layouts = [
        make_layout(1, ("u64",), event="x"),
        make_layout(2, ("u64",), event="x"),
        make_layout(3, ("u32",), event="x"),
        make_layout(4, ("u64",), event="x", has_caller=True),
        replace(make_layout(5, ("u64",), event="x"), group="mine"),
    ]
    batches = [make_batch(layout, [Row(values=(7,))]) for layout in layouts]

    dat = write(tmp_path / "x.dat", make_events(batches))

    assert [group for group, _ in dat.texts] == ["kprobes"] * 3 + ["mine"]
    found = list(dat.events())
    ips = [event.get("__probe_ip", event.get("__probe_func")) for event in found]
    assert ips == [int(layout.ip) for layout in layouts]
    assert len({str(event["common_type"]) for event in found}) == 4


def test_each_page_of_many_is_there_in_the_order_of_time(tmp_path: Path) -> None:
    events = many(150_000)

    dat = write(tmp_path / "x.dat", events, events)

    found = list(dat.events())
    for cpu in range(CPUS):
        own = [event["a0"] for event in found if event["cpu"] == cpu]
        assert own == list(range(cpu, 150_000, CPUS)) * 2
    # But for a CPU's last ones, and one where time goes back, pages are full.
    pages = sum(map(len, dat.pages.values()))
    assert pages < 300_000 * 28 / 4080 + 40
    assert all(offset % dat.page_size == 0 for offset in dat.offsets.values())


def test_events_of_several_names_are_in_the_order_of_time(tmp_path: Path) -> None:
    other = make_layout(2, ("string",), event="open")
    batches = [
        make_batch(READ, [Row(ts=ts, values=(ts,)) for ts in (10, 30, 50)]),
        make_batch(other, [Row(ts=ts, values=(b"x",)) for ts in (20, 40)]),
    ]
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]

    dat = write(tmp_path / "x.dat", make_events(batches, order))

    assert [(event["event"], event["ts"]) for event in dat.events()] == [
        ("read", 10),
        ("open", 20),
        ("read", 30),
        ("open", 40),
        ("read", 50),
    ]


def test_what_was_lost_is_between_the_events(tmp_path: Path) -> None:
    before = of_rows(READ, Row(ts=1, cpu=0, values=(1,)), Row(ts=2, cpu=1, values=(2,)))
    after = of_rows(READ, Row(ts=3, cpu=1, values=(3,)), Row(ts=4, cpu=0, values=(4,)))

    dat = write(tmp_path / "x.dat", before, (0, 40), (0, 2), after, (1, 5))

    assert [event["a0"] for event in dat.events()] == [1, 4, 2, 3]
    commits = dat.pages[0][:, 8:12].copy().view("<u4")[:, 0] >> 30
    assert commits.tolist() == [0, 3]
    assert len(dat.pages[1]) == 1
    # Those after the last event of a CPU only its statistics have.
    assert dat.lost == 42
    texts = [text.decode() for text in dat.options[2]]
    assert ["dropped events: 42\nread events: 2\n" in text for text in texts] == [True, False]
    assert "CPU: 1\n" in texts[1]
    assert "commit overrun: 0\n" in texts[1]
    assert "dropped events: 5\nread events: 2\n" in texts[1]


def test_the_context_is_that_of_the_event(tmp_path: Path) -> None:
    contexts = [1 << 31 | 1 << 24, 0x0301_0003, 0x8010_0100]
    rows = [Row(ts=i, context=context, values=(i,)) for i, context in enumerate(contexts)]

    dat = write(tmp_path / "x.dat", of_rows(READ, *rows))

    found = list(dat.events())
    flags = np.array([event["common_flags"] for event in found], np.uint8)
    counts = np.array([event["common_preempt_count"] for event in found], np.uint8)
    assert Contexts((6, 1)).of(flags, counts).tolist() == contexts


def test_a_task_has_its_last_name(tmp_path: Path) -> None:
    rows = [
        Row(ts=1, pid=7, cpu=1, comm=b"first", values=(1,)),
        Row(ts=2, pid=7, cpu=0, comm=b"\xff last", values=(1,)),
        Row(ts=3, pid=8, comm=b"a\n9 b", values=(1,)),
        Row(ts=4, pid=9, comm=b"", values=(1,)),
        Row(ts=5, pid=10, comm=b" ", values=(1,)),
        Row(ts=6, pid=11, comm=b"sh", values=(1,)),
    ]

    dat = write(tmp_path / "x.dat", of_rows(READ, *rows))

    # trace-cmd would stop at one without a name.
    assert dat.cmdlines == b"7 \xff last\n8 a\\n9 b\n11 sh\n"


def test_symbols_are_those_of_the_addresses_that_occur(tmp_path: Path) -> None:
    places = {
        0x1010: "first+0x10/0x40",
        0x1050: "second+0x10/0x20",
        0x2008: "of_mod+0x8/0x10 [mod]",
        0x3000: "a name+0x0/0x10",
        0x4000: "0x4000",
    }
    source = TraceSource(version=(6, 1), cpus=CPUS, symbol_at=places.__getitem__)
    layout = make_layout(1, ("symbol", "u64"), has_caller=True, where="probed+0x4/0x100")
    layout = replace(layout, ip=type(layout.ip)(0x9004))
    rows = [Row(values=(addr, 0x5000), caller=0x2008) for addr in places]

    dat = write(tmp_path / "x.dat", of_rows(layout, *rows), source=source)

    # Where nothing known begins at its end, a symbol ends at a number that adds up.
    assert dat.kallsyms == [
        "0000000000001000 t first",
        "0000000000001040 t second",
        "0000000000001060 t 0x1060",
        "0000000000002000 t of_mod\t[mod]",
        "0000000000002010 t 0x2010",
        "0000000000009000 t probed",
        "0000000000009100 t 0x9100",
    ]


def test_the_file_tells_of_the_guest(dat: Dat) -> None:
    assert dat.options[5] == [b"Linux 6.1.0 x86_64\0"]
    assert dat.options[9] == [b"kprobe test\0"]
    assert dat.options[4] == [b"[local]\0"]
    assert dat.options[8] == [CPUS.to_bytes(4, "little")]
    assert dat.options[11] == [KERNEL.real_ns.to_bytes(8, "little")]
    assert len(dat.options[2]) == CPUS
    assert Counter(event["cpu"] for event in dat.events()).keys() == {0, 1}


def test_a_recording_without_events_is_a_file(tmp_path: Path) -> None:
    dat = write(tmp_path / "x.dat")

    assert dat.texts == []
    assert dat.pages == {}


def test_times_that_are_no_nanoseconds_are_of_another_clock(tmp_path: Path) -> None:
    source = TraceSource(version=(6, 1), cpus=CPUS, has_ns=False)

    dat = write(tmp_path / "x.dat", many(3), source=source)

    assert dat.options[4] == [b"[counter]\0"]
    assert b"\0counter\0" in dat.options[3][0]


def test_a_cpu_with_few_events_does_not_keep_those_of_others(tmp_path: Path) -> None:
    file = TraceDatFile(tmp_path / "x.dat", KERNEL, SOURCE)
    events = many(8192)
    batch = replace(events.batches[0], cpu=np.repeat([0, 1], [8191, 1]).astype(np.uint16))
    events = replace(events, batches=(batch,))
    tracemalloc.start()
    for _ in range(16):
        file.write(events)
    before, _ = tracemalloc.get_traced_memory()

    for _ in range(32):
        file.write(events)

    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    file.discard()
    # As many records as one write brings have 200 KB.
    assert after - before < 500_000


def test_what_was_there_is_replaced_when_all_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "x.dat"
    out.write_bytes(b"old")
    file = TraceDatFile(out, KERNEL, SOURCE)
    file.write(many(200_000))
    assert out.read_bytes() == b"old"

    file.close()

    assert len(list(read_dat(out.read_bytes()).events())) == 200_000
    assert [path.name for path in tmp_path.iterdir()] == ["x.dat"]
    mask = os.umask(0)
    os.umask(mask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~mask


def test_nothing_is_left_of_what_is_given_up(tmp_path: Path) -> None:
    file = TraceDatFile(tmp_path / "x.dat", KERNEL, SOURCE)
    file.write(many(200_000))

    file.discard()

    assert list(tmp_path.iterdir()) == []


def test_a_hostile_name_leaves_nothing_behind(tmp_path: Path) -> None:
    file = TraceDatFile(tmp_path / "x.dat", KERNEL, SOURCE)

    with pytest.raises(FormatError):
        file.write(many(3, replace(READ, event="a\nID: 1")))
    file.discard()

    assert list(tmp_path.iterdir()) == []
