"""End of a trace."""

import io
import os
import time
from typing import BinaryIO

import pytest

from kprobes.cli.output import LimitSink, Output
from kprobes.cli.terminal import Progress, Stop
from kprobes.cli.tracing import reasons
from kprobes.cli.until import Until
from kprobes.cli.workload import Workload
from kprobes.errors import RefusedError
from kprobes.model.events import Events
from kprobes.transport.agent import Command, Finished
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout
from tests.build.waiting import becomes_true

EVENTS = make_events([make_batch(make_layout(1), [Row(), Row()])])


class Silent:
    """Writes nothing."""

    def __init__(self, out: BinaryIO) -> None:
        del out

    def write(self, events: Events) -> None:
        del events

    def close(self) -> None:
        pass


class Header(Silent):
    """Writes a header, whatever comes."""

    def __init__(self, out: BinaryIO) -> None:
        self.out = out

    def write(self, events: Events) -> None:
        assert not len(events)
        self.out.write(b"header\n")


class Ended:
    """A command that ends at once."""

    pid = 1

    def wait(self, timeout_s: float | None = None) -> Finished:
        del timeout_s
        return Finished(status=0, output=b"", pid=1)

    def go(self) -> None:
        raise AssertionError("it was not held")

    def kill(self) -> None:
        raise AssertionError("it has ended")


def make_until(
    *,
    limit: int | None = None,
    workload: Workload | None = None,
    duration_s: float = 1000,
    stream: BinaryIO | None = None,
    make_sink: type[Silent] = Silent,
) -> Until:
    output = Output(stream or io.BytesIO(), make_sink)
    return Until(
        stop=Stop(),
        output=output,
        limit_sink=LimitSink(output, limit=limit),
        workload=workload,
        progress=Progress(is_quiet=True),
        duration_s=duration_s,
    )


def test_a_trace_goes_on_until_something_ends_it() -> None:
    until = make_until()

    assert [until(), until()] == [False, False]
    until.stop.is_asked = True
    assert until()


def test_it_ends_when_enough_events_were_written() -> None:
    until = make_until(limit=3)

    until.limit_sink.write(EVENTS)
    assert not until()
    until.limit_sink.write(EVENTS)
    assert until()


def test_the_time_counts_from_the_first_question_on() -> None:
    until = make_until(duration_s=0.05)
    time.sleep(0.06)

    assert not until()
    time.sleep(0.06)
    assert until()


def test_it_ends_when_nobody_reads_any_more() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream:
        until = make_until(stream=stream)
        assert not until()
        os.close(reader)

        assert until()


def test_the_command_starts_when_all_is_armed_and_its_end_ends_the_trace() -> None:
    started: list[Command] = []

    def start(command: Command) -> Ended:
        started.append(command)
        return Ended()

    until = make_until(workload=Workload(start, ["ls"]))
    assert started == []

    until()

    assert started == ["ls"]
    assert becomes_true(until)


def test_the_header_and_the_word_come_before_the_command() -> None:
    steps: list[str] = []

    def start(command: Command) -> Ended:
        steps.append(f"{command} after {len(stream.getvalue())} bytes")
        return Ended()

    stream = io.BytesIO()
    until = make_until(workload=Workload(start, ["ls"]), stream=stream, make_sink=Header)
    until.announce = lambda: steps.append("armed")
    until()

    assert steps == ["armed", "ls after 7 bytes"]


def test_no_command_is_started_when_the_user_has_changed_their_mind() -> None:
    def start(command: Command) -> Ended:
        pytest.fail(f"{command} was started")

    until = make_until(workload=Workload(start, ["ls"]))
    until.stop.is_asked = True

    assert until()


def test_what_is_left_out_is_counted_by_reason() -> None:
    refusals = [
        RefusedError("do_exit: its returns cannot be probed: it never returns"),
        RefusedError("__die: its returns cannot be probed: the blacklist has it"),
        RefusedError("panic: its returns cannot be probed: it never returns"),
    ]

    assert [*reasons(refusals).items()] == [("it never returns", 2), ("the blacklist has it", 1)]
