"""The garbage collector held off: also where something goes wrong, and where it was off."""

import gc

import pytest

from kprobes.collector import without_collector


def test_it_is_held_off_and_goes_on_also_after_an_error() -> None:
    assert gc.isenabled()

    with pytest.raises(ValueError, match="wrong"), without_collector():
        raise ValueError("wrong" if not gc.isenabled() else "it goes on")

    assert gc.isenabled()


def test_where_it_was_off_it_stays_off() -> None:
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_many_objects_are_not_looked_at_when_the_next_one_is_made() -> None:
    with without_collector():
        kept: list[list[int]] = [[] for _ in range(200_000)]

    assert gc.get_count()[0] < 200_000
    assert gc.get_freeze_count() == 0
    assert len(kept) == 200_000
