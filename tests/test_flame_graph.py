"""Flame graphs: the frames of counted stacks, in the files of others and in our own."""

import json
import re
import sys
from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace

from kprobes import flame_graph
from kprobes.column_hist import histogram_of
from kprobes.errors import UsageError
from kprobes.flame_graph import (
    FORMS,
    SUFFIXES,
    Chain,
    check_installed,
    folded,
    html,
    speedscope,
    svg,
)
from kprobes.histogram import Histogram
from tests.build.events import Row, make_batch, make_events
from tests.build.reference import packed
from tests.build.ring import make_layout
from tests.test_column_filter import SOURCE

NAMES = {0x10: "read+0x0/0x9", 0x20: "sys_read+0x8/0x9", 0x30: "entry+0x4/0x9 [mod]", 0x40: "a;b"}
ENTRY = make_layout(
    1, ("stacktrace",), names=("common_stacktrace",), where="read+0x0/0x9", event="entered"
)
STACKS: dict[Chain, int] = {("sh", "entry", "read"): 3, ("sh", "entry"): 1, ("ls", "x<&>"): 2}


def named(addr: int) -> str:
    return NAMES.get(addr, hex(addr))


def counted(trigger: str, *rows: Row, is_return: bool = False) -> Histogram:
    layout = replace(ENTRY, ip=0x10, caller_offset=40 if is_return else None)
    events = make_events([make_batch(layout, rows)])
    source = replace(SOURCE, symbol_at=named)
    found = histogram_of([events], trigger, source)
    assert found is not None
    return found


def stack(*addresses: int, comm: bytes = b"sh") -> Row:
    return Row(comm=comm, values=(packed(addresses),))


def test_stacks_begin_with_who_called_first() -> None:
    rows = [stack(0x10, 0x20, 0x30)] * 3 + [stack(0x10, 0x30), stack(0x10, 0x99, comm=b"l;s")]

    found = flame_graph.stacks_of(counted("keys=comm,function,stack", *rows))

    assert dict(found) == {
        ("sh", "entry [mod]", "sys_read", "read"): 3,
        ("sh", "entry [mod]", "read"): 1,
        ("l:s", "0x99", "read"): 1,
    }


def test_the_function_that_returns_is_added() -> None:
    rows = [stack(0x20, 0x30), stack(0x10, 0x20)]

    found = flame_graph.stacks_of(counted("keys=function,stack", *rows, is_return=True))

    assert dict(found) == {("entry [mod]", "sys_read", "read"): 1, ("sys_read", "read"): 1}


def test_the_programs_calls_come_before_the_kernels_whatever_the_order_of_keys() -> None:
    types, names = ("stacktrace", "userstacktrace"), ("common_stacktrace", "common_userstacktrace")
    layout = make_layout(1, types, names=names, where="read+0x0/0x9", event="entered")
    row = Row(values=(packed([0x10, 0x20]), packed([0x40_1000, 0x40_2000])))
    events = make_events([make_batch(layout, [row])])

    for keys in ("stack,ustack", "ustack,stack"):
        found = histogram_of([events], f"keys={keys}", replace(SOURCE, symbol_at=named))
        assert found is not None
        frames = ("0x402000", "0x401000", "sys_read", "read")
        assert dict(flame_graph.stacks_of(found)) == {frames: 1}


def test_what_has_no_stack_is_no_flame_graph() -> None:
    with pytest.raises(UsageError, match="count by stack"):
        flame_graph.stacks_of(counted("keys=comm", stack(0x10)))


def test_folded_lines_are_frames_between_semicolons() -> None:
    assert folded(STACKS) == b"sh;entry;read 3\nsh;entry 1\nls;x<&> 2\n"


def test_speedscope_has_each_frame_once() -> None:
    found = json.loads(speedscope(STACKS))

    frames = [frame["name"] for frame in found["shared"]["frames"]]
    (profile,) = found["profiles"]
    assert len(frames) == len(set(frames)) == 5
    stacks = {tuple(frames[n] for n in each) for each in profile["samples"]}
    assert (stacks, profile["weights"]) == (set(STACKS), [3, 1, 2])
    assert (profile["startValue"], profile["endValue"]) == (0, 6)


def test_the_page_has_a_box_for_each_frame_and_what_is_below_it() -> None:
    text = html(STACKS).decode()

    found = re.search(r'id="figures">(.*?)</script>', text)
    assert found is not None
    (trace,) = json.loads(found[1])["flame"]["data"]
    names = dict(zip(trace["ids"], trace["labels"], strict=True))
    parents = [names.get(each, "") for each in trace["parents"]]
    boxes = set(zip(trace["labels"], parents, trace["values"], strict=True))
    assert boxes == {
        ("all", "", 6),
        ("sh", "all", 4),
        ("entry", "sh", 4),
        ("read", "entry", 3),
        ("ls", "all", 2),
        # Plotly has tags of its own.
        ("x&lt;&amp;&gt;", "ls", 2),
    }


def test_the_picture_is_drawn_whatever_the_names_are() -> None:
    for stacks in (STACKS, {}, {("$a_b$", "\\x"): 1}):
        root = ET.fromstring(svg(stacks))

        assert root.tag.endswith("svg")


def test_every_form_has_a_suffix() -> None:
    assert {*SUFFIXES.values()} == {*FORMS}
    for form in FORMS:
        check_installed(form)


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(UsageError, match=r"pip install 'kprobes\[plot\]'"):
        check_installed("svg")
