"""Hits that are counted while a block runs: by a driver that counts itself, and by events."""

from collections import deque

import pytest

from kprobes.counting import LiveHistogram, with_trigger
from kprobes.errors import DefinitionError, UsageError
from kprobes.histogram import Histogram
from kprobes.model.definition import STACKTRACE
from kprobes.model.events import Events
from kprobes.model.options import Options
from kprobes.sinks.names import TraceSource
from tests.build.ring import make_layout
from tests.test_column_filter import OTHER, READ, SOURCE, events
from tests.test_column_hist import counted

TRIGGER = "keys=comm"


class FakeDriver:
    """Counts itself if it has histograms, one for each time that it is asked."""

    def __init__(self, *histograms: Histogram, target: str = "qemu:x") -> None:
        self.target = target
        self._left = deque(histograms)

    @property
    def source(self) -> TraceSource:
        return SOURCE

    def histogram(self, number: int = 0) -> Histogram | None:
        assert not number
        if len(self._left) > 1:
            return self._left.popleft()
        return self._left[0] if self._left else None


class FakeDrain:
    """Has some rounds of events."""

    def __init__(self, *rounds: Events) -> None:
        self._left = deque(rounds)

    def take(self, timeout_s: float) -> Events | None:
        assert timeout_s == 0
        return self._left.popleft() if self._left else None

    def stop(self) -> None:
        raise AssertionError

    def drain(self) -> Events:
        raise AssertionError


def test_what_the_kernel_counts_is_read_while_it_runs_and_stays() -> None:
    empty, some, last = (
        counted(f"{TRIGGER} if count {how}") for how in ("> 9999", "> 400", ">= 0")
    )
    live = LiveHistogram(FakeDriver(empty, some, last), TRIGGER, FakeDrain())

    assert [live.read().hits, live.read().hits] == [0, 2]
    live.stop()

    assert [live.read().hits, live.read().hits] == [4, 4]


def test_events_are_counted_where_the_kernel_does_not() -> None:
    live = LiveHistogram(FakeDriver(), TRIGGER, FakeDrain(events(), events()))

    assert live.read().hits == 14
    live.stop()
    live.write(events())
    live.close()

    assert live.read().hits == 21


def test_what_is_cleared_is_in_one_reading() -> None:
    empty, some, last = (
        counted(f"{TRIGGER} if count {how}") for how in ("> 9999", "> 400", ">= 0")
    )
    live = LiveHistogram(FakeDriver(empty, some, some, last), TRIGGER, FakeDrain())

    assert [live.clear().hits for _ in range(4)] == [0, 2, 0, 2]
    live.stop()
    assert live.read().hits == 0


def test_what_is_cleared_of_events_is_in_one_reading() -> None:
    live = LiveHistogram(FakeDriver(), TRIGGER, FakeDrain(events()))

    assert (live.clear().hits, live.read().hits) == (7, 0)
    live.stop()
    live.write(events())

    assert (live.read().hits, live.clear().hits, live.clear().hits) == (7, 7, 0)


def test_what_is_known_of_all_hits_only_cannot_be_cleared() -> None:
    live = LiveHistogram(FakeDriver(), "keys=comm:vals=count.max", FakeDrain(events()))

    assert live.clear().hits == 4
    with pytest.raises(UsageError, match=r"count\.max is known of all hits"):
        live.read()


def test_without_any_event_it_says_so() -> None:
    live = LiveHistogram(FakeDriver(), TRIGGER, FakeDrain())

    with pytest.raises(UsageError, match="no event that keys=comm could count"):
        live.read()


@pytest.mark.parametrize(
    ("trigger", "target", "is_asked_there"),
    [
        ("keys=comm,common_cpu", "qemu:x", True),
        ("keys=comm,common_cpu", "host", False),
        ("keys=tgid", "qemu:x", True),
        ("keys=common_timestamp", "qemu:x", False),
        ("keys=path", "qemu:x", False),
        ("keys=got", "qemu:x", False),
    ],
)
def test_a_guest_is_asked_what_it_can_be_asked(
    trigger: str, target: str, is_asked_there: bool
) -> None:
    found = with_trigger(Options(), trigger, FakeDriver(target=target), [READ, OTHER])

    assert found.trigger == (trigger if is_asked_there else "")


def test_a_guest_is_asked_for_strings_stacks_and_percentiles() -> None:
    layout = make_layout(3, ("ustring", "u64", "stacktrace"), names=("path", "n", STACKTRACE))
    for trigger in ("keys=path", "keys=stack,path:vals=n.p99", "keys=common_stacktrace"):
        assert with_trigger(Options(), trigger, FakeDriver(), [layout]).trigger == trigger
    other = make_layout(4, ("u64",), names=("path",))
    assert not with_trigger(Options(), "keys=n", FakeDriver(), [layout, other]).trigger


def test_a_guest_is_not_asked_to_add_numbers_with_and_without_a_sign() -> None:
    layouts = [make_layout(n, (type_,), names=("size",)) for n, type_ in enumerate(("s64", "u64"))]

    for chosen, trigger in ((layouts[:1], "keys=comm:vals=size.min"), (layouts, "")):
        found = with_trigger(Options(), "keys=comm:vals=size.min", FakeDriver(), chosen)
        assert found.trigger == trigger


def test_what_nobody_can_be_asked_is_refused() -> None:
    for trigger, target in (("keys=nosuch", "qemu:x"), ("keys=tgid", "host")):
        with pytest.raises(DefinitionError):
            with_trigger(Options(), trigger, FakeDriver(target=target), [READ, OTHER])
