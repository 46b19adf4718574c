"""``kprobe convert FILE OUT.dat``, read by trace-cmd as Debian has it."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.cli.main import main
from kprobes.export.trace_dat import TraceDatFile
from kprobes.model.events import Event, each_event
from kprobes.model.kernel import place_of
from kprobes.model.resolved import Storage
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import CPUS, KERNEL, LAYOUTS, SYMBOLS, Recorded, hits
from tests.build.ring import make_layout

# Not for a guest: `make test` installs trace-cmd, `make check` does not.
pytestmark = pytest.mark.guest

Line = tuple[str, int, int, int, str, str]
"""comm, pid, cpu, time in nanoseconds, event, and what it says."""
_LINE = re.compile(
    r" *(?P<comm>.*?)-(?P<pid>\d+) +\[(?P<cpu>\d+)\] (?:\S{4,5} )? *"
    r"(?P<s>\d+)\.(?P<part>\d{6,9}): (?P<event>\w+): +(?P<rest>.*)"
)
_PLACED = {
    # Where its symbols are, which the ones of these tests are not.
    layout.event: replace(layout, where=place_of(SYMBOLS, layout.ip))
    for layout in LAYOUTS
}
_SHORT = {"e2": {"a4": 8, "a5": 16}}
"""By event: signed numbers of which trace-cmd does not know the sign, and their bits."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace-cmd") / "x.rec"
    rings = Recorded(layouts=tuple(_PLACED.values()))
    for number, (cpu, hit) in enumerate(hits(2000)):
        rings.rings[cpu].write(hit)
        if not number % 40:
            rings.look()
    rings.look()
    path.write_bytes(rings.end())
    return path


@pytest.fixture(scope="module")
def dat(recording: Path) -> Path:
    out = recording.with_suffix(".dat")
    assert main(["convert", str(recording), str(out)]) == 0
    return out


def report(dat: Path, *words: str) -> str:
    """Return what trace-cmd prints, which must be without a warning."""
    if shutil.which("trace-cmd") is None:
        pytest.skip("trace-cmd is not installed: `make test` does that")
    done = subprocess.run(
        ["trace-cmd", "report", *words, str(dat)], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode("latin-1")


def lines_of(text: str) -> Iterator[Line]:
    """Yield the lines of events; one of our strings has a line feed in it, and a character may."""
    for line in text.replace('"quoted"\n', '"quoted"|').replace("'\n'", "''").split("\n"):
        found = _LINE.fullmatch(line)
        if found is not None:
            time = int(found["s"]) * 10**9 + int(found["part"].ljust(9, "0"))
            place = int(found["pid"]), int(found["cpu"]), time
            yield found["comm"], *place, found["event"], found["rest"]


def expected(recording: Path) -> list[Line]:
    """Return our own report's lines, as trace-cmd prints what is in them."""
    assert main(["report", str(recording), "-o", str(recording.with_suffix(".txt"))]) == 0
    text = recording.with_suffix(".txt").read_bytes().decode("latin-1")
    ours = list(lines_of(text))
    events = [event for each in kprobes.load(recording).batches() for event in each_event(each)]
    # Each task has one name, its last.
    comms = {pid: comm for comm, pid, *_ in ours}
    assert len(ours) == len(events) == 2000
    return [
        (comms[line[1]], *line[1:5], _rest(line[5], event))
        for line, event in zip(ours, events, strict=True)
    ]


def _rest(text: str, event: Event) -> str:
    # Places are numbers, as the kernel's own format has it; a fault is text like any other, and a
    # time that is not known the number 0.
    ip = f"{_PLACED[event.name].ip:x}"
    place = ip if event.caller is None else f"{ip} <- {event.caller:x}"
    said = text.partition(")")[2].replace("=?", "=0")
    said = re.sub(r'(?<!")\(fault\)', '"(fault)"', said)
    # Only in strings has a symbol its size and its module.
    said = re.sub(r"(=\w+\+0x[0-9a-f]+)/0x[0-9a-f]+(?: \[mod\])?", r"\1", said)
    for name, bits in _SHORT.get(event.name, {}).items():
        said = re.sub(rf"(?<= {name}=)-\d+", partial(_without_sign, bits), said)
    return f"({place}){_common(said)}"


def _without_sign(bits: int, number: re.Match[str]) -> str:
    return str(int(number[0]) % (1 << bits))


def _common(text: str) -> str:
    text = re.sub(r"='(.|>c<)?'", "=''", text)
    return re.sub(r"(?<==)0x([0-9a-f]+)\+0x([0-9a-f]+)", _sum, text)


def _sum(number: re.Match[str]) -> str:
    return f"{int(number[1], 16) + int(number[2], 16):#x}"


def test_the_report_is_ours(recording: Path, dat: Path) -> None:
    found = [(*line[:5], _common(line[5])) for line in lines_of(report(dat))]

    # Of events of one time, it has those of the first CPU first.
    assert sorted(found) == sorted(expected(recording))
    assert [line[3] for line in found] == sorted(line[3] for line in found)


def test_times_are_exact(recording: Path, dat: Path) -> None:
    found = [line[1:5] for line in lines_of(report(dat, "-t"))]

    events = [event for each in kprobes.load(recording).batches() for event in each_event(each)]
    assert sorted(found) == sorted((each.pid, each.cpu, each.ts, each.name) for each in events)


def test_each_field_is_there_by_its_name(dat: Path) -> None:
    found = {line[4]: line[5] for line in lines_of(report(dat, "-R"))}

    for event, layout in _PLACED.items():
        names = [
            f"{each.name}_{i}" if each.count and each.storage is Storage.STRING else each.name
            for each in layout.fields
            for i in range(each.count or 1)
        ]
        own = ["__probe_func", "__probe_ret_ip"] if layout.caller_offset else ["__probe_ip"]
        assert set(re.findall(r"(\w+)=", found[event])) == {*own, *names}


def test_events_are_of_their_groups(dat: Path) -> None:
    assert report(dat, "-E").split() == sorted(f"kprobes:{name}" for name in _PLACED)


def test_the_context_is_shown(tmp_path: Path) -> None:
    layout = make_layout(1, ("u32",), event="read")
    contexts = [1 << 31 | 1 << 24, 1 << 31, 0x8201_0002, 0x8110_0000, 0x8100_0100, 0x9901_0100]
    rows = [Row(ts=i, context=context, values=(i,)) for i, context in enumerate(contexts)]
    file = TraceDatFile(tmp_path / "x.dat", KERNEL, TraceSource(version=(6, 1), cpus=CPUS))
    file.write(make_events([make_batch(layout, rows)]))
    file.close()

    # It has no letter for an NMI.
    found = re.findall(r"-1 +0(\S+) ", report(tmp_path / "x.dat", "-l"))

    assert found == [".....", "d....", "dNh2.", ".....", "..s..", "..H.3"]


def test_what_was_lost_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    rings = Recorded()
    for number, (cpu, hit) in enumerate(hits(1500)):
        rings.rings[cpu].write(hit)
        if number in (600, 1400):
            rings.look()
    rings.look()
    path.write_bytes(rings.end())
    lost = [ring.lost for ring in rings.rings]
    assert min(lost) > 0

    assert main(["convert", str(path), str(tmp_path / "x.dat")]) == 0

    told = Counter[int]()
    for cpu, count in re.findall(r"CPU:(\d+) \[(\d+) EVENTS DROPPED\]", report(tmp_path / "x.dat")):
        told[int(cpu)] += int(count)
    kept = len(list(lines_of(report(tmp_path / "x.dat"))))
    assert kept + sum(lost) == 1500
    statistics = report(tmp_path / "x.dat", "--stat")
    assert [int(n) for n in re.findall(r"dropped events: (\d+)", statistics)] == lost
    assert 0 < told.total() <= sum(lost)


def test_an_empty_file_is_read(tmp_path: Path) -> None:
    TraceDatFile(tmp_path / "x.dat", KERNEL, TraceSource(version=(6, 1), cpus=CPUS)).close()

    assert not list(lines_of(report(tmp_path / "x.dat")))
