"""The schema that ``kprobe --json-schema`` prints, and what it refuses."""

import io
from collections.abc import Callable
from typing import Any

import pytest

from kprobes.lang.types import TYPES
from kprobes.model.events import Events
from kprobes.model.resolved import Storage
from kprobes.sinks import FORMATS
from kprobes.sinks.json import VERSION, header_line, reboot_mark
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.json_lines import is_header, jsonschema, objects, parsed, schema
from tests.build.ring import Value, make_layout

SOURCE = TraceSource(version=(6, 1), cpus=2, release="6.1.0", arch="x86_64")
NUMBERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "x8", "x16", "x32", "x64")
SYMBOLS = ("symbol", "symstr")
Line = dict[str, Any]


def written(events: Events, **options: Any) -> bytes:
    out = io.BytesIO()
    sink = FORMATS["json"](out, TraceSource(version=(6, 1), cpus=2, **options))
    sink.write(events)
    return out.getvalue()


def extremes(kind: str) -> list[Value]:
    """Return the least and the greatest number of a type."""
    if kind in SYMBOLS:
        return [0, (1 << 64) - 1]
    bits = int(kind[1:])
    if kind[0] == "s":
        return [-(1 << bits - 1), (1 << bits - 1) - 1]
    return [0, (1 << bits) - 1]


READ: dict[str, list[Value]] = {
    **{kind: extremes(kind) for kind in (*NUMBERS, *SYMBOLS)},
    "char": [0, 255],
    "string": [b"", b'a"\n\xff'],
    "ustring": [b"x"],
    "comm": [],
    "text=100%": [],
    "duration": [5],
    "stacktrace": [b"", bytes(range(16))],
    **{f"{kind}[2]": [(0, 1)] for kind in (*NUMBERS, "char", "symbol")},
    "string[2]": [(b"a", None), (None, None)],
}
UNREAD = [kind for kind in READ if kind not in ("s8", "s8[2]", "string[2]", "stacktrace")]
"""With a value that could not be read: the stale byte of such a row is no s8."""
VALUES = {kind: [*values, *([None] if kind in UNREAD else [])] for kind, values in READ.items()}


@pytest.mark.parametrize("is_wide", [False, True], ids=["strings", "numbers"])
@pytest.mark.parametrize("kind", VALUES)
def test_events_of_every_type_are_valid(kind: str, is_wide: bool) -> None:
    layout = make_layout(1, (kind,), has_caller=True, can_fault=True)
    events = make_events([make_batch(layout, [Row(values=(each,)) for each in VALUES[kind]])])

    lines = parsed(written(events, has_wide_numbers=is_wide))

    assert len(lines) == len(VALUES[kind])


def test_no_type_and_no_storage_is_left_out() -> None:
    layouts = [make_layout(1, (kind,)) for kind in VALUES]

    assert {layout.fields[0].storage for layout in layouts} == {*Storage}
    # The rest is fetched as a string.
    assert {layout.fields[0].type for layout in layouts} >= {*TYPES} - {"%pd", "%pD"}


def test_the_greatest_numbers_of_an_event_are_valid() -> None:
    rows = [Row(ts=(1 << 64) - 1, cpu=(1 << 16) - 1, pid=pid) for pid in (-(1 << 31), 1 << 30)]
    batch = make_batch(make_layout(1), rows)

    assert len(parsed(written(make_events([batch])))) == 2
    assert len(parsed(written(make_events([batch]), has_ns=False))) == 2


def test_flags_of_every_context_are_valid() -> None:
    contexts = [1 << bit for bit in range(32)] + [(1 << 32) - 1, 0x0100, 0xF0_0000, 15 << 27]
    rows = [Row(context=context) for context in contexts]

    assert len(parsed(written(make_events([make_batch(make_layout(1), rows)])))) == len(rows)


@pytest.mark.parametrize("name", ["header", "reboot"])
def test_an_event_may_have_the_name_of_another_line(name: str) -> None:
    batch = make_batch(make_layout(1, event=name), [Row(ts=5)])

    (line,) = parsed(written(make_events([batch])))

    assert (line["event"], line["ts_ns"], is_header(line)) == (name, 5, False)


def event() -> Line:
    """Return an event of a return."""
    layout = make_layout(1, ("u64", "string[2]"), has_caller=True)
    batch = make_batch(layout, [Row(values=(5, (b"a", b"b")))])
    return parsed(written(make_events([batch])))[0]


def header() -> Line:
    return objects("header", header_line(SOURCE))[0]


def reboot() -> Line:
    return objects("reboot", reboot_mark("6.1.0"))[0]


LINES = {"event": event, "header": header, "reboot": reboot}
OPTIONAL = {"caller", "caller_ip"}
MEMBERS = {
    "event": "event group ts_ns cpu pid comm flags caller caller_ip function ip args",
    "header": "event group version release arch cpus time numbers args",
    "reboot": "event group args",
}
NEEDED = [(name, member) for name, members in MEMBERS.items() for member in members.split()]
WRONG: list[Line] = [
    {"ts": 5},
    {"ts_ns": "5"},
    {"ts_ns": -1},
    {"ts_ns": 1.5},
    {"ts_ns": 1 << 64},
    {"pid": None},
    {"comm": 7},
    {"flags": "...."},
    {"flags": "x...."},
    {"ip": 5},
    {"ip": "ffff"},
    {"args": []},
    {"args": {"a0": 1 << 64}},
    {"args": {"a0": 1.5}},
    {"args": {"a0": True}},
    {"args": {"a0": {}}},
    {"args": {"a0": [[1]]}},
]


def is_valid(line: Line) -> bool:
    """Whether readers would take it: they do not mind other members."""
    return jsonschema.Draft202012Validator(schema()).is_valid(line)


@pytest.mark.parametrize(("name", "member"), NEEDED, ids=[f"{n}-{m}" for n, m in NEEDED])
def test_a_line_without_one_of_its_members_is_none(name: str, member: str) -> None:
    line = LINES[name]()
    assert is_valid(line)
    assert [*line] == MEMBERS[name].split()

    del line[member]

    assert not is_valid(line)


def test_an_entry_has_no_caller_and_is_valid() -> None:
    line = {name: value for name, value in event().items() if name not in OPTIONAL}

    assert is_valid(line)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_an_event_with_another_value_is_none(wrong: Line) -> None:
    assert not is_valid(event() | wrong)


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_members_of_a_later_minor_version_are_no_error_to_readers(
    line: Callable[[], Line],
) -> None:
    later = line() | {"later": [1]}

    assert is_valid(later)


def test_of_the_versions_a_schema_is_for_all_of_one_major() -> None:
    versions = ["1.0", "1.12", "2.0", "1", "x", "11.0"]

    valid = [each for each in versions if is_valid(header() | {"version": each})]

    assert valid == ["1.0", "1.12"]
    assert schema()["$id"] == f"urn:kprobes:json:{VERSION}"


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_tests_mind_members_that_the_schema_does_not_name() -> None:
    line = b'{"event":"reboot","group":"kprobes","args":{"release":"6.1","more":1}}'

    with pytest.raises(jsonschema.ValidationError, match="'more' was unexpected"):
        objects("reboot", line)
