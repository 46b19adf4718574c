"""Every kind of field, in both formats."""

import io
from typing import Any

import pytest
from msgspec.structs import replace

from kprobes.model.resolved import RecordLayout
from kprobes.sinks import FORMATS
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.json_lines import parsed
from tests.build.ring import Value, make_layout

SYMBOLS = {0x1000: "vfs_read+0x0/0x310", 0x2004: "ext4_x+0x4/0x20 [ext4]", 0: "0x0"}
ORIGIN = TraceSource(
    version=(6, 12), cpus=2, symbol_at=lambda addr: SYMBOLS.get(addr, f"{addr:#x}")
)


def shown(layout: RecordLayout, *values: Value, source: TraceSource = ORIGIN) -> list[str]:
    """Return what stands after the place in each line of text."""
    rows = [Row(values=(value,)) for value in values]
    out = io.BytesIO()
    FORMATS["text"](out, source).write(make_events([make_batch(layout, rows)]))
    lines = out.getvalue().decode("latin-1").split(") a0=")[1:]
    return [line.partition("\n  ")[0].removesuffix("\n") for line in lines]


def loaded(layout: RecordLayout, *values: Value, source: TraceSource = ORIGIN) -> list[Any]:
    """Return the argument of each event in JSON."""
    rows = [Row(values=(value,)) for value in values]
    out = io.BytesIO()
    FORMATS["json"](out, source).write(make_events([make_batch(layout, rows)]))
    return [line["args"]["a0"] for line in parsed(out.getvalue())]


@pytest.mark.parametrize(
    ("kind", "values", "text", "objects"),
    [
        ("u8[3]", [(1, 2, 255)], ["{1,2,255}"], [[1, 2, 255]]),
        ("x32[2]", [(0, 255)], ["{0x0,0xff}"], [[0, 255]]),
        ("s16[1]", [(-1,)], ["{-1}"], [[-1]]),
        ("u64[2]", [None, (5, 6)], ["{0,0}", "{5,6}"], [None, ["5", "6"]]),
        ("x8[2]", [None], ["{0x0,0x0}"], [None]),
        ("char", [65, 0, 39, 233], ["'A'", "'\0'", "'''", "'\xe9'"], ["A", "\0", "'", r"\xe9"]),
        ("char", [None], ["'\0'"], [None]),
        ("char[3]", [(65, 37, 10)], ["{'A','%','\n'}"], [["A", "%", "\n"]]),
        ("symbol", [0x1000, 0x2004, 7], [SYMBOLS[0x1000], SYMBOLS[0x2004], "0x7"], None),
        ("symbol", [None, 0x1000], ["0x0", SYMBOLS[0x1000]], [None, SYMBOLS[0x1000]]),
        ("symbol[2]", [(0x1000, 9)], ["{vfs_read+0x0/0x310,0x9}"], [[SYMBOLS[0x1000], "0x9"]]),
        ("symstr", [0x2004, None], [f'"{SYMBOLS[0x2004]}"', "(fault)"], [SYMBOLS[0x2004], None]),
        ("symstr", [7], ['"0x7"'], ["0x7"]),
        ("string[2]", [(b"a", b"")], ['{"a",""}'], [["a", ""]]),
        ("string[2]", [(None, b"%d"), (b"b", None)], ['{(fault),"%d"}', '{"b",(fault)}'], None),
        ("ustring[1]", [(None,)], ["{(fault)}"], [[None]]),
        ("text=hello", [None], ['"hello"'], ["hello"]),
        ("text=100%d", [None, None], ['"100%d"', '"100%d"'], ["100%d", "100%d"]),
        ("text=", [None], ['""'], [""]),
    ],
)
def test_every_kind_is_shown_as_the_kernel_does_and_as_json_has_it(
    kind: str, values: list[Value], text: list[str], objects: list[Any] | None
) -> None:
    layout = make_layout(1, (kind,), can_fault=True)

    assert shown(layout, *values) == text
    assert objects is None or loaded(layout, *values) == objects


def _enum(kind: str, **enumerators: int) -> RecordLayout:
    layout = make_layout(1, (kind,), can_fault=True)
    pairs = tuple((value, name) for name, value in enumerators.items())
    return replace(layout, fields=(replace(layout.fields[0], enumerators=pairs),))


def test_an_enum_is_a_number_unless_names_are_asked_for() -> None:
    layout = _enum("s32", LIVE=0, GONE=2)
    names = replace(ORIGIN, has_enum_names=True)

    assert shown(layout, 0, 2, 3) == ["0", "2", "3"]
    assert loaded(layout, 0, 2, 3) == [0, 2, 3]
    assert shown(layout, 0, 2, 3, source=names) == ["LIVE", "GONE", "3"]
    assert loaded(layout, 0, 2, None, source=names) == ["LIVE", "GONE", None]


def test_an_enum_s_number_without_a_name_stays_the_number_that_it_was() -> None:
    names = replace(ORIGIN, has_enum_names=True)
    bits, flags = _enum("s32", READ=1, WRITE=2), _enum("x32", READ=1, WRITE=2)

    assert shown(bits, 2, 3, -4, source=names) == ["WRITE", "3", "-4"]
    assert shown(flags, 2, 0x13, source=names) == ["WRITE", "0x13"]
    assert loaded(bits, 2, 3, -4, source=names) == ["WRITE", 3, -4]


def test_an_enum_that_could_not_be_read_has_no_name() -> None:
    names = replace(ORIGIN, has_enum_names=True)

    assert shown(_enum("s32", LIVE=0), 0, None, source=names) == ["LIVE", "0"]
    assert shown(_enum("x32", LIVE=0), None, source=names) == ["0x0"]


def test_an_enumerator_of_all_ones_is_found_whatever_its_sign() -> None:
    names = replace(ORIGIN, has_enum_names=True)

    assert shown(_enum("s32", ALL=(1 << 32) - 1), -1, source=names) == ["ALL"]
    assert shown(_enum("s64", MINUS=-2), -2, source=names) == ["MINUS"]
    assert shown(_enum("x32", FIRST=1, SAME=1), 1, source=names) == ["FIRST"]


def test_fields_without_columns_stand_between_others() -> None:
    layout = make_layout(1, ("text=a%b", "u8[2]", "text=c", "string"), names=("a0", "b", "c", "d"))
    row = Row(values=(None, (1, 2), None, b"x"))
    out = io.BytesIO()

    FORMATS["text"](out, ORIGIN).write(make_events([make_batch(layout, [row])]))

    assert out.getvalue().endswith(b') a0="a%b" b={1,2} c="c" d="x"\n')


def test_an_address_is_looked_up_once() -> None:
    asked: list[int] = []

    def symbol_at(addr: int) -> str:
        asked.append(addr)
        return f"f{addr}"

    layout = make_layout(1, ("symbol",))
    lines = shown(layout, 1, 2, 1, 2, source=replace(ORIGIN, symbol_at=symbol_at))

    assert lines == ["f1", "f2", "f1", "f2"]
    assert asked == [1, 2]
