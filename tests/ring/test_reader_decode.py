"""Decoding is compared with a reference that walks records one by one with struct."""

import struct
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.model.events import Batch
from kprobes.model.resolved import HEADER, Field, RecordLayout, Storage
from kprobes.ring.chunk import POSITION_MASK, Chunk, Decoded, Shapes
from kprobes.ring.reader import decode
from tests.build.ring import Hit, IdentityClock, One, Value, chunk_of, make_layout, record, stream

pytestmark = pytest.mark.usefixtures("few_and_many")

NUMBERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "x8", "x16", "x32", "x64")
LAYOUTS = (
    make_layout(1, ("u64",)),
    make_layout(2),
    make_layout(3, NUMBERS, can_fault=True),
    make_layout(4, ("s32", "ustring", "string", "comm")),
    make_layout(5, ("string", "x16"), can_fault=True),
    make_layout(6, ("u8[3]", "string[2]", "text=hello", "x64[2]", "char"), can_fault=True),
    make_layout(7, ("s16[5]", "symbol", "text=", "u32[1]")),
    make_layout(8, has_caller=True),
    make_layout(9, ("s64", "duration", "symbol"), has_caller=True),
    make_layout(10, ("string", "u8", "duration"), can_fault=True, has_caller=True),
    make_layout(11, ("string", "stacktrace", "u16", "stacktrace"), can_fault=True),
    make_layout(65535, ("comm", "s8")),
)
SHAPES = Shapes(LAYOUTS)
CLOCK = IdentityClock()
EXAMPLES = settings(max_examples=50)

Row = tuple[int, int, int, int, int, bytes, tuple[Value, ...], int | None]


def rows_of(decoded: Decoded) -> list[Row]:
    """All events as tuples, in an order that does not depend on the batches."""
    return sorted((row for batch in decoded.batches for row in _batch_rows(batch)), key=repr)


def _batch_rows(batch: Batch) -> list[Row]:
    columns = [_plain(batch, i) for i in range(len(batch.values))]
    values = list(zip(*columns, strict=True)) if columns else [()] * len(batch)
    event_id = batch.layout.event_id
    head = zip(batch.ts.tolist(), batch.cpu.tolist(), batch.pid.tolist(), strict=True)
    callers = [None] * len(batch) if batch.caller is None else batch.caller.tolist()
    tail = zip(batch.context.tolist(), batch.comm.tolist(), values, callers, strict=True)
    return [
        (ts, event_id, cpu, pid, context, comm, row, caller)
        for (ts, cpu, pid), (context, comm, row, caller) in zip(head, tail, strict=True)
    ]


def _plain(batch: Batch, i: int) -> list[Value]:
    mask = batch.faulted[i]
    listed: list[Any] = batch.values[i].tolist()
    values: list[Value] = [tuple(cast("list[One]", v)) if type(v) is list else v for v in listed]
    if mask is None or mask.ndim > 1:
        return values
    return [None if is_bad else value for value, is_bad in zip(values, mask.tolist(), strict=True)]


def reference(chunk: Chunk, layouts: Sequence[RecordLayout]) -> tuple[list[Row], int]:
    """Walk the records and return their rows, in the same order, and where the walk stops."""
    by_id = {layout.event_id: layout for layout in layouts}
    data, at, rows = chunk.data.tobytes(), 0, list[Row]()
    while at < chunk.limit:
        (commit,) = struct.unpack_from("<Q", data, at)
        if commit >> 16 != (chunk.position + at) & POSITION_MASK or commit & 0xFFFF == 0:
            break
        layout = by_id[commit & 0xFFFF]
        rows.append(_reference_row(data[at:], layout, chunk.cpu))
        (size,) = struct.unpack_from("<I", data, at + layout.size_offset)
        at += size if layout.is_dynamic else layout.size
    return sorted(rows, key=repr), chunk.position + at


def _reference_row(data: bytes, layout: RecordLayout, cpu: int) -> Row:
    counter, pid, context, comm = struct.unpack_from("<QII16s", data, 8)
    comm = comm.partition(b"\0")[0]
    values = tuple(_reference_value(data, layout, field, comm) for field in layout.fields)
    at = layout.caller_offset
    caller = None if at is None else int.from_bytes(data[at : at + 8], "little")
    return (counter, layout.event_id, cpu, pid, context, comm, values, caller)


def _reference_value(data: bytes, layout: RecordLayout, field: Field, comm: bytes) -> Value:
    is_bad = layout.faults_offset is not None and bool(
        data[layout.faults_offset + field.index // 8] >> field.index % 8 & 1
    )
    if field.storage is Storage.NUMBER and is_bad:
        return None
    places = [field.offset + field.size * n for n in range(field.count or 1)]
    found = tuple(_reference_one(data, field, place, comm) for place in places)
    return found if field.count is not None else found[0]


def _reference_one(data: bytes, field: Field, place: int, comm: bytes) -> One:
    counter = int.from_bytes(data[8:16], "little")
    raw = data[place : place + field.size]
    number = int.from_bytes(raw, "little", signed=field.is_signed)
    match field.storage:
        case Storage.COMM:
            return comm
        case Storage.TEXT:
            return field.text
        case Storage.NUMBER:
            return number
        case Storage.DURATION:
            return max(counter - number, 0) or None
        case Storage.STRING:
            start, size = number & 0xFFFF, number >> 16
            return data[start : start + size - 1] if size else None
        case Storage.STACK:
            start, size = number & 0xFFFF, number >> 16
            return data[start : start + size // 8 * 8]


TEXT = st.binary(max_size=40).map(lambda b: b.replace(b"\0", b"-"))
STACK = st.lists(st.binary(min_size=8, max_size=8), max_size=5).map(b"".join)
COMM = st.binary(max_size=15).map(lambda b: b.replace(b"\0", b"-"))


def values_for(layout: RecordLayout) -> st.SearchStrategy[tuple[Value, ...]]:
    """Values that fit a layout's fields, faults among them."""
    number = st.integers(0, (1 << 64) - 1)
    fault = st.none() if layout.faults_offset is not None else st.nothing()

    def value(field: Field) -> st.SearchStrategy[Value]:
        match field.storage:
            case Storage.COMM | Storage.TEXT:
                return st.none()
            case Storage.DURATION:
                return number
            case Storage.NUMBER if field.count is None:
                return number | fault
            case Storage.NUMBER:
                return st.tuples(*[number] * (field.count or 0)) | fault
            case Storage.STRING:
                text = TEXT | st.none()
                return text if field.count is None else st.tuples(*[text] * field.count)
            case Storage.STACK:
                return STACK

    return st.tuples(*map(value, layout.fields))


def hits_of(layout: RecordLayout) -> st.SearchStrategy[Hit]:
    """Events of one layout."""
    return st.builds(
        Hit,
        layout=st.just(layout),
        counter=st.integers(0, (1 << 64) - 1),
        pid=st.integers(0, (1 << 22)),
        context=st.integers(0, (1 << 32) - 1),
        comm=COMM,
        values=values_for(layout),
    )


HITS = st.sampled_from(LAYOUTS).flatmap(hits_of)
POSITIONS = st.integers(0, POSITION_MASK >> 3).map(lambda n: n << 3)


@EXAMPLES
@given(st.lists(HITS, max_size=30), POSITIONS)
def test_any_mix_decodes_as_the_reference_does(hits: list[Hit], position: int) -> None:
    chunk = chunk_of(stream(hits, position), position=position, cpu=3)

    decoded = decode(chunk, SHAPES, CLOCK)

    rows, end = reference(chunk, LAYOUTS)
    assert rows_of(decoded) == rows
    assert len(decoded) == len(hits)
    assert decoded.position == end & POSITION_MASK
    assert not decoded.is_blocked
    assert decoded.damaged == 0


@EXAMPLES
@given(st.sampled_from(LAYOUTS).flatmap(lambda layout: st.lists(hits_of(layout), max_size=30)))
def test_a_run_of_one_event_decodes_as_the_reference_does(hits: list[Hit]) -> None:
    chunk = chunk_of(stream(hits))

    decoded = decode(chunk, SHAPES, CLOCK)

    assert rows_of(decoded) == reference(chunk, LAYOUTS)[0]


@EXAMPLES
@given(st.lists(HITS, min_size=1, max_size=20), st.data())
def test_decoding_stops_at_the_first_uncommitted_record(
    hits: list[Hit], data: st.DataObject
) -> None:
    hole = data.draw(st.integers(0, len(hits) - 1))
    stale = data.draw(st.sampled_from([0, 1, 7 << 16 | 1]))
    out = bytearray(stream(hits))
    at = len(stream(hits[:hole]))
    struct.pack_into("<Q", out, at, stale if at else 0)

    decoded = decode(chunk_of(bytes(out)), SHAPES, CLOCK)

    assert len(decoded) == hole
    assert (decoded.position, decoded.is_blocked, decoded.damaged) == (at, True, 0)


def test_a_blocked_record_is_taken_once_it_is_committed() -> None:
    hits = [Hit(layout=LAYOUTS[0], counter=i, values=(i,)) for i in range(5)]
    out = bytearray(stream(hits))
    out[96:104] = bytes(8)

    first = decode(chunk_of(bytes(out)), SHAPES, CLOCK)
    rest = decode(chunk_of(stream(hits)[96:], position=96), SHAPES, CLOCK)

    assert first.position == 96
    assert [len(first), len(rest)] == [2, 3]


def test_values_are_not_taken_when_the_commit_word_is_newer_than_the_first_look() -> None:
    # What a naive reader that trusts the head sees: the commit word arrived while the bytes
    # were being copied, the values had been copied before it.
    hit = Hit(layout=LAYOUTS[0], counter=7, values=(0xAAAA,))
    torn = bytearray(record(hit, 0))
    torn[40:48] = b"\xee" * 8
    before = np.zeros(48, np.uint8)
    data = np.frombuffer(bytes(torn), np.uint8)

    naive = decode(Chunk(cpu=0, position=0, limit=48, data=data, commits=data), SHAPES, CLOCK)
    ours = decode(Chunk(cpu=0, position=0, limit=48, data=data, commits=before), SHAPES, CLOCK)

    assert naive.batches[0].values[0].tolist() == [0xEEEEEEEEEEEEEEEE]
    assert (len(ours), ours.is_blocked) == (0, True)


def test_a_record_may_end_after_the_bytes_in_which_records_begin() -> None:
    hits = [Hit(layout=LAYOUTS[0], counter=i, values=(i,)) for i in range(3)]

    decoded = decode(chunk_of(stream(hits), limit=56), SHAPES, CLOCK)

    assert (len(decoded), decoded.position, decoded.is_blocked) == (2, 96, False)


def test_a_string_that_looks_like_a_record_is_not_one() -> None:
    layout = make_layout(4, ("string",))
    decoy = record(Hit(layout=LAYOUTS[1], counter=0x4141414141414141, comm=b"A" * 15), 56)
    text = decoy.replace(b"\0", b"\x01")
    hits = [Hit(layout=layout, counter=i, values=(text,)) for i in (1, 2)]
    out = bytearray(stream(hits))
    out[56:64] = decoy[:8]  # a commit word of its own position, inside the first record's string

    decoded = decode(chunk_of(bytes(out)), Shapes((layout, LAYOUTS[1])), CLOCK)

    assert [batch.layout.event_id for batch in decoded.batches] == [4]
    assert (len(decoded), decoded.position, decoded.damaged) == (2, len(out), 0)


@pytest.mark.parametrize("wrong", [8, 76, 1 << 31, 0])
def test_a_damaged_size_is_passed_over_and_counted(wrong: int) -> None:
    strings = LAYOUTS[3]
    hits = [Hit(layout=strings, counter=i, values=(1, b"abc", None, None)) for i in range(3)]
    out = bytearray(stream(hits))
    size = len(record(hits[0], 0))
    struct.pack_into("<I", out, size + HEADER, wrong)

    decoded = decode(chunk_of(bytes(out)), SHAPES, CLOCK)

    assert [row[0] for row in rows_of(decoded)] == [0, 2]
    assert (decoded.damaged, decoded.position, decoded.is_lost) == (1, len(out), False)


def test_an_unknown_event_id_is_passed_over_and_counted() -> None:
    unknown = make_layout(9, ("u64",))
    hits = [Hit(layout=lay, counter=i, values=(i,)) for i, lay in enumerate([LAYOUTS[0], unknown])]

    decoded = decode(chunk_of(stream(hits)), SHAPES, CLOCK)

    assert (len(decoded), decoded.damaged, decoded.is_lost) == (1, 1, True)


def test_a_run_longer_than_a_piece_is_checked_to_its_end() -> None:
    layout = LAYOUTS[1]
    one = np.frombuffer(record(Hit(layout=layout), 0), np.uint8)
    data = np.tile(one, 40_000)
    words = data.view(np.uint64).reshape(-1, 5)
    words[:, 0] = np.arange(40_000, dtype=np.uint64) * 40 << np.uint64(16) | np.uint64(2)
    words[35_000, 0] = 0

    decoded = decode(
        Chunk(cpu=0, position=0, limit=len(data), data=data, commits=data), SHAPES, CLOCK
    )

    assert (len(decoded), decoded.is_blocked) == (35_000, True)


@EXAMPLES
@given(
    st.lists(HITS, max_size=12),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=40),
    POSITIONS,
)
def test_random_overwrites_never_crash_and_always_end(
    hits: list[Hit], writes: list[tuple[int, int]], position: int
) -> None:
    out = bytearray(stream(hits, position))
    for at, value in writes:
        if at < len(out):
            out[at] = value

    decoded = decode(chunk_of(bytes(out), position=position), SHAPES, CLOCK)

    assert 0 <= (decoded.position - position) & POSITION_MASK <= len(out)
    assert len(decoded) <= len(hits) + 1
    texts = (row[6] for row in rows_of(decoded))
    assert sum(len(v) for row in texts for v in row if isinstance(v, bytes)) <= len(out)


@EXAMPLES
@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=64))
def test_commit_words_everywhere_never_crash(values: list[int]) -> None:
    # Every word claims to be a record of some event at its own position.
    words = [(i * 8) << 16 | LAYOUTS[value % 6].event_id for i, value in enumerate(values)]

    decoded = decode(chunk_of(struct.pack(f"<{len(words)}Q", *words)), SHAPES, CLOCK)

    assert decoded.position <= 8 * len(words)
