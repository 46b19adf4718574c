"""A recording of this machine's kernel is what its trace would have been."""

import io
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.errors import FormatError
from kprobes.host.reader import HostKernel, TracefsReader, open_reader
from kprobes.model.kernel import place_of
from kprobes.recording import Recording
from kprobes.recording_writer import FileWriter
from tests.build.ftrace_page import Record, page
from tests.build.host_event import OPEN, OPENED, new_task, opened, opening, rename
from tests.build.instance import make_tracefs
from tests.build.recorded import KERNEL, SYMBOLS, Memory, text_of
from tests.test_recording import harden, mutated

HOST = HostKernel(version=KERNEL.version, symbol_at=partial(place_of, SYMBOLS))
FIRST = (1 << 22) - 99
"""Pids that no task of this machine has."""


def pages(seed: int, count: int) -> bytes:
    """Return a ring's pages: hits of two events, new tasks and their names."""
    rng, found, now = random.Random(seed), b"", 100
    for _ in range(count):
        records: list[Record] = []
        for _ in range(12):
            pid = FIRST + rng.randrange(9)
            step = rng.randrange(1, 90)
            kind = rng.randrange(10)
            if kind == 0:
                data = new_task(pid, rng.choice((b"sh", b"\xff\xfe")))
            elif kind == 1:
                data = rename(pid, b"sh", rng.choice((b"ls", b"a name of fifte")))
            elif kind < 6:
                data = opening(rng.randrange(9), rng.choice((b"/etc", b"", b"\xc3\x28")), pid=pid)
            else:
                data = opened(rng.randrange(99), pid=pid)
            records.append(Record(step, data))
        found += page(now, records)
        now += 2000
    return found


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    """An instance whose two rings hold pages."""
    return make_tracefs(tmp_path, pages(1, 20), pages(2, 30))


def recorded(instance: Path) -> tuple[bytes, TracefsReader]:
    """Return the recording of an instance, and what has read it."""
    reader, file = open_reader(instance, [OPEN, OPENED], HOST), Memory()
    with FileWriter(file) as writer:
        writer.begin(KERNEL, SYMBOLS)
        reader.write_to(writer)
        assert not sum(map(len, reader.rest()))
    reader.close()
    return file.getvalue(), reader


def read(data: bytes) -> tuple[bytes, Recording]:
    """Return what a recording prints."""
    recording = Recording(io.BytesIO(data))
    rounds = [events for boot in recording.boots() for events in boot.rounds]
    return text_of(rounds, recording.symbol_at), recording


def test_a_report_is_the_traces_text(instance: Path) -> None:
    traced = open_reader(instance, [OPEN, OPENED], HOST)
    rounds = list(traced.rest())
    traced.close()

    data, reader = recorded(instance)
    text, recording = read(data)

    assert len(text.splitlines()) > 300
    assert text == text_of(rounds)
    assert dict(reader.recorded) == dict(traced.recorded) == recording.counted.counts.recorded
    assert recording.lost == 6
    assert [each.event for _, each in sorted(recording.layouts.items())] == ["open", "opened"]


def test_events_that_are_defined_while_it_records_are_in_it(instance: Path) -> None:
    reader, file = open_reader(instance, [OPENED], HOST), Memory()
    with FileWriter(file) as writer:
        writer.begin(KERNEL, SYMBOLS)
        reader.write_to(writer)
        reader.add([OPEN])
        list(reader.rest())
    reader.close()

    assert read(file.getvalue())[0] == read(recorded(instance)[0])[0]


def test_pages_that_cannot_be_written_end_it_with_words(instance: Path) -> None:
    class Full(Memory):
        def write(self, data: object, /) -> int:
            del data
            raise OSError(28, "No space left on device")

    reader = open_reader(instance, [OPENED], HOST)
    with FileWriter(Memory()) as writer:
        writer.begin(KERNEL, SYMBOLS)
        reader.write_to(writer)
        writer._file = Full()  # pyright: ignore[reportPrivateUsage]

        with pytest.raises(Exception, match="cannot write the recording: No space left"):
            list(reader.rest())
    reader.close()


def each_cut(data: bytes) -> Iterator[bytes]:
    for size in range(0, len(data), 97):
        yield data[:size]


def test_a_file_that_is_cut_anywhere_is_read_as_far_as_it_goes(instance: Path) -> None:
    data, _ = recorded(instance)
    whole = read(data)[0].splitlines()[12:]

    for part in each_cut(data):
        try:
            text, _ = read(part)
        except FormatError:
            assert len(part) < 16
            continue
        found = text.splitlines()[12:]
        assert found == whole[: len(found)]


def test_mutations_are_read_or_refused(tmp_path: Path) -> None:
    data, _ = recorded(make_tracefs(tmp_path, pages(3, 2), pages(4, 1)))
    rng, good = random.Random(5), 0

    for number in range(1500):
        bad = mutated(data, rng)
        try:
            read(harden(bad) if number % 2 else bad)
            good += 1
        except FormatError:
            pass

    assert good > 100


def test_a_kernel_with_more_cpus_than_are_online_is_one(instance: Path) -> None:
    data, _ = recorded(instance)
    one = replace(KERNEL, cpus=1)
    reader, file = open_reader(instance, [OPEN, OPENED], HOST), Memory()
    with FileWriter(file) as writer:
        writer.begin(one, SYMBOLS)
        reader.write_to(writer)
        list(reader.rest())
    reader.close()

    assert read(file.getvalue())[0] == read(data)[0]
