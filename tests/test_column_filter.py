"""Filters of recorded events: what the kernel's language says of values that are known."""

import pytest

from kprobes.column_filter import ColumnFilter
from kprobes.errors import DefinitionError
from kprobes.model.events import Events
from kprobes.ring.merge import in_order
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch
from tests.build.recorded import SYMBOLS
from tests.build.ring import make_layout

SOURCE = TraceSource(
    version=(6, 1),
    cpus=4,
    symbol_at=lambda addr: s.place(addr) if (s := SYMBOLS.at(addr)) else hex(addr),
)
READ = make_layout(
    1,
    ("u32", "s16", "ustring", "duration", "u8[4]", "symstr", "x64"),
    event="read",
    names=("count", "got", "path", "duration", "head", "by", "wide"),
    can_fault=True,
    has_caller=True,
)
OTHER = make_layout(2, ("u64",), event="other", names=("size",))
VFS_READ = next(s.addr for s in SYMBOLS.all_named("vfs_read"))
ROWS = [
    (5, -1, b"/etc/passwd", 100, (1, 0, 0, 0), VFS_READ, 1 << 63),
    (500, 7, b"/etc/group", 2000, (0, 1, 0, 0), VFS_READ + 256, 0),
    (5000, 0, None, 30_000, (0, 0, 0, 0), 0, 5),
    (None, -300, b"/tmp/x", 400_000, (255, 255, 255, 255), VFS_READ, 1),
]
TASKS = [(1, b"cat", 0), (2, b"dd", 1), (3, b"cat", 2), (4, b"sh", 3)]


def events() -> Events:
    rows = [
        Row(ts=10**6 * n, pid=pid, comm=comm, cpu=cpu, values=values)
        for n, (values, (pid, comm, cpu)) in enumerate(zip(ROWS, TASKS, strict=True), 1)
    ]
    others = [Row(ts=10**6 * n + 1, values=(n,)) for n in range(3)]
    return in_order([make_batch(READ, rows), make_batch(OTHER, others)])


def shown(found: Events) -> list[int]:
    """Return which reads there are, by their number."""
    index = next(i for i, b in enumerate(found.batches) if b.layout is READ)
    return found.row[found.batch == index].tolist()


def holds(text: str) -> list[int]:
    return shown(ColumnFilter(text, SOURCE).passed(events()))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("count > 400", [1, 2]),
        ("count == 0", [3]),
        ("got < 0", [0, 3]),
        ("got >= 0 && count <= 500", [1]),
        ("got == -300", [3]),
        ("wide == 0x8000000000000000", [0]),
        ("wide & 1", [2, 3]),
        ('path ~ "/etc/*"', [0, 1]),
        ('path == "/tmp/x"', [3]),
        ('path != "/tmp/x"', [0, 1, 2]),
        ('path ~ "*o*p*"', [1]),
        ('path ~ "/etc/*" || count == 5000', [0, 1, 2]),
        ('!(path ~ "/etc/*" && count < 10)', [1, 2, 3]),
        ("duration >= 30000", [2, 3]),
        ("head == 0x100", [1]),
        ('by ~ "ext_read+*"', [1]),
        ('comm == "cat"', [0, 2]),
        ("common_pid > 2", [2, 3]),
        ("cpu == 1", [1]),
        ("cpu != 1", [0, 2, 3]),
    ],
)
def test_it_holds_for_those_that_the_kernel_would_keep(text: str, kept: list[int]) -> None:
    assert holds(text) == kept


def test_events_without_the_field_do_not_pass() -> None:
    chosen = ColumnFilter("size > 0", SOURCE)

    found = chosen.passed(events())

    assert len(found) == 2
    assert shown(found) == []
    chosen.check()


def test_what_no_event_has_is_told_with_a_caret() -> None:
    chosen = ColumnFilter("none > 0", SOURCE)
    assert len(chosen.passed(events())) == 0

    with pytest.raises(DefinitionError) as caught:
        chosen.check()

    # Where the kernel has it: after the name.
    assert (caught.value.text, caught.value.column) == ("Field not found", 5)


def test_nothing_is_asked_where_all_pass() -> None:
    every = events()

    assert ColumnFilter("common_pid > 0", SOURCE).passed(every) is every


def test_the_tasks_process_is_known_where_records_have_it() -> None:
    layout = make_layout(3, ("u8", "s32"), names=("n", "common_tgid"))
    both = in_order([make_batch(layout, [Row(ts=n, values=(n, 7 + n)) for n in range(3)])])

    assert len(ColumnFilter("tgid == 8", SOURCE).passed(both)) == 1
    assert len(ColumnFilter("common_tgid >= 8", SOURCE).passed(both)) == 2
    unknown = ColumnFilter("tgid == 8", SOURCE)
    unknown.passed(events())
    with pytest.raises(DefinitionError, match="tgid"):
        unknown.check()
