import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import RingError
from kprobes.formats.ftrace import PageFormat, PageRecords, read_pages, set_sizes
from tests.build.ftrace_page import PAGE, Found, Record, page, pages, slowly
from tests.build.native import count_as_many

pytestmark = pytest.mark.usefixtures("few_and_many")

EVENT = b"\x01\x00\x00\x00\x07\x00\x00\x00"


def found(records: PageRecords) -> list[Found]:
    columns = (records.page, records.at, records.sizes, records.ts)
    return [Found(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


@st.composite
def records_of_a_page(draw: st.DrawFn) -> list[Record]:
    words = st.binary(min_size=1, max_size=28).map(lambda data: (data * 4)[: 4 * len(data)])
    long = st.integers(0, 60).map(lambda n: bytes(4 * n))
    small = st.integers(0, (1 << 27) - 1)
    one = st.one_of(
        st.builds(Record, small, words),
        st.builds(Record, small, long, st.just("long")),
        st.builds(Record, st.integers(1, 99), long, st.just("discarded")),
        st.builds(Record, st.integers(0, (1 << 59) - 1), kind=st.sampled_from(["extend", "stamp"])),
    )
    return draw(st.lists(one, max_size=14))


@given(
    st.lists(
        st.tuples(
            st.integers(0, (1 << 63) - 1), records_of_a_page(), st.none() | st.integers(1, 9)
        ),
        max_size=6,
    )
)
def test_pages_read_as_the_slow_reader_reads_them(
    wanted: list[tuple[int, list[Record], int | None]],
) -> None:
    data = pages(*(page(stamp, records, lost=lost) for stamp, records, lost in wanted))

    read = read_pages(data, PAGE)

    assert found(read) == list(slowly(data))
    assert read.lost == sum(lost or 0 for _, _, lost in wanted)


@given(
    st.lists(
        st.tuples(st.integers(0, (1 << 63) - 1), records_of_a_page(), st.integers(0, 14)),
        min_size=1,
        max_size=6,
    )
)
def test_records_that_were_read_before_are_left_out_but_for_their_times(
    wanted: list[tuple[int, list[Record], int]],
) -> None:
    data = pages(*(page(stamp, records) for stamp, records, _ in wanted))
    skips = [sum(len(it.packed()) for it in records[:known]) for _, records, known in wanted]

    read = read_pages(data, PAGE, np.array(skips))

    # One without bytes has them, none, where the next record begins.
    first = [n * PAGE.size + PAGE.data + skip for n, skip in enumerate(skips)]
    assert found(read) == [it for it in slowly(data) if it.at > first[it.page]]


def test_what_lies_after_a_size_that_was_set_is_not_read() -> None:
    two = [Record(5, EVENT), Record(2, EVENT)]
    data = pages(page(100, two), page(200, two, lost=7)).copy()

    set_sizes(data, PAGE, np.array([12, 24]))

    read = read_pages(data, PAGE)
    assert read.ts.tolist() == [105, 205, 207]
    assert read.lost == 7


def test_times_add_up_over_every_kind_of_record() -> None:
    records = [
        Record(5, EVENT),
        Record(1 << 30, kind="extend"),
        Record(2, EVENT * 20, kind="long"),
        Record(10, EVENT, kind="discarded"),
        Record(3, EVENT),
        Record(77, kind="stamp"),
        Record(1, EVENT),
    ]

    read = read_pages(pages(page(1000, records), page(9, [Record(0, EVENT)])), PAGE)

    second = 1005 + (1 << 30) + 2
    assert read.ts.tolist() == [1005, second, second + 13, 78, 9]
    assert read.sizes.tolist() == [8, 160, 8, 8, 8]
    assert read.page.tolist() == [0, 0, 0, 0, 1]


def test_an_absolute_time_takes_its_top_bits_from_the_page() -> None:
    stamp = (3 << 59) + (1 << 59) - 10

    read = read_pages(pages(page(stamp, [Record(5, kind="stamp"), Record(0, EVENT)])), PAGE)

    assert read.ts.tolist() == [(4 << 59) + 5]


def test_nothing_after_a_null_padding_counts() -> None:
    data = page(1, [Record(0, EVENT), Record(0, b"\x1d" + bytes(3)), Record(0, EVENT)])
    ended = bytearray(data)
    struct.pack_into("<I", ended, PAGE.data + 12, 29)

    assert len(read_pages(pages(bytes(ended)), PAGE)) == 1


def test_lost_events_without_room_for_their_count_are_one_at_least() -> None:
    full = [Record(0, bytes(16))] * 204
    told = bytearray(page(1, full))
    struct.pack_into("<I", told, 8, 4080 | 1 << 31)

    assert read_pages(pages(bytes(told)), PAGE).lost == 1


def test_an_empty_page_and_no_pages_have_no_records() -> None:
    assert len(read_pages(pages(page(1, [])), PAGE)) == 0
    assert len(read_pages(np.empty((0, PAGE.size), np.uint8), PAGE)) == 0


def test_pages_may_be_larger() -> None:
    large = PageFormat(size=16384, data=16, commit=8)
    data = page(7, [Record(1, bytes(1000), "long")] * 15, form=large)

    read = read_pages(np.frombuffer(data * 3, np.uint8).reshape(3, -1), large)

    assert read.ts.tolist() == [*range(8, 23)] * 3


def test_more_pages_than_are_walked_at_once_keep_their_order() -> None:
    data = pages(*(page(i, [Record(0, EVENT)] * (i % 3)) for i in range(2500)))

    assert found(read_pages(data, PAGE)) == list(slowly(data))


@pytest.mark.parametrize(
    ("commit", "words"),
    [
        (4084, [1]),  # more records than room
        (10, [1]),  # not whole words
        (8, [5]),  # a record that ends after the others
        (4, [0]),  # a length that stands after them
        (4, [30]),  # a time that does
        (8, [0, 3]),  # a length that is none
        (8, [0, 0]),
        (8, [0, 6]),
        (8, [29 | 1 << 5, 0]),  # padding that goes nowhere
        (8, [29 | 1 << 5, 1 << 31]),
        (8, [0, 0xFFFFFFFC]),
    ],
)
def test_bytes_that_no_kernel_wrote_raise_one_error(commit: int, words: list[int]) -> None:
    data = bytearray(page(1, []))
    struct.pack_into("<Q", data, 8, commit)
    struct.pack_into(f"<{len(words)}I", data, PAGE.data, *words)

    with pytest.raises(RingError):
        read_pages(pages(bytes(data)), PAGE)


def test_a_page_does_not_go_on_in_the_next_one() -> None:
    # Records up to its end, and a count of bytes that reaches into the stamp after it.
    full = bytearray(page(7, [Record(0, bytes(4))] * 510))
    struct.pack_into("<Q", full, 8, 4088)

    with pytest.raises(RingError):
        read_pages(pages(bytes(full), page(1, [])), PAGE)


def test_each_record_has_the_number_of_its_event() -> None:
    records = [Record(0, EVENT), Record(0, b"", kind="long"), Record(0, b"\x02\x03\0\0")]

    assert read_pages(pages(page(1, records)), PAGE).numbers.tolist() == [1, 0, 0x302]


def test_what_kernels_write_c_reads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [Record(1, EVENT), Record(1, bytes(60), kind="long"), Record(9, bytes(8), "discarded")]
    ended = bytearray(page(1000, [*kinds, Record(5, kind="extend"), Record(0, EVENT)]))
    used = int.from_bytes(ended[8:16], "little")
    # What is left of it is padding.
    struct.pack_into("<I", ended, PAGE.data + used, 29)
    struct.pack_into("<Q", ended, 8, PAGE.size - PAGE.data)
    expected = found(read_pages(pages(bytes(ended)), PAGE))
    count_as_many(monkeypatch)
    monkeypatch.setattr("kprobes.formats.ftrace._read", None)

    assert found(read_pages(pages(bytes(ended)), PAGE)) == expected


@given(st.binary(max_size=64), st.integers(0, 68))
def test_any_bytes_are_read_or_refused(noise: bytes, used: int) -> None:
    data = bytearray(page(1, []))
    struct.pack_into("<Q", data, 8, used)
    data[PAGE.data : PAGE.data + len(noise)] = noise

    try:
        read = read_pages(pages(bytes(data)), PAGE)
    except RingError:
        return

    assert found(read) == list(slowly(pages(bytes(data))))


@pytest.mark.fuzz
def test_a_million_words_of_noise_raise_nothing_else() -> None:
    random = np.random.default_rng(7)
    for _ in range(4000):
        noise = random.integers(0, 256, (8, 4096), np.uint8)
        # Half of the words look like records.
        noise[:, 16::8] &= 31
        noise[:, 8:16] = 0
        noise[:, 8] = random.integers(0, 256, 8, np.uint8) & 0xFC
        try:
            read = read_pages(noise, PAGE)
        except RingError:
            continue
        assert found(read) == list(slowly(noise))


def test_pages_of_another_shape_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="not of 4096 bytes"):
        read_pages(np.zeros((2, 512), np.uint8), PAGE)
