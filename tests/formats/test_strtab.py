"""Names in one blob."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.formats.strtab import Names

BLOB = b"\0vfs_read\0vfs_write\0read\0vfs_read\0x\0"


def indexed(names: Names) -> Names:
    # Past the number of look-ups that are answered by scanning.
    for _ in range(50):
        names.numbers(b"nobody")
    return names


@pytest.mark.parametrize("names", [Names(BLOB), indexed(Names(BLOB))], ids=["scan", "index"])
def test_a_name_has_all_its_numbers(names: Names) -> None:
    assert names.numbers(b"vfs_read") == [0, 3]
    assert names.numbers(b"read") == [2]
    assert names.numbers(b"ad") == []
    assert names.numbers(b"read\0vfs_read") == []
    assert names.first(b"vfs_read") == 0
    assert names.first(b"ad") is None
    assert names.first(b"read\0vfs_read") is None


def test_a_number_has_its_name_and_length() -> None:
    names = Names(BLOB)

    assert [names.name(i) for i in range(len(names))] == BLOB[1:-1].split(b"\0")
    assert names.lengths(np.array([0, 4])).tolist() == [8, 1]


def test_a_pattern_matches_whole_names() -> None:
    names = Names(BLOB)

    assert names.matching(b"vfs_[^\0]*").tolist() == [0, 1, 3]
    assert names.matching(b"rea").tolist() == []


def test_around_finds_names_by_a_piece_or_an_end() -> None:
    names = Names(BLOB)

    assert names.around(b"read").tolist() == [0, 2, 3]
    assert names.around(b"\0read").tolist() == [2]
    assert names.around(b"e\0").tolist() == [1]


def test_a_blob_without_names_has_none() -> None:
    names = indexed(Names(b"\0"))

    assert len(names) == 0
    assert names.numbers(b"x") == []
    assert names.matching(b"[^\0]*").tolist() == []


@given(st.lists(st.binary(min_size=1, max_size=3).filter(lambda b: 0 not in b), min_size=1))
def test_scanning_and_indexing_agree(words: list[bytes]) -> None:
    blob = b"\0" + b"".join(word + b"\0" for word in words)
    scanned, looked_up = Names(blob), indexed(Names(blob))

    for word in set(words):
        wanted = [i for i, other in enumerate(words) if other == word]
        assert Names(blob).numbers(word) == wanted
        assert looked_up.numbers(word) == wanted
        assert scanned.first(word) == looked_up.first(word) == wanted[0]
