"""JSON of ``kprobe count``, ``kprobe hist`` and ``report --count --hist``: its schema, its page."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kprobes.cli.counting import Counting, Shown
from kprobes.cli.histograms import HistogramSink, shown_text
from kprobes.cli.main import main
from kprobes.model.events import NO_EVENTS
from tests.build.json_lines import jsonschema, objects, schema
from tests.build.recorded import recorded
from tests.test_column_filter import SOURCE, events
from tests.test_column_hist import counted

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "formats" / "json.md"
U64 = (1 << 64) - 1


def of_trigger(trigger: str) -> dict[str, Any]:
    """Return the object that is printed of what a trigger counts."""
    (found,) = objects("hist", shown_text(counted(trigger), Shown(form="json")))
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("--count", "comm,cpu"),
        ("--count", "function,pid"),
        ("--hist", "keys=a0.log2:vals=a0.avg,a0.max,a0.hex"),
        ("--hist", "keys=__probe_ret_ip.sym,a2.sym-offset,a3:vals=hitcount.percent,a0"),
        ("--hist", "keys=comm:size=128 if common_pid < 0"),
    ],
)
def test_what_report_prints_is_one_valid_object(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, words: tuple[str, str]
) -> None:
    path = tmp_path / "x.rec"
    path.write_bytes(recorded(200))

    status = main(["report", str(path), *words, "--format", "json"])

    (found,) = objects("hist", capsysbinary.readouterr().out)
    assert status == 0
    assert found["trigger"].startswith("hist:keys=")
    assert found["hits"] == sum(entry["hitcount"] for entry in found["entries"])


def test_the_whole_object_is_as_the_page_says() -> None:
    assert of_trigger("keys=comm,duration.log2:vals=got:sort=comm") == {
        "trigger": "hist:keys=comm,duration.log2:vals=hitcount,got:sort=comm:size=2048",
        "hits": 4,
        "dropped": 0,
        "unmeasured": 0,
        "entries": [
            {"keys": {"comm": "cat", "duration.log2": 128}, "hitcount": 1, "vals": {"got": -1}},
            {"keys": {"comm": "cat", "duration.log2": 32768}, "hitcount": 1, "vals": {"got": 0}},
            {"keys": {"comm": "dd", "duration.log2": 2048}, "hitcount": 1, "vals": {"got": 7}},
            {
                "keys": {"comm": "sh", "duration.log2": 1 << 19},
                "hitcount": 1,
                "vals": {"got": -300},
            },
        ],
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("common_pid.execname", "sh[4]"),
        ("path", "/tmp/x"),
        ("function.sym", "_stext"),
        ("__probe_func.sym-offset", "_stext+0x40/0x100"),
        ("got", -300),
        ("got.hex", "0xfffffffffffffed4"),
        ("got.log2", U64),
        ("got.buckets=100", -316),
        ("duration.log2", 1 << 19),
        ("duration.usecs", 400),
        ("duration.buckets=1000", 400_000),
        ("wide", 1),
    ],
)
def test_a_key_has_the_form_that_its_modifier_says(key: str, value: object) -> None:
    found = of_trigger(f"keys={key} if got == -300")

    assert [entry["keys"] for entry in found["entries"]] == [{key: value}]


@pytest.mark.parametrize(
    ("val", "value"),
    [
        ("got", -301),
        ("got.min", -300),
        ("got.max", -1),
        ("got.avg", -150.5),
        ("got.p50", -300),
        ("got.p99", -1),
        ("wide", (1 << 63) + 1),
        ("wide.hex", "0x8000000000000001"),
        ("hitcount.percent", 2),
    ],
)
def test_a_value_has_the_form_that_its_modifier_says(val: str, value: object) -> None:
    found = of_trigger(f"keys=common_type:vals={val} if got < 0")

    assert [entry["vals"] for entry in found["entries"]] == [{val: value}]


def lines_of_two_intervals(trigger: str, *, is_delta: bool) -> list[dict[str, Any]]:
    """Return what is shown of the same events twice, and at the end."""
    out = io.BytesIO()
    shown = Shown(form="json", interval_s=1e-9, is_delta=is_delta)
    sink = HistogramSink(out, SOURCE, Counting(trigger=trigger, shown=shown))

    sink.write(NO_EVENTS)
    sink.write(events())
    sink.write(events())
    sink.close()

    return objects("hist", out.getvalue())


def test_it_has_a_line_of_its_own_each_interval_and_at_the_end() -> None:
    lines = lines_of_two_intervals("keys=comm", is_delta=False)

    assert [line["hits"] for line in lines] == [7, 14, 14]


def test_lines_of_deltas_have_in_sum_what_was_counted() -> None:
    lines = lines_of_two_intervals("keys=comm:vals=got", is_delta=True)

    assert [line["hits"] for line in lines] == [4, 4, 0]
    assert lines[0]["entries"] == lines[1]["entries"]
    assert all(0 <= line["seconds"] < 60 for line in lines)


@pytest.mark.parametrize("member", ["trigger", "hits", "dropped", "unmeasured", "entries"])
def test_without_one_of_its_members_it_is_not_valid(member: str) -> None:
    found = of_trigger("keys=comm:vals=got")

    del found[member]

    with pytest.raises(jsonschema.ValidationError):
        objects("hist", json.dumps(found))


@pytest.mark.parametrize("member", ["keys", "hitcount", "vals"])
def test_without_one_of_an_entrys_members_it_is_not_valid(member: str) -> None:
    found = of_trigger("keys=comm:vals=got")

    del found["entries"][0][member]

    with pytest.raises(jsonschema.ValidationError):
        objects("hist", json.dumps(found))


@pytest.mark.parametrize(
    ("changed", "of_entry"),
    [
        ({"trigger": "keys=comm"}, {}),
        ({"hits": -1}, {}),
        ({"more": 0}, {}),
        ({}, {"more": 0}),
        ({}, {"hitcount": 0}),
        ({}, {"keys": {}}),
        ({}, {"keys": dict.fromkeys("abcd", 1)}),
        ({}, {"keys": {"a": None}}),
        ({}, {"keys": {"a": U64 + 1}}),
        ({}, {"keys": {"a": 1.5}}),
        ({}, {"vals": {"a": "5"}}),
        ({}, {"vals": {"a": None}}),
    ],
)
def test_what_no_trigger_counts_is_not_valid(
    changed: dict[str, Any], of_entry: dict[str, Any]
) -> None:
    found = of_trigger("keys=comm:vals=got") | changed

    found["entries"][0] |= of_entry

    with pytest.raises(jsonschema.ValidationError):
        objects("hist", json.dumps(found))


def test_the_page_has_each_member_and_a_valid_example() -> None:
    text = _PAGE.read_text().partition("\n## Counts\n")[2].partition("\n## ")[0]
    example = re.search(r"^```\n(\{.*?)^```$", text, re.DOTALL | re.MULTILINE)
    rows = "\n".join(re.findall(r"^\| .*$", text, re.MULTILINE))
    own = schema()["$defs"]["hist"]["properties"]
    names = [*own, *own["entries"]["items"]["properties"]]

    assert example is not None
    (found,) = objects("hist", example[1].replace("\n", ""))
    assert found["hits"] == sum(entry["hitcount"] for entry in found["entries"])
    assert [name for name in names if f"`{name}`" not in rows] == []
