"""Records that C finds are those that NumPy finds, whatever the bytes are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.ring.chunk import Chunk, Shapes
from kprobes.ring.find import FoundRecords, find
from tests.build.native import count_as_few, count_as_many
from tests.build.ring import Hit, chunk_of, make_layout, record, stream

LAYOUTS = (make_layout(1, ("u64",)), make_layout(2), make_layout(3, ("string", "u8")))
SHAPES = Shapes(LAYOUTS)
HITS = st.lists(
    st.one_of(
        st.builds(Hit, layout=st.just(LAYOUTS[0]), values=st.just((7,))),
        st.builds(Hit, layout=st.just(LAYOUTS[1])),
        st.builds(Hit, layout=st.just(LAYOUTS[2]), values=st.just((b"/etc/passwd", 1))),
    ),
    max_size=12,
)
WRITES = st.lists(st.tuples(st.integers(0, 800), st.integers(0, 255)), max_size=6)


def both_ways(chunk: Chunk) -> FoundRecords:
    """Return what is found, and check that it is the same both ways."""
    with pytest.MonkeyPatch.context() as patch:
        count_as_few(patch)
        few = find(chunk, SHAPES)
        count_as_many(patch)
        many = find(chunk, SHAPES)
    assert (few.offsets.tolist(), few.ids.tolist()) == (many.offsets.tolist(), many.ids.tolist())
    assert (few.end, few.is_blocked) == (many.end, many.is_blocked)
    assert (few.is_lost, few.damaged) == (many.is_lost, many.damaged)
    return many


@settings(max_examples=200)
@given(HITS, WRITES, st.integers(0, 1 << 40).map(lambda n: n << 3), st.integers(0, 90))
def test_both_find_the_same(
    hits: list[Hit], writes: list[tuple[int, int]], position: int, missing: int
) -> None:
    out = bytearray(stream(hits, position))
    for at, value in writes:
        if at < len(out):
            out[at] = value
    end = max(len(out) - missing, 0) // 8 * 8

    both_ways(chunk_of(bytes(out[:end]), position=position))


def test_all_records_are_found_up_to_one_that_is_not_committed() -> None:
    hits = [Hit(layout=LAYOUTS[n % 2], values=(n,) * (1 - n % 2)) for n in range(9)]
    out = bytearray(stream(hits))

    whole = both_ways(chunk_of(bytes(out)))
    out[4 * 88 : 4 * 88 + 8] = bytes(8)
    cut = both_ways(chunk_of(bytes(out)))

    assert whole.ids.tolist() == [1, 2, 1, 2, 1, 2, 1, 2, 1]
    assert (whole.end, whole.is_blocked) == (len(out), False)
    assert cut.ids.tolist() == [1, 2, 1, 2, 1, 2, 1, 2]
    assert (cut.end, cut.is_blocked) == (4 * 88, True)


@pytest.mark.parametrize(("number", "ids", "damaged"), [(1, [1], 0), (9, [], 1)])
def test_an_event_is_what_the_later_copy_says(number: int, ids: list[int], damaged: int) -> None:
    # Commit words are looked at first: a guest may change them before the rest is copied.
    chunk = chunk_of(stream([Hit(layout=LAYOUTS[0], values=(1,))]))
    commits = chunk.data.copy()
    commits[:2] = LAYOUTS[1].event_id, 0
    chunk.data[:2] = number, 0

    found = both_ways(replace(chunk, commits=commits))

    assert (found.ids.tolist(), found.damaged) == (ids, damaged)


@pytest.mark.parametrize("missing", [8, 24, 48])
def test_a_record_that_ends_after_the_bytes_at_hand_is_none(missing: int) -> None:
    out = stream([Hit(layout=LAYOUTS[0], values=(1,)), Hit(layout=LAYOUTS[1])])

    found = both_ways(chunk_of(out[: len(out) - missing]))

    assert found.ids.tolist() == ([1] if missing < 48 else [])


def test_a_size_is_the_records_own_where_it_has_one() -> None:
    one = record(Hit(layout=LAYOUTS[2], values=(b"/a", 1)), 0)
    out = one + record(Hit(layout=LAYOUTS[1]), len(one))

    assert both_ways(chunk_of(out)).offsets.tolist() == [0, len(one)]
