"""Tasks, CPUs and contexts are shown once each."""

import numpy as np
import pytest

from kprobes.sinks.contexts import ContextInfo, ContextTexts
from tests.build.events import Row, make_batch
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

    found = texts.of(make_batch(PLAIN, rows))

    expected = np.repeat([b"1", b"2", b"3", b"4"], in_a_row)
    assert found == expected.tolist()
    assert texts.of(make_batch(PLAIN, rows)) == found
    assert asked == [ContextInfo(b"sh", 7, n % 2, n, 0) for n in range(4)]


def test_a_process_is_a_part_of_the_context_where_records_have_it(
    texts: ContextTexts, asked: list[ContextInfo]
) -> None:
    rows = [Row(pid=7, values=(0, tgid)) for tgid in (5, 5, 7)]

    assert texts.of(make_batch(WITH_TGID, rows)) == [b"1", b"1", b"2"]
    assert [info.tgid for info in asked] == [5, 7]


def test_no_events_are_no_texts(texts: ContextTexts) -> None:
    assert texts.of(make_batch(PLAIN, [])) == []
