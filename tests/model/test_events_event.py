"""Batches to single events."""

import pytest

from kprobes.model.events import each_event
from kprobes.model.resolved import RecordLayout
from tests.build.events import Row, make_batch, make_events
from tests.build.typed import resolved


def layout_of(text: str) -> RecordLayout:
    return resolved(text).layout


def test_values_have_their_names_and_plain_types() -> None:
    layout = layout_of('p:x vfs_read n=count s=buf:string c=$comm t=\\"text" a=+0(%di):u8[2]')
    values = (7, b"a\xffb", b"sh", b"text", (1, 2))
    batch = make_batch(layout, [Row(ts=9, cpu=1, pid=42, values=values)])

    (event,) = each_event(make_events([batch]))

    assert (event.name, event.group, event.function) == ("x", "kprobes", "vfs_read")
    assert (event.ts, event.cpu, event.pid, event.comm) == (9, 1, 42, "sh")
    assert event.args == {"n": 7, "s": "a\\xffb", "c": "sh", "t": "text", "a": [1, 2]}
    assert event["n"] == 7
    assert event.caller is None


def test_a_field_that_is_not_there_is_told_with_those_that_are() -> None:
    layout = layout_of("p:x vfs_read n=count s=buf:string")
    (event,) = each_event(make_events([make_batch(layout, [Row(values=(7, b"a"))])]))

    with pytest.raises(KeyError, match="x has no field 'count'; its fields: n, s"):
        event["count"]


def test_what_could_not_be_read_is_none() -> None:
    batch = make_batch(layout_of("p:x vfs_read n=+0(%di) s=buf:string"), [Row(values=(None, None))])

    (event,) = each_event(make_events([batch]))

    assert event.args == {"n": None, "s": None}


def test_events_come_in_the_order_of_time() -> None:
    layout = layout_of("r:x vfs_read $retval")
    batch = make_batch(layout, [Row(ts=1, values=(1,), caller=5), Row(ts=2, values=(2,), caller=6)])

    found = [event["arg1"] for event in each_event(make_events([batch], [(0, 1), (0, 0)]))]

    assert found == [2, 1]
