"""Fields that actions keep, against a slow reading of the kernel's rule."""

from random import Random

import numpy as np
import pytest

from kprobes.model.hist import Handler
from kprobes.tracked import Tracked, joined, kept, nothing

_ENTRIES = 5


def _hits(random: Random, count: int) -> tuple[Tracked, list[int], list[tuple[int, int]]]:
    numbers = [random.choice((0, 1, 2, 7, 1 << 63)) for _ in range(count)]
    when = random.sample(range(1, 1000), count)
    saved = [random.getrandbits(64) for _ in range(count)]
    columns = (np.array(each, np.uint64) for each in (numbers, when, saved))
    number, at, field = columns
    rows = [random.randrange(_ENTRIES) for _ in range(count)]
    hits = Tracked(numbers=number, when=at, saved=(field,))
    order = sorted(range(count), key=when.__getitem__)
    return hits, rows, [(rows[at], at) for at in order]


def _follow(handler: Handler, state: tuple[int, int], number: int, field: int) -> tuple[int, int]:
    # check_track_val_max(), check_track_val_changed().
    is_kept = number > state[0] if handler is Handler.ON_MAX else number != state[0]
    return (number, field) if is_kept else state


@pytest.mark.parametrize("handler", Handler)
@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_the_kernel_keeps_in_one_round_and_in_several(
    handler: Handler, seed: int
) -> None:
    random = Random(seed)
    model = [(0, 0)] * _ENTRIES
    found = nothing(_ENTRIES, 1)
    for _ in range(3):
        hits, rows, order = _hits(random, random.choice((0, 1, 30)))
        for row, at in order:
            number, field = int(hits.numbers[at]), int(hits.saved[0][at])
            model[row] = _follow(handler, model[row], number, field)

        found = kept(handler, found, hits, np.array(rows, np.int64))

        pairs = zip(found.numbers.tolist(), found.saved[0].tolist(), strict=True)
        assert [*pairs] == model


def test_of_no_entries_nothing_is_kept() -> None:
    none = nothing(0, 2)
    for handler in Handler:
        found = kept(handler, none, none, np.zeros(0, np.int64))
        assert (len(found), len(found.saved)) == (0, 2)


def test_parts_are_joined_one_after_the_other() -> None:
    one = Tracked(
        numbers=np.array([1], np.uint64),
        when=np.array([2], np.uint64),
        saved=(np.array([3], np.uint64),),
    )

    found = joined([one, nothing(1, 1), one])

    assert found.numbers.tolist() == [1, 0, 1]
    assert found.take(np.array([2, 1])).saved[0].tolist() == [3, 0]
