import io
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.model.events import NO_EVENTS, Events
from kprobes.sinks import FORMATS
from kprobes.sinks.json import dumps, header_line, reboot_mark, valid_text
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.json_lines import objects as valid
from tests.build.json_lines import parsed
from tests.build.ring import make_layout

SOURCE = TraceSource(version=(6, 1), cpus=2, release="6.1.0-56", arch="aarch64")
HEADER = (
    b'{"event":"header","group":"kprobes","version":"1.0","release":"6.1.0-56","arch":"aarch64",'
    b'"cpus":2,"time":"ts_ns","numbers":"string","args":{}}\n'
)


def written(events: Events, *, has_wide_numbers: bool = False) -> bytes:
    out = io.BytesIO()
    source = TraceSource(version=(5, 10), cpus=2, has_wide_numbers=has_wide_numbers)
    sink = FORMATS["json"](out, source)
    sink.write(events)
    sink.close()
    return out.getvalue()


def objects(events: Events, *, has_wide_numbers: bool = False) -> list[dict[str, Any]]:
    return parsed(written(events, has_wide_numbers=has_wide_numbers))


def unescaped(text: str) -> bytes:
    """Undo the escapes, as docs/reference/formats/json.md says."""
    escape = re.compile(rb"\\x([0-9a-f]{2})")
    return escape.sub(lambda found: bytes.fromhex(found[1].decode()), text.encode())


def test_a_clock_that_counts_no_nanoseconds_says_so() -> None:
    layout = make_layout(1, ("u64",))
    out = io.BytesIO()

    sink = FORMATS["json"](out, TraceSource(version=(6, 1), cpus=2, has_ns=False))
    sink.write(make_events([make_batch(layout, [Row(ts=77, values=(1,))])]))

    (shown,) = parsed(out.getvalue())
    assert shown["ts"] == 77
    assert "ts_ns" not in shown


def test_an_event_is_one_line_with_everything_in_it() -> None:
    layout = make_layout(
        2, ("s32", "ustring", "x64", "comm"), event="open", names=("dfd", "path", "ip", "comm")
    )
    row = Row(
        ts=4_435_259_123,
        cpu=1,
        pid=89,
        comm=b'a"b',
        context=1 << 31 | 3,
        values=(-100, b"/etc/passwd", (1 << 64) - 1, None),
    )

    text = written(make_events([make_batch(layout, [row])]))

    _, line = text.splitlines(keepends=True)
    assert line == (
        b'{"event":"open","group":"kprobes","ts_ns":4435259123,"cpu":1,"pid":89,'
        b'"comm":"a\\"b","flags":"d..3.","function":"vfs_read","ip":"0xffffffff81000080",'
        b'"args":{"dfd":-100,"path":"/etc/passwd","ip":"0xffffffffffffffff",'
        b'"comm":"a\\"b"}}\n'
    )


def test_what_faulted_is_null_and_only_that() -> None:
    layout = make_layout(1, ("u64", "string"), can_fault=True)
    rows = [Row(values=(None, None)), Row(values=(5, b"")), Row(values=(0, b"x"))]

    args = [event["args"] for event in objects(make_events([make_batch(layout, rows)]))]

    assert args == [{"a0": None, "a1": None}, {"a0": "5", "a1": ""}, {"a0": "0", "a1": "x"}]


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\0", b"")), max_size=5))
def test_no_byte_of_a_string_is_lost(texts: list[bytes]) -> None:
    layout = make_layout(1, ("string",))
    batch = make_batch(layout, [Row(values=(text,)) for text in texts])

    shown = [event["args"]["a0"] for event in objects(make_events([batch]))]

    assert [unescaped(text) for text in shown] == texts


@pytest.mark.parametrize(
    ("held", "shown"),
    [
        (b"\xff\xfeabc", r"\xff\xfeabc"),
        ("żółw".encode(), "żółw"),
        (rb"C:\dir", r"C:\dir"),
        (rb"\xff", r"\x5cxff"),
        (rb"\\x41", r"\\x5cx41"),
        ("\ud800".encode("utf-8", "surrogatepass"), r"\xed\xa0\x80"),
    ],
)
def test_text_is_valid_unicode_and_lossless(held: bytes, shown: str) -> None:
    assert valid_text(held) == shown
    assert unescaped(shown) == held


@given(st.binary(max_size=20))
def test_any_bytes_are_valid_unicode_and_lossless(held: bytes) -> None:
    assert unescaped(valid_text(held)) == held
    valid_text(held).encode("utf-8")


def test_texts_anywhere_in_an_object_are_valid_unicode() -> None:
    name = b"a\xff".decode("utf-8", "surrogateescape")

    (text,) = {dumps({name: [name, (1, None)]})}

    assert json.loads(text) == {r"a\xff": [r"a\xff", [1, None]]}


@pytest.mark.parametrize("value", [0, 1, (1 << 53) + 1, (1 << 64) - 1])
def test_what_is_a_number_goes_by_its_type_and_not_its_value(value: int) -> None:
    types = ("u64", "s64", "x64", "u32", "x32", "x64[2]")
    narrow = value & 0xFFFF_FFFF
    signed = value - (1 << 64) if value >> 63 else value
    values = (value, signed, value, narrow, narrow, (value, value))
    events = make_events([make_batch(make_layout(1, types), [Row(values=values)])])

    (texts,) = (event["args"].values() for event in objects(events))
    (numbers,) = (event["args"].values() for event in objects(events, has_wide_numbers=True))

    assert list(texts) == [str(value), str(signed), hex(value), narrow, narrow, [hex(value)] * 2]
    assert list(numbers) == [value, signed, value, narrow, narrow, [value, value]]


def test_the_output_is_ascii_so_any_reader_can_split_it_into_lines() -> None:
    layout = make_layout(1, ("string",))
    row = Row(comm="é\u2028".encode(), values=("\u2028\n\x85".encode(),))

    text = written(make_events([make_batch(layout, [row])]))

    assert text.isascii()
    assert text.count(b"\n") == 2


def test_events_come_in_the_order_of_time() -> None:
    batches = [
        make_batch(make_layout(1), [Row(ts=1), Row(ts=4)]),
        make_batch(make_layout(2), [Row(ts=2), Row(ts=3)]),
    ]

    shown = objects(make_events(batches, [(0, 0), (1, 0), (1, 1), (0, 1)]))

    assert [event["ts_ns"] for event in shown] == [1, 2, 3, 4]
    assert [event["event"] for event in shown] == ["e1", "e2", "e2", "e1"]


def test_a_return_has_its_caller_by_name_and_number() -> None:
    layout = make_layout(1, ("duration", "symbol"), names=("duration", "exit"), has_caller=True)
    row = Row(values=(250, 0), caller=(1 << 64) - 16)

    (event,) = objects(make_events([make_batch(layout, [row])]))

    assert (event["caller"], event["caller_ip"]) == ("0xfffffffffffffff0",) * 2
    assert event["function"] == "vfs_read"
    assert event["args"] == {"duration": "250", "exit": "0x0"}


def test_a_duration_that_could_not_be_measured_is_null() -> None:
    layout = make_layout(1, ("duration",), names=("duration",), has_caller=True)

    (event,) = objects(make_events([make_batch(layout, [Row(values=(None,))])]))

    assert event["args"] == {"duration": None}


def test_an_entry_has_no_caller() -> None:
    (event,) = objects(make_events([make_batch(make_layout(1), [Row()])]))

    assert "caller" not in event


def test_a_header_stands_before_all_events_and_nowhere_else() -> None:
    events = make_events([make_batch(make_layout(1), [Row()])])
    out = io.BytesIO()
    sink = FORMATS["json"](out, SOURCE)

    sink.write(NO_EVENTS)
    begun = out.getvalue()
    sink.write(events)
    sink.write(events)
    sink.close()

    assert begun == HEADER
    assert out.getvalue().startswith(HEADER)
    assert len(parsed(out.getvalue())) == 2


def test_without_events_there_is_a_header() -> None:
    out = io.BytesIO()

    FORMATS["json"](out, SOURCE).close()

    assert out.getvalue() == HEADER


def test_another_boot_goes_on_without_a_header() -> None:
    out = io.BytesIO()
    sink = FORMATS["json"](out, replace(SOURCE, is_rebooted=True))

    sink.write(make_events([make_batch(make_layout(1), [Row()])]))
    sink.close()

    (event,) = valid("event", out.getvalue())
    assert event["event"] == "e1"


def test_a_header_says_how_times_and_numbers_are_written() -> None:
    (line,) = valid("header", header_line(replace(SOURCE, has_ns=False, has_wide_numbers=True)))

    assert (line["time"], line["numbers"]) == ("ts", "number")


def test_a_header_is_a_line_that_no_release_can_break() -> None:
    (line,) = valid("header", header_line(replace(SOURCE, release='6.1"\n\udcff')))

    assert line["release"] == '6.1"\n\\xff'


def test_a_reboot_is_a_line_that_no_release_can_break() -> None:
    (line,) = valid("reboot", reboot_mark('6.1"\n'))

    assert line == {
        "event": "reboot",
        "group": "kprobes",
        "args": {"release": '6.1"\n'},
    }
