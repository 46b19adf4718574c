"""Pages of recordings: their numbers are the events', texts are no markup, their size is bound.

Numbers are computed a second time here, by NumPy from all batches at once.
"""

import json
import random
import re
import subprocess
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

import kprobes
from kprobes.cli.main import main
from kprobes.export.html import HtmlFile
from kprobes.model.events import Batch, Events
from kprobes.model.recording import RecordedKernel
from kprobes.model.resolved import RecordLayout
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.kernel import TEXT
from tests.build.recorded import CLOCK, CPUS, KERNEL, MODULE, SYMBOLS, Recorded, recorded
from tests.build.ring import Hit, Value, make_layout

offline: Any = import_module("plotly.offline")
SOURCE = TraceSource(version=(6, 1), cpus=CPUS)
READ, OPEN, WORK = (
    replace(
        make_layout(
            1,
            ("s64", "x64", "duration"),
            event="read",
            has_caller=True,
            can_fault=True,
            names=("got", "file", "duration"),
        ),
        definition="r:read vfs_read got=$retval:s64 file=$arg1:x64",
    ),
    replace(
        make_layout(
            2,
            ("s32", "string", "comm", "char"),
            event="open",
            where="do_sys_openat2+0x0/0x310",
            names=("dfd", "path", "by", "mode"),
        ),
        definition="p:open do_sys_openat2 dfd=%di:s32 path=+0(%si):string by=$comm mode=%dl:char",
    ),
    make_layout(3, ("symbol", "duration"), event="work", has_caller=True, names=("fn", "duration")),
)
COMMS = (b"postgres", b"nginx", b"kworker/0:1", b"\xff\xfe")
PATHS = (b"/etc/passwd", b"/lib/libc.so.6", b"", b'"quoted"\n', b"\xc3\x28", None)
SCRIPT = b"</script><script>document.title='gone'</script>"
IMAGE = b"<img src=x onerror=\"document.title='gone'\">"
_UNREAD = range(2700, 3100)
HOSTILE = (
    SCRIPT,
    IMAGE,
    b"<!-- <script>",
    b"\"'&quot;&lt;b&gt;",
    "\u2028\u2029\u202e".encode(),
    b"\xff\xfe\x1b]0;x\x07",
    b"{{plotly}} ${x} %{y}",
    b"<a href=\"javascript:document.title='gone'\">x</a>",
)


def busy(hits: int = 6000, seed: int = 3) -> bytes:
    """Return a recording of three events, two of which have durations, with a burst in it."""
    rng = random.Random(seed)
    clock = replace(CLOCK, ns_at=4435 * 10**9, mult=1, shift=0)
    found = Recorded(layouts=(READ, OPEN, WORK), clock=clock)
    now = 1000
    for number in range(hits):
        is_burst = 0.3 < number / hits < 0.45
        now += int(rng.expovariate(1 / (80_000 if is_burst else 400_000))) + 1
        layout = rng.choices((READ, OPEN, WORK), (12, 3, 3))[0]
        hit = Hit(
            layout=layout,
            counter=now,
            pid=rng.randrange(100, 140),
            comm=rng.choices(COMMS, (40, 22, 9, 1))[0],
            values=_values(rng, layout, now),
            caller=rng.choice((TEXT + 64, TEXT + 280, MODULE + 16)),
        )
        found.rings[rng.randrange(CPUS)].write(hit)
        # Where nobody looks for so long, rings are full.
        if not number % 40 and number not in _UNREAD:
            found.look()
    found.look()
    return found.end()


def _values(rng: random.Random, layout: RecordLayout, now: int) -> tuple[Value, ...]:
    took = int(rng.lognormvariate(*((8.2, 0.8) if rng.random() < 0.85 else (13, 1.1))))
    if layout is READ:
        got = rng.choice((4096, 4096, -11, 0, rng.randrange(3000), None))
        # What was entered on a CPU whose counter is ahead is not known to have taken any time.
        entry = now + 5 if rng.random() < 0.01 else now - took
        return got, 0xFFFF_8880_0000_0000 + 64 * rng.randrange(3000), entry
    if layout is OPEN:
        return rng.choice((-100, 3)), rng.choice(PATHS), 0, rng.randrange(65, 70)
    return TEXT + rng.choice((0, 256, 256)), now - took


class Page(HTMLParser):
    """What a browser finds in a page.

    Attributes:
        tags: elements with their attributes, in their order.
        scripts: what is in script elements.
        facts: what stands above everything, by name.
        tables: by the heading above and the first column's name, rows of cells: text and title.
        text: all that is shown.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.facts: dict[str, str] = {}
        self.tables: dict[tuple[str, str], list[list[tuple[str, str]]]] = {}
        self.text = ""
        self._heading = self._fact = ""
        self._rows: list[list[tuple[str, str]]] | None = None
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("h2", "h3"):
            self._heading = ""
        elif tag == "script":
            self.scripts.append("")
        elif tag == "table":
            self._rows = None
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag == "td" and self._rows is not None:
            self._rows[-1].append(("", dict(attrs).get("title") or ""))
        if tag != "span":
            self._in = tag

    def handle_endtag(self, tag: str) -> None:
        if tag != "span":
            self._in = ""

    def handle_data(self, data: str) -> None:
        match self._in:
            case "script":
                self.scripts[-1] += data
                return
            case "h2" | "h3":
                self._heading += data
            case "dt":
                self._fact = data
            case "dd":
                self.facts.setdefault(self._fact, data)
            case "th" if self._rows is None:
                self._rows = self.tables.setdefault((self._heading, data), [])
            case "td" if self._rows is not None:
                text, title = self._rows[-1].pop()
                self._rows[-1].append((text + data, title))
            case _:
                pass
        self.text += data

    @property
    def figures(self) -> list[Any]:
        """What is drawn."""
        return list(json.loads(self.scripts[0]).values())

    def texts(self, heading: str, column: str) -> list[list[str]]:
        """Return the texts of a table's cells."""
        return [[text for text, _ in row] for row in self.tables[heading, column]]


def page_of(rounds: Sequence[Events], directory: Path, kernel: RecordedKernel = KERNEL) -> str:
    """Return the page of events."""
    file = HtmlFile(directory / "out.html", kernel, replace(SOURCE, has_ns=kernel.has_ns))
    for events in rounds:
        file.write(events)
    file.close()
    return (directory / "out.html").read_text("utf-8")


def hostile_page(directory: Path) -> str:
    """Return the page of a recording whose every text would like to be markup."""
    layout = replace(
        make_layout(1, ("string", "duration"), has_caller=True, names=(IMAGE.decode(), "duration")),
        event=SCRIPT.decode() + HOSTILE[-1].decode(),
        function=IMAGE.decode(),
        definition=SCRIPT.decode(),
    )
    rows = [
        Row(ts=9 * number, comm=text[:16], values=(text, number))
        for number, text in enumerate(HOSTILE * 3, 1)
    ]
    kernel = replace(KERNEL, release=SCRIPT.decode(), target=IMAGE.decode(), writer="<b>")
    return page_of([make_events([make_batch(layout, rows)])], directory, kernel)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("html") / "x.rec"
    path.write_bytes(busy())
    return path


@pytest.fixture(scope="module")
def text(recording: Path) -> str:
    out = recording.with_name("out.html")
    assert main(["convert", str(recording), str(out)]) == 0
    return out.read_text("utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture(scope="module")
def batches(recording: Path) -> dict[str, list[Batch]]:
    """Events by name, each round's batch of its own."""
    found: dict[str, list[Batch]] = {}
    for events in kprobes.load(recording).batches():
        for batch in events.batches:
            found.setdefault(batch.layout.event, []).append(batch)
    return found


def column(batches: list[Batch], field: int | None = None) -> NDArray[Any]:
    """Return a field of all of them, or their times."""
    return np.concatenate([b.ts if field is None else b.values[field] for b in batches])


def durations(batches: list[Batch]) -> NDArray[np.uint64]:
    """Return those that are known."""
    found = column(batches, -1)
    return found[found > 0]


def counted(values: Sequence[Any]) -> list[list[str]]:
    """Return what a table of these values shows, but for ties, from the most frequent on."""
    total = len(values)
    rows = [[str(v), f"{n:,}", f"{100 * n / total:.1f} %"] for v, n in Counter(values).items()]
    return sorted(rows, key=lambda row: (-int(row[1].replace(",", "")), row[0]))


def by_count(rows: list[list[str]]) -> list[list[str]]:
    return sorted(rows, key=lambda row: (-int(row[1].replace(",", "")), row[0]))


def test_the_head_has_the_kernel_and_what_was_recorded(page: Page, recording: Path) -> None:
    trace = kprobes.load(recording)
    times = np.concatenate([b.ts for e in trace.batches() for b in e.batches])
    span = (int(times.max()) - int(times.min())) / 10**9

    assert page.facts["target"] == "qemu:here"
    assert page.facts["architecture"] == "x86_64, 2 CPUs"
    assert page.facts["recorded"] == "1970-01-01 00:00:00 UTC"
    assert page.facts["events"] == f"{len(times):,}"
    assert page.facts["first to last event"] == f"{span:.2f} s"
    assert trace.counts.lost > 100
    assert page.facts["lost"].startswith(f"{trace.counts.lost:,} (CPU ")
    assert "Kernel events, Linux 6.1.0" in page.text
    assert READ.definition in page.text


def test_events_have_their_hits_rates_and_percentiles(
    page: Page, batches: dict[str, list[Batch]]
) -> None:
    times = np.concatenate([column(each) for each in batches.values()])
    span = (int(times.max()) - int(times.min())) / 10**9
    rows = {row[0][0]: row[1:] for row in page.tables["Events", "event"]}

    assert list(rows) == sorted(batches, key=lambda name: -len(column(batches[name])))
    for name, row in rows.items():
        hits = len(column(batches[name]))
        texts = [text for text, _ in row[:3]]
        assert texts == [f"{hits:,}", f"{100 * hits / len(times):.1f} %", f"{hits / span:,.1f}"]
        if name == "open":
            assert [text for text, _ in row[3:]] == ["-"] * 4
            continue
        shown = [int(title.replace(",", "")) for _, title in row[3:]]
        wanted = np.percentile(durations(batches[name]), (50, 90, 99, 100), method="inverted_cdf")
        assert shown == wanted.tolist()
    assert page.text.count("Percentiles are exact.") == 2


def test_values_are_counted(page: Page, batches: dict[str, list[Batch]]) -> None:
    opened = batches["open"]
    paths = ["(fault)" if v is None else _shown(v) for v in column(opened, 1).tolist()]
    codes = [f"'{chr(code)}'" for code in column(opened, 3).tolist()]
    comms = [_comm(each) for b in opened for each in b.comm.tolist()]
    functions = [_symbol(addr) for addr in column(batches["work"], 0).tolist()]
    callers = [
        _symbol(addr)
        for b in batches["work"]
        for addr in (b.caller.tolist() if b.caller is not None else ())
    ]

    assert by_count(page.texts("open", "path")) == counted(paths)
    assert by_count(page.texts("open", "mode")) == counted(codes)
    assert by_count(page.texts("open", "task")) == counted(comms)
    assert by_count(page.texts("open", "dfd")) == counted(column(opened, 0).tolist())
    assert by_count(page.texts("work", "fn")) == counted(functions)
    assert by_count(page.texts("work", "caller")) == counted(callers)
    assert ("open", "by") not in page.tables


def test_of_many_values_the_most_frequent_are_shown(
    page: Page, batches: dict[str, list[Batch]]
) -> None:
    faulted = np.concatenate([b.faulted[0] for b in batches["read"] if b.faulted[0] is not None])
    got = column(batches["read"], 0)
    wanted = Counter(
        ["(fault)" if f else str(v) for v, f in zip(got.tolist(), faulted, strict=True)]
    )
    rows = page.texts("read", "got")

    assert [int(row[1].replace(",", "")) for row in rows[:-1]] == [
        n for _, n in wanted.most_common(10)
    ]
    assert {row[0]: int(row[1].replace(",", "")) for row in rows[:4]} == dict(wanted.most_common(4))
    rest = wanted.total() - sum(n for _, n in wanted.most_common(10))
    assert rows[-1][:2] == [f"{len(wanted) - 10:,} others", f"{rest:,}"]


@pytest.mark.parametrize("name", ["read", "work"])
def test_the_slowest_calls_are_those(page: Page, recording: Path, name: str) -> None:
    calls = [e for e in kprobes.load(recording) if e.name == name and e.args["duration"]]
    calls.sort(key=lambda event: -event.args["duration"])

    rows = page.tables[name, "duration"]

    assert len(rows) == 20
    for row, event in zip(rows, calls, strict=False):
        (_, took), (at, _), (cpu, _), (task, _), (args, _) = row
        assert int(took.replace(",", "")) == event.args["duration"]
        assert at == f"{event.ts // 10**9}.{event.ts % 10**9:09d}"
        assert (int(cpu), task.rpartition("-")[2]) == (event.cpu, str(event.pid))
        first = next(iter(event.args))
        value = event.args[first]
        expected = {"got": str(value or 0), "fn": _symbol(value or 0)}[first]
        assert args.startswith(f"{first}={expected}")
    points = [trace for trace in page.figures[0]["data"] if trace.get("mode") == "markers"]
    (own,) = [trace for trace in points if trace["name"] == name]
    assert own["x"] == [event.ts / 10**9 for event in calls[:100]]
    assert own["y"] == [event.args["duration"] / 10**9 for event in calls[:100]]


def test_the_timeline_has_each_hit_in_its_bin(page: Page, batches: dict[str, list[Batch]]) -> None:
    rows = {trace["name"]: trace for trace in page.figures[0]["data"] if "dx" in trace}

    for name, of_name in batches.items():
        trace = rows[name]
        width, start = round(trace["dx"] * 10**9), round(trace["x0"] * 10**9)
        wanted = np.bincount((column(of_name) - np.uint64(start)) // np.uint64(width))
        shown = np.array(trace["y"])
        assert 256 <= len(shown) <= 513
        assert width % 1000 == start % width == 0
        np.testing.assert_array_equal(shown[: len(wanted)], wanted)
        assert not shown[len(wanted) :].any()
    assert list(rows) == [
        "read",
        *sorted(("open", "work"), key=lambda n: -len(column(batches[n]))),
        "lost",
    ]


def test_what_was_lost_stands_where_it_was(
    page: Page, recording: Path, batches: dict[str, list[Batch]]
) -> None:
    (lost,) = [trace for trace in page.figures[0]["data"] if trace["name"] == "lost"]

    assert sum(lost["y"]) == kprobes.load(recording).counts.lost
    at = lost["x0"] + np.flatnonzero(lost["y"]) * lost["dx"]
    times = np.sort(np.concatenate([column(each) for each in batches.values()])) / 10**9
    # After the last event that was put in order when it was told, and before those after it.
    assert len(at) < 3
    assert times[_UNREAD.start - 40] < at.min() + lost["dx"]
    assert at.max() < times[_UNREAD.stop - 100]


@pytest.mark.parametrize("name", ["read", "work"])
def test_bars_have_the_calls_that_took_so_long(
    page: Page, batches: dict[str, list[Batch]], name: str
) -> None:
    known = durations(batches[name])
    order = [row[0] for row in page.texts("Events", "event") if row[0] != "open"]
    trace = page.figures[1 + order.index(name)]["data"][0]
    edges = np.round(np.array(trace["x"]) * 10**9)

    wanted, _ = np.histogram(known, edges)

    assert trace["y"] == [*wanted.tolist(), 0]
    assert sum(trace["y"]) == len(known)
    unknown = len(column(batches[name])) - len(known)
    assert (f"; of {unknown} the duration is not known." in page.text) == (unknown > 0)
    np.testing.assert_allclose(edges[1:] / edges[:-1], 2 ** (1 / 8), rtol=0.02)


def _shown(path: bytes) -> str:
    # As JSON's escapes, quotes and bytes that are no text.
    return f'"{path.decode("utf-8", "backslashreplace")}"'.replace("\n", "\\n")


def _comm(comm: bytes) -> str:
    return comm.decode("utf-8", "backslashreplace")


def _symbol(addr: int) -> str:
    found = SYMBOLS.at(addr)
    return found.place(addr) if found is not None else f"{addr:#x}"


def test_all_kinds_of_fields_are_shown(tmp_path: Path) -> None:
    (tmp_path / "x.rec").write_bytes(recorded(600))

    assert main(["convert", str(tmp_path / "x.rec"), str(tmp_path / "out.html")]) == 0

    page = Page((tmp_path / "out.html").read_text("utf-8"))
    assert page.facts["events"] == "600"
    shown = {column for heading, column in page.tables if heading == "e4"}
    assert shown == {"task", "a0", "a1", "a3", "a4"}
    ((others, count, share),) = page.texts("read", "a0")
    assert (others, share) == (f"{count} different ones", "100.0 %")
    assert sum(int(row[1].replace(",", "")) for row in page.texts("e4", "a1")) == 2 * int(
        {row[0]: row[1] for row in page.texts("Events", "event")}["e4"]
    )


def test_nothing_of_a_guests_text_is_markup(text: str, tmp_path: Path) -> None:
    usual = {tag for tag, _ in Page(text).tags}

    page = Page(hostile_page(tmp_path))

    assert {tag for tag, _ in page.tags} <= usual
    assert not {"img", "a", "b"} & usual
    assert len(page.scripts) == 3
    assert [name for _, attrs in page.tags for name in attrs if name.startswith("on")] == []
    assert page.scripts[1] == offline.get_plotlyjs()
    assert page.texts(*next(key for key in page.tables if key[1] == IMAGE.decode()))
    for part in (SCRIPT, IMAGE, b"\\u2028\\u2029\\u202e", b"\\xff\\xfe\\x1b]0;x\\x07"):
        assert part.decode() in page.text
    assert "\u2028" not in page.text


def test_nothing_of_a_guests_text_is_a_tag_of_plotlys(tmp_path: Path) -> None:
    page = Page(hostile_page(tmp_path))

    figure = page.figures[0]
    shown = [
        *(trace["name"] for trace in figure["data"]),
        *(each["text"] for each in figure["layout"]["annotations"]),
        *(
            part
            for each in figure["data"][1]["customdata"]
            for part in each
            if isinstance(part, str)
        ),
    ]
    assert not [each for each in shown if "<" in each]
    assert any("&lt;/script&gt;" in each for each in shown)
    assert {
        t for trace in figure["data"] for t in re.findall("<[^>]*>", trace["hovertemplate"])
    } == {
        "<b>",
        "</b>",
        "<br>",
        "<extra>",
        "</extra>",
    }
    assert "<" not in page.scripts[0]


def test_the_page_allows_its_own_scripts_and_loads_nothing(text: str, page: Page) -> None:
    (policy,) = [
        attrs["content"]
        for tag, attrs in page.tags
        if attrs.get("http-equiv") is not None and tag == "meta"
    ]
    hashes = [b64encode(sha256(each.encode()).digest()).decode() for each in page.scripts[1:]]

    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'"
    )
    loads = ("src", "href", "action", "data", "poster", "srcset")
    assert [a[n] for _, a in page.tags for n in loads if n in a] == ["data:,"]
    ours = text.replace(page.scripts[1], "")
    assert re.findall(r"https?:|//\w|@import|url\(", ours) == []


def test_a_clock_that_counts_no_nanoseconds_is_shown_as_it_is(tmp_path: Path) -> None:
    layout = make_layout(1, ("duration",), event="x", has_caller=True)
    rows = [Row(ts=1000 + i, values=(i,)) for i in range(1, 1500)]

    text = page_of(
        [make_events([make_batch(layout, rows)])], tmp_path, replace(KERNEL, has_ns=False)
    )

    page = Page(text)
    assert page.facts["first to last event"] == "1,498"
    assert page.texts("Events", "event")[0][3:] == ["-", "750", "1,350", "1,485", "1,499"]
    assert page.texts("x", "duration")[0][:2] == ["1,499", "2499"]


def test_a_recording_without_events_has_a_page(tmp_path: Path) -> None:
    page = Page(page_of([], tmp_path))

    assert (page.facts["events"], page.facts["lost"]) == ("0", "0")
    assert "There are no events." in page.text
    assert page.figures == []


def test_one_event_has_no_rate(tmp_path: Path) -> None:
    layout = make_layout(1, ("duration",), event="x")

    page = Page(page_of([make_events([make_batch(layout, [Row(values=(3,))])])], tmp_path))

    assert page.texts("Events", "event")[0][1:5] == ["1", "100.0 %", "-", "3 ns"]


def test_events_of_one_name_are_told_apart_by_their_groups(tmp_path: Path) -> None:
    one = make_layout(1, event="read")
    two = replace(make_layout(2, event="read"), group="mine")
    batches = [make_batch(layout, [Row(ts=5)]) for layout in (one, two)]

    page = Page(page_of([make_events(batches)], tmp_path))

    assert [row[0] for row in page.texts("Events", "event")] == ["kprobes/read", "mine/read"]


def _many(events: int, rows: int) -> Iterator[Events]:
    # Texts that are as long as can be on the page, all different.
    names = [f"{'<' * 200}{i}" for i in range(13)]
    for number in range(events):
        layout = replace(
            make_layout(
                number + 1,
                ("string",) * 13 + ("duration",),
                names=(*names, "duration"),
                has_caller=True,
            ),
            event=f"{number}{'&' * 200}",
            definition=f"{number}{'&' * 400}",
        )
        made = [
            Row(
                ts=row,
                comm=b"%d%s" % (row, b'"' * 12),
                values=(b"%d" % row + b'"' * 400,) * 13 + (row + 1,),
            )
            for row in range(rows)
        ]
        yield make_events([make_batch(layout, made)])


def test_no_recording_makes_a_page_of_more_than_10_mb(tmp_path: Path) -> None:
    text = page_of(list(_many(260, 110)), tmp_path)

    page = Page(text)
    assert len(text.encode()) < 10_000_000
    assert len(page.tables["Events", "event"]) == 200
    assert "And 60 more events." in page.text
    assert "and 210 more" in page.text
    assert "The 16 events with the most hits are shown." in page.text
    assert [t["name"] for t in page.figures[0]["data"] if "dx" in t][-1] == "252 other events"
    assert sum(page.figures[0]["data"][8]["y"]) == 252 * 110


def test_plotly_is_asked_for_where_it_is_not_installed(recording: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['plotly'] = None; from kprobes.cli.main import main; "
        f"sys.exit(main(['convert', {str(recording)!r}, {str(tmp_path / 'out.html')!r}]))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert done.stderr == "kprobe: plotly.offline is not installed: pip install 'kprobes[html]'\n"
