"""Strings that are cut out of the bytes of their records."""

import tracemalloc

import numpy as np
import pytest

from kprobes.ring.records import cut


@pytest.mark.parametrize("longest", [b"x" * 4, b"x" * 60_000], ids=["short", "long"])
def test_strings_end_at_their_length_or_a_nul_before_it(longest: bytes) -> None:
    texts = [b"", b"ab", b"c\0d", b"e\0", longest] * 40
    ends = np.cumsum([len(text) for text in texts])

    values = cut(b"".join(texts), np.append(0, ends[:-1]), ends)

    assert values.tolist() == [b"", b"ab", b"c", b"e", longest] * 40


def test_one_long_string_among_short_ones_takes_no_room_for_all_of_them() -> None:
    blob = b"a" * 60_000
    starts = np.arange(20_000)
    stops = starts + 1
    stops[0] = len(blob)
    tracemalloc.start()

    values = cut(blob, starts, stops)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values[0] == blob
    assert peak < 10_000_000
