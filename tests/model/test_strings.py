"""Strings as bytes, cut out and told apart by Python where there are few, and by C."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.model.strings import Strings, cut, joined, strings_of

_TEXTS = st.lists(st.none() | st.binary(max_size=40), max_size=30)


pytestmark = pytest.mark.usefixtures("few_and_many")


def cut_out(texts: Sequence[bytes | None], *, is_raw: bool = False) -> Strings:
    """Return texts that stand one after the other, up to the last byte that there is."""
    whole = strings_of(texts, (len(texts),))
    return cut(whole.blob, whole.starts, whole.lengths, is_raw=is_raw)


@given(_TEXTS)
def test_strings_end_at_their_length_or_a_nul_before_it(texts: list[bytes | None]) -> None:
    ended = [text and text.partition(b"\0")[0] for text in texts]

    assert cut_out(texts).tolist() == ended
    assert cut_out(texts, is_raw=True).tolist() == texts


@pytest.mark.parametrize("before", range(18))
@pytest.mark.parametrize("after", [0, 1, 7, 8, 9, 30])
def test_a_nul_ends_a_string_wherever_it_stands(before: int, after: int) -> None:
    text = b"x" * before + b"\0" + b"y" * after

    assert cut_out([text, b"z" * 9, text]).tolist() == [b"x" * before, b"z" * 9, b"x" * before]


def test_the_bytes_are_a_copy_and_only_those_of_the_strings() -> None:
    data = np.frombuffer(b"--abc--defgh\0ij--", np.uint8).copy()

    found = cut(data, np.array([2, 7, 0]), np.array([3, 8, -1], np.int32))
    data[:] = 0

    assert found.tolist() == [b"abc", b"defgh", None]
    assert found.blob.tobytes() == b"abcdefgh"


def test_one_long_string_among_short_ones_takes_no_room_for_all_of_them() -> None:
    blob = np.full(60_000, ord("a"), np.uint8)
    lengths = np.ones(20_000, np.int32)
    lengths[0] = len(blob)
    tracemalloc.start()

    values = cut(blob, np.arange(20_000), lengths)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values[:2].tolist() == [blob.tobytes(), b"a"]
    assert peak < 10_000_000


@given(_TEXTS, st.integers(1, 4))
def test_strings_that_are_alike_have_one_code(texts: list[bytes | None], times: int) -> None:
    codes, table = cut_out(texts * times, is_raw=True).coded

    assert table == list(dict.fromkeys(texts))
    assert [table[code] for code in codes.tolist()] == texts * times


def test_strings_that_differ_in_one_byte_or_in_length_are_not_alike() -> None:
    base = bytes(range(1, 34))
    flipped = [base[:at] + b"\xff" + base[at + 1 :] for at in range(len(base))]
    texts = [None, *(base[:size] for size in range(len(base))), base, *flipped]

    codes, table = cut_out(texts * 3, is_raw=True).coded

    assert table == texts
    assert codes.tolist() == list(range(len(texts))) * 3


def test_a_function_is_asked_of_each_string_once() -> None:
    asked: list[bytes | None] = []

    def sizes(text: bytes | None) -> tuple[int, ...]:
        asked.append(text)
        return (len(text or b""), 0)

    found = cut_out([b"ab", None, b"ab", b"c", None]).mapped(sizes)

    assert found.tolist() == [(2, 0), (0, 0), (2, 0), (1, 0), (0, 0)]
    assert asked == [b"ab", None, b"c"]


def test_rows_and_columns_of_an_array_share_the_bytes() -> None:
    texts = [b"a", None, b"bcd", b"", b"e", b"a"]
    whole = strings_of(texts, (3, 2))

    assert whole.tolist() == [[b"a", None], [b"bcd", b""], [b"e", b"a"]]
    assert whole[:, 1].tolist() == [None, b"", b"a"]
    assert whole[np.array([2, 0])].tolist() == [[b"e", b"a"], [b"a", None]]
    assert whole[np.array([False, True, False])].tolist() == [[b"bcd", b""]]
    assert (len(whole), whole.shape, whole[1:].shape) == (3, (3, 2), (2, 2))
    assert whole[::-1].blob is whole.blob


def test_columns_that_are_joined_leave_out_the_bytes_of_other_rows() -> None:
    long = strings_of([b"x" * 1000, b"ab", None], (3,))

    found = joined([long[1:], strings_of([b"c", b"\0"], (2,)), long[:0]])

    assert found.tolist() == [b"ab", None, b"c", b"\0"]
    assert found.blob.tobytes() == b"abc\0"
