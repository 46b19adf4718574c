"""Tables: what is under a name is that event's value."""

import io

from kprobes.model.resolved import RecordLayout
from kprobes.sinks import FORMATS
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout

READ = make_layout(1, ("u64", "string"), event="read")
OPEN = make_layout(2, ("string", "s32"), event="open")


def table(*rounds: list[tuple[RecordLayout, list[Row]]]) -> list[str]:
    """Return the lines of a table of batches, those of a round at once."""
    out = io.BytesIO()
    sink = FORMATS["table"](out, TraceSource(version=(6, 1), cpus=1))
    for each in rounds:
        sink.write(make_events([make_batch(layout, rows) for layout, rows in each]))
    sink.close()
    return out.getvalue().decode().splitlines()


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    rows = [
        Row(ts=1_500, cpu=1, pid=7, comm=b"cat", values=(5, b"/etc/passwd")),
        Row(ts=2_000_000_499, cpu=12, pid=12345, comm=b"a longer name", values=(12345, None)),
    ]

    found = table([(READ, rows)])

    assert found == [
        "    TIME  CPU  TASK             PID  EVENT  FUNCTION     a0  a1",
        '0.000002    1  cat                7  read   vfs_read      5  "/etc/passwd"',
        "2.000000   12  a longer name  12345  read   vfs_read  12345  (fault)",
    ]


def test_a_cell_is_empty_where_an_event_has_no_such_field() -> None:
    other = make_layout(3, ("u64",), event="vfs_read")

    found = table([(other, [Row(values=(5,))]), (READ, [Row(values=(6, b"x"))])])

    assert [line.split() for line in found[1:]] == [
        ["0.000000", "0", "sh", "1", "vfs_read", "5"],
        ["0.000000", "0", "sh", "1", "read", "vfs_read", "6", '"x"'],
    ]
    assert found[1].index(" 5") == found[2].index(" 6")


def test_new_fields_begin_another_table_and_known_ones_do_not() -> None:
    first, more = [(OPEN, [Row(values=(b"a", 5))])], [(OPEN, [Row(values=(b"longer", -5))])]
    new = [(make_layout(4, ("u8",) * 3, event="new"), [Row(values=(1, 2, 3))])]

    found = table(first, more, new)

    assert [line.split()[:1] for line in found] == [
        ["TIME"],
        ["0.000000"],
        ["0.000000"],
        [],
        ["TIME"],
        ["0.000000"],
    ]


def test_a_guests_text_cannot_look_like_another_row() -> None:
    row = Row(comm=b"\x1b[2J", values=(1, b"x\n0.1  2  sh"))

    found = table([(READ, [row])])

    assert len(found) == 2
    assert "\\x1b[2J" in found[1]
    assert found[1].endswith('"x\\n0.1  2  sh"')
