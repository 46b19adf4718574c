"""Tasks, CPUs and contexts are shown once each."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kprobes.sinks.contexts import ContextInfo, ContextTexts, Keys
from tests.build.events import Row, make_batch
from tests.build.native import count_as_few, count_as_many
from tests.build.ring import make_layout

PLAIN = make_layout(1, ("u8",))
WITH_TGID = make_layout(2, ("u8", "s32"), names=("n", "common_tgid"))


@pytest.fixture
def asked() -> list[ContextInfo]:
    return []


@pytest.fixture
def texts(asked: list[ContextInfo]) -> ContextTexts:
    def show(info: ContextInfo) -> bytes:
        asked.append(info)
        return b"%d" % len(asked)

    return ContextTexts(show)


@pytest.mark.parametrize("in_a_row", [1, 50])
def test_a_task_is_shown_once_on_each_cpu_and_in_each_context(
    texts: ContextTexts, asked: list[ContextInfo], in_a_row: int
) -> None:
    rows = [Row(comm=b"sh", pid=7, cpu=n % 2, context=n, values=(0,)) for n in range(4)]
    rows = [row for row in rows for _ in range(in_a_row)]

    found = texts.of(make_batch(PLAIN, rows)).tolist()

    expected = np.repeat([b"1", b"2", b"3", b"4"], in_a_row)
    assert found == expected.tolist()
    assert texts.of(make_batch(PLAIN, rows)).tolist() == found
    assert asked == [ContextInfo(b"sh", 7, n % 2, n, 0) for n in range(4)]


def test_a_process_is_a_part_of_the_context_where_records_have_it(
    texts: ContextTexts, asked: list[ContextInfo]
) -> None:
    rows = [Row(pid=7, values=(0, tgid)) for tgid in (5, 5, 7)]

    assert texts.of(make_batch(WITH_TGID, rows)).tolist() == [b"1", b"1", b"2"]
    assert [info.tgid for info in asked] == [5, 7]


def test_no_events_are_no_texts(texts: ContextTexts) -> None:
    assert texts.of(make_batch(PLAIN, [])).tolist() == []


def rows_of(count: int, different: int, in_a_row: int) -> NDArray[np.uint64]:
    rng = np.random.default_rng(count)
    keys = rng.integers(0, 1 << 63, (different, 4), dtype=np.uint64)
    return keys[rng.integers(0, different, count)].repeat(in_a_row, axis=0)


@pytest.mark.parametrize("in_a_row", [1, 9])
def test_each_key_has_a_code_in_the_order_in_which_they_come(in_a_row: int) -> None:
    # More than there is room for at first, twice.
    rows, keys = rows_of(9000, 3000, in_a_row), Keys(4)

    found = np.concatenate([keys.of(rows[:4000]), keys.of(rows[4000:])])

    assert (keys.known[found] == rows).all()
    _, firsts = np.unique(found, return_index=True)
    assert found[np.sort(firsts)].tolist() == list(range(len(keys)))
    assert len(keys) == len(np.unique(rows, axis=0))


def test_keys_that_python_knew_have_the_same_codes_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, keys = rows_of(5000, 1500, 1), Keys(4)
    count_as_few(monkeypatch)
    before = keys.of(rows)

    count_as_many(monkeypatch)

    assert keys.of(rows[::-1]).tolist() == before[::-1].tolist()


def test_no_rows_have_no_codes() -> None:
    keys = Keys(4)

    assert keys.of(np.empty((0, 4), np.uint64)).tolist() == []
    assert len(keys) == 0
