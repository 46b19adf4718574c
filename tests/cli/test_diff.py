"""``kprobe diff`` of recordings of no guest."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kprobes.cli.diff import Rate, Ratio, ratio_of_percentiles, ratio_of_rates
from kprobes.formats.recording import MARKER, FrameKind
from kprobes.model.resolved import RecordLayout
from kprobes.statistics import Distribution, TimeBins
from tests.build.json_lines import objects
from tests.build.kernel import TEXT
from tests.build.recorded import recorded
from tests.build.ring import Hit, Value, make_layout
from tests.cli.test_stats import made, run

MS = 10**6
SPAN = 10**9
READ = make_layout(1, ("duration", "ustring"), event="read", has_caller=True)
OPEN = make_layout(2, ("symbol",), event="open")
SHUT = make_layout(3, (), event="shut")


def times_of(count: int, seed: int) -> list[int]:
    """Return times within a second, of hits that do not depend on each other."""
    return sorted(np.random.default_rng(seed).integers(1, SPAN, count).tolist())


def reads(
    count: int,
    seed: int,
    *,
    took_ns: int = 10_000,
    path: bytes = b"/a",
    caller: int = TEXT + 256,
) -> list[Hit]:
    """Return reads of a second that took about so long."""
    took = np.random.default_rng(seed).exponential(took_ns, count).astype(int) + 1
    return [
        hit_of(READ, SPAN + now, (SPAN + now - ns, path), caller)
        for now, ns in zip(times_of(count, seed), took.tolist(), strict=True)
    ]


def hit_of(layout: RecordLayout, now: int, values: tuple[Value, ...] = (), caller: int = 0) -> Hit:
    return Hit(layout=layout, counter=now, values=values, caller=caller)


def write(path: Path, hits: Sequence[Hit]) -> Path:
    """Record hits from the beginning to the end of a second."""
    ends = [
        hit_of(SHUT, SPAN),
        *sorted(hits, key=lambda each: each.counter),
        hit_of(SHUT, 2 * SPAN),
    ]
    path.write_bytes(made((READ, OPEN, SHUT), ends).end())
    return path


def compared(
    capsysbinary: pytest.CaptureFixture[bytes], before: Path, after: Path, *words: str
) -> dict[str, Any]:
    status, out, err = run(capsysbinary, "diff", before, after, *words, "--format", "json")
    assert (status, err) == (0, "")
    (found,) = objects("diff", out)
    for kind in ("rates", "durations"):
        found[kind] = {each["name"]: each for each in found[kind]}
    return found


def test_what_has_not_changed_is_noise(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    claims = 0
    for seed in range(12):
        before = write(tmp_path / "a.rec", reads(400, seed))
        after = write(tmp_path / "b.rec", reads(400, seed + 100))

        found = compared(capsysbinary, before, after)

        changes = [*found["rates"].values(), *found["durations"].values()]
        assert [each["name"] for each in changes if each["change"] == "unknown"] == []
        claims += sum(not each["is_noise"] for each in changes)
        assert found["values"] == []
    # 1 in 100 of 48.
    assert claims <= 2


def test_what_happens_twice_as_often_is_more_and_the_other_way_round_less(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    few = write(tmp_path / "a.rec", reads(300, 1))
    many = write(tmp_path / "b.rec", reads(600, 2))

    up = compared(capsysbinary, few, many)["rates"]["read"]
    down = compared(capsysbinary, many, few)["rates"]["read"]

    assert (up["before"], up["after"], up["change"]) == (300.0, 600.0, "more")
    assert (down["change"], down["is_noise"]) == ("less", False)
    assert up["ratio"]["value"] == 2
    assert 1.5 < up["ratio"]["low"] < 2 < up["ratio"]["high"] < 2.6


def test_hits_in_bursts_are_not_taken_for_a_change(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def bursts(count: int, seed: int) -> list[Hit]:
        starts = [now for now in times_of(count, seed) for _ in range(40)]
        return [hit_of(OPEN, SPAN + now, (TEXT,)) for now in starts]

    before = write(tmp_path / "a.rec", bursts(10, 1))
    after = write(tmp_path / "b.rec", bursts(15, 2))

    found = compared(capsysbinary, before, after)["rates"]["open"]

    # Of single hits 400 and 600 would be a change.
    alone = [Rate(hits=count, dispersion=1, span_ns=SPAN) for count in (400, 600)]
    assert ratio_of_rates(*alone).significance > 1
    assert (found["before"], found["after"], found["change"]) == (400.0, 600.0, "noise")


def test_calls_that_take_longer_are_slower(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    before = write(tmp_path / "a.rec", reads(1500, 1))
    after = write(tmp_path / "b.rec", reads(1500, 2, took_ns=20_000))

    found = compared(capsysbinary, before, after)

    assert found["rates"]["read"]["change"] == "noise"
    for name in ("read.a0 p50", "read.a0 p99"):
        change = found["durations"][name]
        assert change["change"] == "slower"
        assert 1 < change["ratio"]["low"] < 2 < change["ratio"]["high"] < 4
        assert change["after"] / change["before"] == change["ratio"]["value"]
    back = compared(capsysbinary, after, before)["durations"]
    assert back["read.a0 p50"]["change"] == "faster"


def test_too_few_calls_say_nothing_of_the_slowest(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    before = write(tmp_path / "a.rec", reads(60, 1))
    after = write(tmp_path / "b.rec", reads(60, 2, took_ns=90_000))

    found = compared(capsysbinary, before, after)["durations"]

    assert found["read.a0 p50"]["change"] == "slower"
    assert (found["read.a0 p99"]["change"], found["read.a0 p99"]["ratio"]["high"]) == (
        "noise",
        None,
    )


def test_events_that_came_and_went_are_named(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    hits = [hit_of(OPEN, SPAN + now, (TEXT,)) for now in times_of(50, 3)]
    before = write(tmp_path / "a.rec", reads(100, 1))
    after = write(tmp_path / "b.rec", [*hits, *reads(2, 2)])
    once = write(tmp_path / "c.rec", [*hits[:1], *reads(100, 2)])
    at_once = write(tmp_path / "d.rec", [*hits[:1] * 40, *reads(100, 2)])

    came = compared(capsysbinary, before, after)["rates"]["open"]
    went = compared(capsysbinary, after, before)["rates"]["open"]
    chance = compared(capsysbinary, before, once)["rates"]["open"]
    burst = compared(capsysbinary, before, at_once)["rates"]["open"]

    assert (came["change"], came["is_noise"], came["before"], came["after"]) == (
        "new",
        False,
        0,
        50,
    )
    assert (went["change"], went["is_noise"], went["after"]) == ("gone", False, 0)
    assert (chance["change"], chance["is_noise"]) == ("new", True)
    assert (burst["change"], burst["is_noise"]) == ("new", True)


def test_callers_and_texts_that_came_and_went_are_named_whatever_their_offsets(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    # vfs_read and ext_read.
    vfs, ext = TEXT + 8, TEXT + 256
    before = write(tmp_path / "a.rec", [*reads(90, 1), *reads(30, 2, path=b"/old", caller=ext + 9)])
    after = write(tmp_path / "b.rec", [*reads(90, 3), *reads(30, 4, path=b"/new", caller=vfs)])

    found = compared(capsysbinary, before, after)["values"]

    rows = [(each["field"], each["value"], each["change"], each["hits"]) for each in found]
    assert sorted(rows) == [
        ("read.a1", "/new", "new", 30),
        ("read.a1", "/old", "gone", 30),
        ("read.caller", "_stext", "new", 30),
    ]
    assert {(each["share"], each["is_noise"]) for each in found} == {(0.25, False)}


def test_a_few_texts_that_a_much_shorter_recording_lacks_may_be_chance(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    short = write(tmp_path / "a.rec", reads(20, 1))
    long = write(tmp_path / "b.rec", [*reads(400, 2), *reads(6, 3, path=b"/new")])
    back = write(tmp_path / "c.rec", [*reads(14, 2), *reads(6, 3, path=b"/new")])

    (rare,) = compared(capsysbinary, short, long)["values"]
    (often,) = compared(capsysbinary, write(tmp_path / "d.rec", reads(400, 4)), back)["values"]

    assert (rare["value"], rare["change"], rare["is_noise"]) == ("/new", "new", True)
    assert (often["value"], often["change"], often["is_noise"]) == ("/new", "new", False)


@pytest.mark.parametrize(
    ("limits", "is_clear"),
    [
        ((0.5, 0.1, 0.9), True),
        ((0.5, 0.4, 1.1), False),
        ((2, 1.1, 9), True),
        ((2, 0.9, 2.2), False),
    ],
)
def test_a_ratio_is_clear_if_1_is_beyond_its_limit_on_that_side(
    limits: tuple[float, float, float], is_clear: bool
) -> None:
    value, low, high = limits

    ratio = Ratio(value=value, low=low, high=high)

    assert (ratio.significance > 1) is is_clear


def test_what_may_have_been_forgotten_is_not_called_new(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def opens(number: int) -> list[Hit]:
        return [hit_of(OPEN, SPAN + at * 1000, (1 << 40 | at,)) for at in range(number)]

    few, many = write(tmp_path / "a.rec", opens(20)), write(tmp_path / "b.rec", opens(1500))

    found = compared(capsysbinary, many, few)["values"]
    back = compared(capsysbinary, few, many)["values"]

    assert found == back == []


HEAD = """\
A  {a}
   kernel Linux 6.1.0
   events 302 in 1.000000 s
B  {b}
   kernel Linux 6.1.0
   events 642 in 1.000000 s

"""


def test_the_text_has_the_clearest_change_first(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    hits = [hit_of(OPEN, SPAN + now, (TEXT,)) for now in times_of(40, 3)]
    a = write(tmp_path / "a.rec", reads(300, 1, path=b"/o\x1b"))
    b = write(tmp_path / "b.rec", [*reads(600, 2), *hits])

    status, out, err = run(capsysbinary, "diff", a, b)

    assert (status, err) == (0, "")
    assert out.startswith(HEAD.format(a=a, b=b))
    assert max(map(len, out.splitlines()[6:])) <= 80
    rows = [re.split(r"  +", line) for line in out.splitlines()[7:]]
    assert rows[0] == ["EVENT", "A/S", "B/S", "RATIO", "99 % INTERVAL", "CHANGE"]
    assert rows[1] == ["open", "0.0", "40.0", "-", "-", "new"]
    assert rows[2] == ["read", "300.0", "600.0", "2.00", "1.67 to 2.40", "more"]
    assert rows[3][0::5] == ["shut", "noise"]
    assert ["DURATION", "A", "B", "RATIO", "99 % INTERVAL", "CHANGE"] in rows
    assert ["read.a1", "600", "100.0 %", "new", '"/a"'] in rows
    assert ["read.a1", "300", "100.0 %", "gone", '"/o\\x1b"'] in rows


def test_the_json_has_the_kernels_and_all_figures(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    a, b = (write(tmp_path / name, reads(100, seed)) for seed, name in enumerate(("a", "b")))

    found = compared(capsysbinary, a, b, "--event", "read")

    summary = {"release": "6.1.0", "boots": 1, "hits": 100, "lost": 0, "span_ns": SPAN}
    assert found["before"] == {"file": str(a)} | summary
    assert found["after"] == {"file": str(b)} | summary
    assert [*found["rates"]] == ["read"]
    assert {*found["durations"]} == {"read.a0 p50", "read.a0 p99"}


def test_recordings_of_nothing_differ_in_nothing(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    for name, hits in (("a.rec", []), ("b.rec", [hit_of(SHUT, 5)])):
        (tmp_path / name).write_bytes(made((SHUT,), hits).end())

    none = compared(capsysbinary, tmp_path / "a.rec", tmp_path / "a.rec")
    one = compared(capsysbinary, tmp_path / "a.rec", tmp_path / "b.rec")

    assert none["rates"] == {}
    assert one["rates"]["shut"] == {
        "name": "shut",
        "before": None,
        "after": None,
        "ratio": None,
        "change": "new",
        "is_noise": True,
    }


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_file_is_compared_as_far_as_it_is_whole_and_told(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], which: int
) -> None:
    paths = tmp_path / "a.rec", tmp_path / "b.rec"
    for path in paths:
        path.write_bytes(recorded(200))
    data = bytearray(recorded(200))
    data[data.rindex(MARKER + bytes((FrameKind.CHUNK,))) + 50] ^= 1
    paths[which].write_bytes(data)

    status, out, err = run(capsysbinary, "diff", *paths)

    assert status == 1
    assert "read" in out
    assert err == f"kprobe: {paths[which]}: 1 damaged place; what is whole was read\n"


def test_a_file_that_is_cut_anywhere_gives_one_message_at_most(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    data, whole, path = recorded(60), tmp_path / "a.rec", tmp_path / "b.rec"
    whole.write_bytes(data)
    seen: set[tuple[int, bool, int]] = set()
    for size in range(0, len(data), 131):
        path.write_bytes(data[:size])

        status, out, err = run(capsysbinary, "diff", whole, path)

        assert "internal error" not in err
        seen.add((status, bool(out), err.count("\n")))
    assert seen == {(1, False, 1), (0, True, 0)}


def test_only_one_recording_comes_from_standard_input(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    status, out, err = run(capsysbinary, "diff", "-", "-")

    assert (status, out) == (2, "")
    assert err == "kprobe: only one of two recordings can be standard input\n"


def test_an_interval_has_the_ratio_of_the_rates_99_times_in_100() -> None:
    rng = np.random.default_rng(5)

    def rate(mean: float, size: int) -> Rate:
        # Bursts of one size, at times that do not depend on each other.
        times: NDArray[Any] = np.repeat(rng.integers(0, SPAN, rng.poisson(mean)), size)
        bins = TimeBins()
        bins.add(times.astype(np.uint64))
        return Rate(hits=len(times), dispersion=bins.dispersion(SPAN), span_ns=SPAN)

    for size in (1, 20):
        ratios = [ratio_of_rates(rate(100, size), rate(150, size)) for _ in range(300)]

        assert sum((r.low or 0) <= 1.5 <= (r.high or 0) for r in ratios) >= 290
        assert sum(r.significance > 1 for r in ratios) > 100


def test_an_interval_has_the_ratio_of_the_percentiles_99_times_in_100() -> None:
    rng = np.random.default_rng(6)

    def durations(mean: float) -> Distribution:
        found = Distribution(is_signed=False)
        found.add(rng.exponential(mean, 6000).astype(np.uint64) + 1)
        return found

    for percent in (50, 99):
        ratios = [
            found
            for _ in range(150)
            if (found := ratio_of_percentiles(durations(1e5), durations(1.5e5), percent))
        ]

        assert len(ratios) == 150
        assert sum((r.low or 0) <= 1.5 <= (r.high or 0) for r in ratios) >= 146
        assert sum(r.significance > 1 for r in ratios) > 140


def test_what_is_always_the_same_is_clear_at_once() -> None:
    one, other = Distribution(is_signed=False), Distribution(is_signed=False)
    one.add(np.full(50, 5))
    other.add(np.full(50, 6))

    changed = ratio_of_percentiles(one, other, 50)
    same = ratio_of_percentiles(one, one, 50)

    assert changed == Ratio(value=1.2, low=1.2, high=1.2)
    assert changed is not None
    assert changed.significance == float("inf")
    assert same is not None
    assert same.significance == 0
