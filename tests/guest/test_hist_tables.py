"""The memory of hist triggers' tables: whose it is, and when it is another one's."""

import struct
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.guest.guest import GuestMemory
from kprobes.guest.hist_tables import HistTables
from kprobes.guest.rings import MappedRange
from kprobes.guest.room import Retired
from kprobes.lang.hist import parse_hist
from kprobes.model.hist import MARK_LEAST, TABLE_HEADER, HistTable
from kprobes.resolve.hist import known_fields
from kprobes.units import Addr
from tests.build.guest import DATA, make_memory
from tests.build.kernel import make_probe
from tests.test_column_filter import SOURCE

_SIZE = 0x4000


class Tables:
    """Tables of one guest with one CPU, each of the same trigger."""

    def __init__(self, trigger: str = "keys=got") -> None:
        self.memory: GuestMemory = make_memory()
        self.tables = HistTables()
        self._places: Iterator[int] = iter(range(DATA, DATA + 8 * _SIZE, _SIZE))
        layout = make_probe("p:a f got=$arg1", event_id=1).layout
        found = parse_hist(trigger, known_fields(layout, of_guest=True))
        self._table = HistTable(trigger=replace(found, size=64), number=0)

    def take(self, number: int = 0) -> Addr:
        """Return where a table is."""
        table = replace(self._table, number=number)
        assert table.size <= _SIZE
        return self.tables.take(table, self.memory, 1, lambda _: Addr(next(self._places)))


@pytest.fixture
def found() -> Tables:
    return Tables()


def test_a_recording_has_the_memory_of_the_one_before_it_and_it_is_empty(found: Tables) -> None:
    first = found.take()
    found.memory.write(first, b"\1" * 64)

    found.tables.begin()

    assert found.take() == first
    assert found.memory.read(first, 64) == bytes(64)


def test_one_that_is_there_is_where_it_was(found: Tables) -> None:
    first, second = found.take(), found.take(1)

    assert first != second
    assert (found.take(), found.take(1)) == (first, second)


def test_where_calls_in_progress_will_count_nobody_else_does(found: Tables) -> None:
    first, asleep = found.take(), Retired()
    found.tables.begin([asleep])

    second = found.take()
    assert second != first
    # What slept before has nothing to do with the second one, and other code is where it was.
    found.tables.begin([asleep])
    assert found.take() == second
    found.tables.begin([Retired()])

    assert found.take() == first


def test_what_an_action_keeps_is_read_again_while_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Tables("keys=got:x=got:onmax($x).save(got)")
    place = found.take() + TABLE_HEADER
    entry = [MARK_LEAST, 1, 7, 0, 1, 2, 3]
    looks = 0
    real = MappedRange.read

    def read(data: MappedRange, offset: int, size: int) -> NDArray[np.uint8]:
        # The guest keeps something twelve times, between any two looks.
        nonlocal looks
        words = real(data, offset, size)
        looks += 1
        if looks < 24:
            entry[3] = looks
            entry[4:] = [looks // 2] * 3
        else:
            entry[3:] = [24, 99, 99, 99]
        found.memory.write(place, struct.pack("<7Q", *entry))
        return words

    monkeypatch.setattr(MappedRange, "read", read)
    histogram = found.tables.histogram(0, SOURCE, 1)

    assert histogram is not None
    assert histogram.tracked is not None
    assert (histogram.tracked.numbers.tolist(), histogram.tracked.saved[0].tolist()) == ([99], [99])
    assert looks > 20
