"""Log-linear buckets and percentiles, beside those of the numbers themselves."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.buckets import HitBuckets, bucket_of, summed
from tests.build.counted import bucket_of as slow_bucket_of

U64 = (1 << 64) - 1
PERCENTILES = (1, 100, 5000, 9000, 9900, 9999)
numbers = st.integers(0, 64).flatmap(lambda bits: st.integers(0, (1 << bits) - 1))
signed_numbers = st.tuples(numbers, st.booleans()).map(
    lambda pair: min(pair[0], (1 << 63) - 1) * (-1 if pair[1] else 1)
)


@given(st.lists(numbers, min_size=1))
def test_a_power_of_two_has_64(values: list[int]) -> None:
    found = bucket_of(np.array(values, np.uint64)).tolist()

    assert found == [slow_bucket_of(value) for value in values]


@given(st.lists(signed_numbers, min_size=1))
def test_those_of_negative_numbers_are_negative(values: list[int]) -> None:
    found = bucket_of(np.array(values, np.int64)).tolist()

    assert found == [slow_bucket_of(value) for value in values]


@pytest.mark.parametrize(
    ("number", "bucket"),
    [(0, 0), (1, 1), (2, 65), (127, 448), (128, 449), (1 << 53, 3393), (U64, 4096)],
)
def test_the_ends_are_where_they_are(number: int, bucket: int) -> None:
    assert bucket_of(np.array([number], np.uint64)).tolist() == [bucket]


def buckets_of(entries: Sequence[int], values: Sequence[int], *, is_signed: bool) -> HitBuckets:
    """Return one hit of each number, of the entry at its place."""
    column = np.array(values, np.int64 if is_signed else np.uint64)
    one = HitBuckets(
        entries=np.arange(len(values)),
        buckets=bucket_of(column),
        hits=np.ones(len(values), np.uint64),
        least=column,
        most=column,
    )
    return summed([one], [np.array(entries, np.int64)])


def is_near(found: int, exact: int) -> bool:
    return abs(found - exact) * 128 <= abs(exact)


@pytest.mark.parametrize("is_signed", [False, True])
@given(data=st.data())
def test_a_percentile_is_within_a_128th_of_numpys(data: st.DataObject, is_signed: bool) -> None:
    of_any = signed_numbers if is_signed else numbers
    values = data.draw(st.lists(of_any, min_size=3, max_size=60))
    entries = [n % 3 for n in range(len(values))]

    found = buckets_of(entries, values, is_signed=is_signed)

    for hundredths in PERCENTILES:
        for entry, number in enumerate(found.percentile(hundredths).tolist()):
            own = sorted(values[entry::3])
            rank = max(-(-len(own) * hundredths // 10_000), 1)
            assert is_near(number, own[rank - 1])


def test_what_is_one_number_is_that_number() -> None:
    found = buckets_of([0, 0, 1], [1_000_003, 1_000_003, 77_777], is_signed=False)

    assert found.percentile(5000).tolist() == [1_000_003, 77_777]


@given(st.lists(signed_numbers, min_size=2, max_size=40), st.integers(1, 39))
def test_several_are_one_whatever_the_parts(values: list[int], cut: int) -> None:
    entries = [n % 2 for n in range(len(values))]
    whole = buckets_of(entries, values, is_signed=True)
    parts = [
        buckets_of(entries[at], values[at], is_signed=True)
        for at in (slice(0, cut), slice(cut, None))
        if values[at]
    ]

    found = summed(parts, [part.entries for part in parts])

    assert rows(found) == rows(whole)


def rows(found: HitBuckets) -> list[tuple[int, ...]]:
    columns = (found.entries, found.buckets, found.hits, found.least, found.most)
    return [*zip(*(column.tolist() for column in columns), strict=True)]


def test_entries_are_taken_in_any_order() -> None:
    whole = buckets_of([0, 1, 1, 2], [10, 500, 20, 30], is_signed=False)

    found = whole.take(np.array([2, 1]))

    assert found.entries.tolist() == [0, 1, 1]
    assert found.least.tolist() == [30, 20, 500]
    assert len(whole.take(np.array([], np.int64)).entries) == 0


def test_hits_that_are_taken_away_leave_no_bucket() -> None:
    whole = buckets_of([0, 0, 1], [10, 10, 500], is_signed=False)
    minus = HitBuckets(
        entries=np.array([0, 1]),
        buckets=bucket_of(np.array([10, 500], np.uint64)),
        hits=np.negative(np.ones(2, np.uint64)),
        least=np.array([10, 500], np.uint64),
        most=np.array([10, 500], np.uint64),
    )

    found = summed([whole, minus], [whole.entries, minus.entries]).without_empty()

    assert rows(found) == [(0, slow_bucket_of(10), 1, 10, 10)]


def test_nothing_has_no_percentile() -> None:
    assert buckets_of([], [], is_signed=True).percentile(5000).tolist() == []
