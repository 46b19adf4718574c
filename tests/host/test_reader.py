import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from kprobes.errors import KprobesError, RingError, TargetError, UnreachableError
from kprobes.host.reader import Collector, HostKernel, open_reader
from kprobes.model.events import Events, Pages
from kprobes.transport.tracefs_rings import Rings
from tests.build.ftrace_page import Record, page
from tests.build.host_event import (
    OPEN,
    OPENED,
    new_task,
    opened,
    opening,
    rename,
)
from tests.build.instance import make_tracefs
from tests.build.turns import short_switch_interval
from tests.build.waiting import becomes_true

KERNEL = HostKernel(version=(6, 1), symbol_at=lambda addr: f"at_{addr:x}+0x0/0x10")


def shown(events: Events) -> list[tuple[int, bytes, str]]:
    """Time, comm and event of each, in order."""
    rows = [
        list(zip(batch.ts.tolist(), batch.comm.tolist(), strict=True)) for batch in events.batches
    ]
    return [
        (*rows[index][row], events.batches[int(index)].layout.event)
        for index, row in zip(events.batch.tolist(), events.row.tolist(), strict=True)
    ]


class EndlessRings:
    """A page in every round, numbered in place of its CPU."""

    def __init__(self, *, bug_at: int = -1) -> None:
        self.count = 0
        self.bug_at = bug_at

    def read(self) -> Iterator[Pages]:
        if self.count == self.bug_at:
            raise ZeroDivisionError("a bug")
        yield Pages(
            data=np.zeros((1, 4096), np.uint8),
            cpu=np.array([self.count], np.uint16),
            skips=np.zeros(1, np.int64),
        )
        self.count += 1


def _take_on(collector: Collector) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        collector.take()


def test_what_the_rings_hold_comes_out_in_order_with_its_tasks(tmp_path: Path) -> None:
    pid = (1 << 22) - 1  # no task of this machine's
    first = page(100, [Record(0, new_task(pid, b"sh")), Record(10, opening(1, b"a", pid=pid))])
    second = page(105, [Record(1, rename(pid, b"sh", b"ls")), Record(9, opened(3, pid=pid))])
    instance = make_tracefs(tmp_path, first, second)

    reader = open_reader(instance, [OPEN, OPENED], KERNEL)
    found = [shown(events) for events in reader.rest()]

    assert found == [[], [(110, b"ls", "open"), (115, b"ls", "opened")]]
    assert dict(reader.recorded) == {1: 1, 2: 1}
    assert reader.lost == 6
    reader.close()


def test_an_instance_may_have_larger_pages(tmp_path: Path) -> None:
    instance = make_tracefs(tmp_path, page(1, [Record(0, opened(3))]) + bytes(4096))
    (instance / "buffer_subbuf_size_kb").write_text("8\n")

    reader = open_reader(instance, [OPENED], KERNEL)

    assert sum(len(events) for events in reader.rest()) == 1
    reader.close()


def test_pages_that_no_kernel_wrote_are_refused(tmp_path: Path) -> None:
    reader = open_reader(make_tracefs(tmp_path, b"\xff" * 4096), [OPEN], KERNEL)

    with pytest.raises(RingError):
        list(reader.rest())
    reader.close()


def test_nothing_is_given_before_all_rings_were_looked_at_again(tmp_path: Path) -> None:
    instance = make_tracefs(tmp_path, page(1, [Record(0, opened(3)), Record(5, opened(4))]))
    reader = open_reader(instance, [OPENED], KERNEL)
    found: list[int] = []

    def is_found() -> bool:
        found.extend(ts for ts, _, _ in shown(reader.drain()))
        return bool(found)

    assert becomes_true(is_found)
    # A second look found nothing more, so all of the first is in order.
    assert found == [1, 6]
    assert [shown(events) for events in reader.rest()] == [[], []]
    reader.close()


def test_a_ring_that_goes_wrong_is_told_by_the_next_drain(tmp_path: Path) -> None:
    reader = open_reader(make_tracefs(tmp_path, bytes(100)), [OPENED], KERNEL)

    with pytest.raises(TargetError, match="no whole pages"):
        list(reader.rest())
    reader.close()


def test_no_instance_is_told(tmp_path: Path) -> None:
    instance = make_tracefs(tmp_path, b"")

    with pytest.raises(UnreachableError):
        open_reader(instance.with_name("gone"), [OPEN], KERNEL)
    (tmp_path / "events/header_page").unlink()
    with pytest.raises(TargetError):
        open_reader(instance, [OPEN], KERNEL)


def test_what_was_read_before_a_ring_was_gone_comes_first(tmp_path: Path) -> None:
    instance = make_tracefs(tmp_path, page(1, [Record(0, opened(3))]), bytes(4096))
    reader = open_reader(instance, [OPENED], KERNEL)
    (instance / "per_cpu/cpu1/buffer_size_kb").unlink()
    rest = reader.rest()

    assert [ts for events in (next(rest), next(rest)) for ts, _, _ in shown(events)] == [1]
    with pytest.raises(TargetError, match="buffer_size_kb"):
        next(rest)
    assert dict(reader.recorded) == {2: 1}
    reader.close()


def test_pages_wait_up_to_a_limit_and_no_page_is_lost() -> None:
    rings = EndlessRings()
    collector = Collector(cast("Rings", rings), room=3 * 4096)
    taken: list[Pages] = []

    with short_switch_interval():
        deadline = time.monotonic() + 60
        while len(taken) < 500 and time.monotonic() < deadline:
            now = collector.take()
            assert now is None or len(now.pages) <= 3
            taken += [] if now is None else now.pages
        collector.stop()
        last = collector.take()
    taken += [] if last is None else last.pages

    assert [int(pages.cpu[0]) for pages in taken] == list(range(rings.count))


def test_a_bug_of_the_thread_is_told() -> None:
    rings = EndlessRings(bug_at=2)
    told: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, told.append
    try:
        collector = Collector(cast("Rings", rings))
        with pytest.raises(KprobesError, match="error of our own"):
            _take_on(collector)
    finally:
        threading.excepthook = before

    assert [args.exc_type for args in told] == [ZeroDivisionError]
