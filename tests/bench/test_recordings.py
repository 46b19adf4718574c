"""Recordings that are made to be measured, and what is measured of processes."""

import sys
from pathlib import Path

import pytest

from bench.recordings import build, measured
from kprobes.model.events import each_event
from kprobes.open_recording import opened_recording, read_events

_SIZES = {"read": 56, "done": 72, "open": 64}
"""Bytes of a record in its ring, without a text."""
_MB = 1_000_000


def test_a_recording_has_the_events_and_took_the_room_that_it_says(tmp_path: Path) -> None:
    built = build(tmp_path / "some.rec", 1)

    batches = [batch for events in read_events(built.path) for batch in events.batches]
    rooms = [_SIZES[batch.layout.event] * len(batch) for batch in batches]
    texts = [path for b in batches if b.layout.event == "open" for path in b.values[1].tolist()]
    assert sum(map(len, batches)) == built.events
    assert sum(rooms) + sum((len(text) // 8 + 1) * 8 for text in texts) == built.ring_bytes
    assert len(set(texts)) > 1


def test_nothing_in_it_is_damaged_and_cpus_take_turns(tmp_path: Path) -> None:
    built = build(tmp_path / "some.rec", 1)

    with opened_recording(built.path) as recording:
        found = [events for boot in recording.boots() for events in boot.rounds]
        damaged = recording.damaged

    first = next(events for events in found if len(events)).cut(slice(0, 100))
    assert damaged == 0
    assert {event.cpu for event in each_event(first)} == {0, 1}


def test_memory_is_that_of_the_command_and_not_of_who_measures_it() -> None:
    own = b"x" * (300 * _MB)

    small = measured([sys.executable, "-c", "pass"])
    large = measured([sys.executable, "-c", f"b'x' * {200 * _MB}"])

    assert small.peak_bytes < 100 * _MB < 200 * _MB < large.peak_bytes < len(own)


def test_a_command_that_fails_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="no such recording"):
        measured([sys.executable, "-c", "raise SystemExit('no such recording')"])
