"""Pages of the kernel's trace rings, written, and read by what reads the kernel's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.formats.ftrace import parse_page, read_pages
from kprobes.formats.ring_page import LONGEST, PAGE, PageData, encode_pages, header_page
from tests.build.ftrace_page import slowly

STEPS = (0, 1, 1000, (1 << 27) - 1, 1 << 27, (1 << 59) - 1, 1 << 59, (1 << 64) - 1)
ROOM = (PAGE.size - PAGE.data) // 4


def data_of(sizes: list[int], steps: list[int]) -> PageData:
    ts = np.cumsum(np.array(steps, np.uint64), dtype=np.uint64)
    words = np.arange(1, sum(sizes) + 1, dtype=np.uint32)
    return PageData(words=words, sizes=np.array(sizes, np.int64), ts=ts)


records = st.lists(
    st.tuples(st.integers(1, 40) | st.just(LONGEST), st.sampled_from(STEPS)),
    min_size=1,
    max_size=300,
)


@given(records, st.integers(0, 9))
def test_what_is_written_is_read(wanted: list[tuple[int, int]], lost: int) -> None:
    data = data_of([size for size, _ in wanted], [step for _, step in wanted])

    pages = encode_pages(data, lost=lost)

    read = read_pages(pages, PAGE)
    assert read.sizes.tolist() == (data.sizes * 4).tolist()
    assert read.ts.tolist() == data.ts.tolist()
    assert read.lost == lost
    flat = pages.tobytes()
    found = b"".join(
        flat[at : at + size] for at, size in zip(read.at.tolist(), read.sizes.tolist(), strict=True)
    )
    assert found == data.words.tobytes()


@given(records)
def test_the_slow_reader_finds_the_same_times(wanted: list[tuple[int, int]]) -> None:
    data = data_of([size for size, _ in wanted], [step for _, step in wanted])

    found = list(slowly(encode_pages(data)))

    assert [each.ts for each in found] == data.ts.tolist()


@pytest.mark.parametrize("lost", [0, 5])
def test_a_page_is_as_full_as_can_be(lost: int) -> None:
    data = data_of([LONGEST - 300, 300, 28, 27, 1, 9] * 20, [1 << 27] * 120)

    pages = encode_pages(data, lost=lost)

    # A head, the length's own word, and the time extend, which no page's first record has.
    needs = [1 + (size > 28) + size for size in data.sizes.tolist()]
    firsts = np.searchsorted(read_pages(pages, PAGE).page, np.arange(len(pages))).tolist()
    for number, (first, after) in enumerate(zip(firsts, [*firsts[1:], len(data)], strict=True)):
        room = ROOM - (2 if lost and not number else 0)
        used = sum(needs[first:after]) + 2 * (after - first - 1)
        assert used <= room
        assert after == len(data) or used + 2 + needs[after] > room


def test_a_page_begins_with_its_first_records_time() -> None:
    data = data_of([LONGEST, LONGEST], [7, 1 << 40])

    pages = encode_pages(data)

    assert pages[:, :8].copy().view("<u8")[:, 0].tolist() == data.ts.tolist()
    # The record's head says no time, and nothing is in front of it.
    assert pages[:, 16:20].copy().view("<u4")[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("sizes", [[], [LONGEST + 1], [4, 0]])
def test_what_no_page_can_have_is_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="records of up to"):
        encode_pages(data_of(sizes, [1] * len(sizes)))


@pytest.mark.parametrize("is_signed", [False, True])
def test_the_page_is_as_its_header_says(is_signed: bool) -> None:
    text = header_page(is_char_signed=is_signed)

    assert parse_page(text) == PAGE
    assert text.endswith(f"size:4080;\tsigned:{is_signed:d};\n")
