import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.errors import FormatError, RingError
from kprobes.model.events import Batch, HostEvent, Locator, Pages
from kprobes.model.resolved import Storage
from kprobes.ring.ftrace import Contexts, HostDecoded, HostShapes, Naming, decode_pages
from kprobes.ring.ftrace_shapes import EventShape, naming_shape
from kprobes.sinks.names import flags
from kprobes.units import Addr
from tests.build.ftrace_page import PAGE, Record, page, pages
from tests.build.host_event import (
    CALLER,
    NEW_TASK,
    OPEN,
    OPEN_IP,
    OPENED,
    RENAME,
    common,
    field,
    form,
    layout,
    new_task,
    opened,
    opening,
    rename,
    shown,
)

pytestmark = pytest.mark.usefixtures("few_and_many")


def shapes_of(*events: HostEvent) -> HostShapes:
    fresh = itertools.count(100)
    shapes = [
        EventShape(event, lambda addr: f"at_{addr:x}+0x4/0x20", lambda: next(fresh))
        for event in events
    ]
    namings = [naming_shape(NEW_TASK), naming_shape(RENAME)]
    return HostShapes(
        page=PAGE,
        contexts=Contexts((6, 1)),
        events={shape.number: shape for shape in shapes},
        namings={shape.number: shape for shape in namings},
    )


def decoded(*records: bytes, cpu: int = 3) -> HostDecoded:
    data = pages(page(100, [Record(10, record) for record in records]))
    return decode_pages(one_page(data, cpu=cpu), shapes_of(OPEN, OPENED))


def one_page(data: NDArray[np.uint8], *, cpu: int, skip: int = 0) -> Pages:
    return Pages(data=data, cpu=np.array([cpu], np.uint16), skips=np.array([skip], np.int64))


def only(found: HostDecoded) -> Batch:
    (batch,) = found.batches
    return batch


def test_every_kind_of_field_becomes_a_column() -> None:
    batch = only(decoded(opening(-5, b"/etc/passwd", both=b"x"), opening(6, None)))

    n, path, four, both, near = batch.values
    assert n.tolist() == [-5, 6]
    assert path.tolist() == [b"/etc/passwd", None]
    assert four.tolist() == [[1, 2, 3, 4]] * 2
    assert both.tolist() == [[b"x", None], [b"a", None]]
    assert near.tolist() == [b"near", b"near"]
    assert [None if mask is None else mask.tolist() for mask in batch.faulted] == [
        None,
        [False, True],
        None,
        [[False, True]] * 2,
        [False, False],
    ]


def test_the_header_becomes_columns() -> None:
    batch = only(decoded(opening(1, b"a", pid=9), opening(1, b"a", pid=10), cpu=5))

    assert batch.ts.tolist() == [110, 120]
    assert batch.cpu.tolist() == [5, 5]
    assert batch.pid.tolist() == [9, 10]
    assert batch.caller is None
    assert batch.layout.where == "open_at+0x0/0x10"


def test_a_return_has_its_caller() -> None:
    batch = only(decoded(opened(4)))

    assert batch.caller is not None
    assert batch.caller.tolist() == [CALLER]
    assert batch.layout.caller_offset is not None
    assert batch.values[0].tolist() == [4]


def test_events_of_a_mix_keep_the_order_of_the_ring() -> None:
    found = decoded(opening(1, b"a"), opened(2), opened(3), opening(4, b"b"))

    names = [found.batches[int(index)].layout.event for index in found.which]
    assert names == ["open", "opened", "opened", "open"]


@pytest.mark.parametrize("at", [0, 4])
def test_where_a_probe_is_its_first_record_says_and_another_address_is_another_event(
    at: int,
) -> None:
    (known,) = OPEN.layouts
    first, after = OPEN_IP + at, OPEN_IP + 8

    found = decoded(*(opening(n, b"a", ip=ip) for n, ip in ((1, first), (2, first), (3, after))))

    by_id = {batch.layout.event_id: batch for batch in found.batches}
    other = by_id.pop(100)
    (own,) = by_id.values()
    assert own.layout.event_id == known.event_id
    assert own.layout.where == (f"at_{first:x}+0x4/0x20" if at else "open_at+0x0/0x10")
    assert own.values[0].tolist() == [1, 2]
    assert (other.layout.where, other.layout.function) == (
        f"at_{after:x}+0x4/0x20",
        f"at_{after:x}",
    )
    assert other.values[0].tolist() == [3]


def test_records_of_others_have_a_layout_for_each_address() -> None:
    (known,) = OPEN.layouts
    theirs = replace(OPEN, layouts=(replace(known, ip=Addr(0)),))
    data = pages(page(100, [Record(10, opening(n, b"a", ip=8 + n)) for n in range(2)]))

    found = decode_pages(one_page(data, cpu=0), shapes_of(theirs))

    assert {batch.layout.event_id for batch in found.batches} == {100, 101}
    assert {batch.layout.function for batch in found.batches if batch.layout.ip == 8} == {"at_8"}


def test_names_of_tasks_are_told_and_are_no_events() -> None:
    found = decoded(new_task(8, b"sh\0old"), opening(1, b"a"), rename(8, b"sh", b"ls"))

    assert found.namings == (
        Naming(pid=8, ts=110, old=None, new=b"sh"),
        Naming(pid=8, ts=130, old=b"sh", new=b"ls"),
    )
    assert found.which.tolist() == [0]


def test_what_nobody_asked_for_is_passed_over() -> None:
    found = decoded(common(999), opening(1, b"a"))

    assert len(found.which) == 1


def test_what_was_read_before_counts_for_times_only() -> None:
    first = len(Record(10, opening(1, b"a")).packed())
    data = pages(page(100, [Record(10, opening(1, b"a")), Record(10, opening(2, b"b"))]))

    found = decode_pages(one_page(data, cpu=0, skip=first), shapes_of(OPEN))

    assert only(found).ts.tolist() == [120]


def test_pages_without_records_have_no_batches() -> None:
    found = decoded()

    assert (found.batches, len(found.which)) == ((), 0)


def cut_at(record: bytes, size: int) -> bytes:
    return record[:size]


def with_word(record: bytes, at: int, word: int) -> bytes:
    return record[:at] + struct.pack("<I", word) + record[at + 4 :]


@pytest.mark.parametrize(
    "record",
    [
        with_word(opening(1, b"a"), 20, 1000 << 16 | 40),
        with_word(opening(1, b"a"), 36, 8 << 16 | 0xFFFF),
        opening(1, b"a", pid=-1),
        opening(1, b"a", pid=1 << 23),
        rename(1 << 23, b"a", b"b"),
    ],
)
def test_records_that_no_kernel_wrote_raise_one_error(record: bytes) -> None:
    with pytest.raises(RingError):
        decoded(opening(1, b"good"), record)


@pytest.mark.parametrize(
    "record",
    [
        cut_at(opening(1, b"a"), 4),
        cut_at(opening(1, b"a"), 24),
        cut_at(rename(1, b"a", b"b"), 40),
    ],
)
def test_a_record_that_is_too_short_is_told(record: bytes) -> None:
    with pytest.raises(RingError, match=f"^a record of {len(record)} bytes"):
        decoded(opening(1, b"good"), record)


@given(st.binary(min_size=4, max_size=112), st.sampled_from([opening(1, b"abc"), opened(3)]))
def test_any_record_is_read_or_refused(noise: bytes, good: bytes) -> None:
    noise = noise[: len(noise) // 4 * 4]
    mixed = good[:8] + noise[8:]

    for record in (noise, mixed):
        try:
            decoded(record, good)
        except RingError:
            continue


@pytest.mark.parametrize(
    ("storage", "count"), [(Storage.STRING, 2), (Storage.COMM, None), (Storage.COMM, 2)]
)
def test_texts_where_the_kernel_has_none_are_refused(storage: Storage, count: int | None) -> None:
    own = field("__probe_ip", 8, 8), field("a", 16, 8)
    one = replace(shown("a", "u64", count=count), storage=storage)
    event = HostEvent(format=form(7, "ev", *own), layouts=(layout(1, "ev", OPEN_IP, one),))

    with pytest.raises(FormatError, match="event ev has no text at the place of a"):
        EventShape(event, hex, iter(range(9)).__next__)


def test_a_symbol_that_the_kernel_names_itself_is_shown_as_its_string() -> None:
    own = replace(shown("s", "u64"), type="symstr")
    event = HostEvent(
        format=form(50, "e", field("__probe_ip", 8, 8), field("s", 16, 4, locator=Locator.DATA)),
        layouts=(layout(9, "e", 1, own),),
    )

    (shape,) = shapes_of(event).events.values()

    assert shape.layout(1).fields[0].storage is Storage.STRING


@pytest.mark.parametrize(
    "event",
    [
        replace(OPEN, format=form(5, "e", field("n", 8, 4))),
        replace(OPENED, format=form(5, "e", field("__probe_ip", 8, 8))),
        replace(OPENED, format=replace(OPENED.format, fields=OPENED.format.fields[:1])),
        replace(OPENED, layouts=(layout(1, "e", 1, shown("fd", "u16", count=3)),)),
    ],
)
def test_a_format_that_does_not_fit_is_refused(event: HostEvent) -> None:
    with pytest.raises(FormatError):
        shapes_of(event)


@pytest.mark.parametrize(
    ("record", "count", "version", "text"),
    [
        (0x00, 0, (6, 1), "....."),
        (0x01, 0x12, (6, 1), "d..21"),
        (0x81, 0, (6, 1), "D...."),
        (0x24, 0, (6, 12), ".N..."),
        (0x04, 0, (6, 12), ".n..."),
        (0x20, 0, (6, 12), ".p..."),
        (0x26, 0, (6, 13), ".B..."),
        (0x08, 0x10, (6, 1), "..h.1"),
        (0x18, 0, (6, 1), "..H.."),
        (0x48, 0, (6, 1), "..Z.."),
        (0x40, 0, (6, 1), "..z.."),
        (0x10, 0x21, (5, 10), "..s21"),
    ],
)
def test_context_prints_as_the_kernel_prints_it(
    record: int, count: int, version: tuple[int, int], text: str
) -> None:
    word = Contexts(version).of(np.array([record], np.uint8), np.array([count], np.uint8))

    assert flags(int(word[0]), version) == text
