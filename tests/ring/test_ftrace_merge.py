from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from kprobes.model.events import Batch, Events
from kprobes.ring.ftrace import HostDecoded
from kprobes.ring.ftrace_merge import HostMerger
from tests.build.events import Row, make_batch
from tests.build.ring import make_layout

pytestmark = pytest.mark.usefixtures("few_and_many")

LAYOUTS = [make_layout(1, ("u64",)), make_layout(2, ("u64",))]
Hit = tuple[int, int, int]
"""cpu, time, number; the number's parity is its layout."""


def part(hits: Sequence[Hit]) -> HostDecoded:
    which = [number % 2 for _, _, number in hits]
    batches: list[Batch] = []
    for index, layout in enumerate(LAYOUTS):
        own = [hit for hit, its in zip(hits, which, strict=True) if its == index]
        rows = [Row(cpu=cpu, ts=ts, values=(number,)) for cpu, ts, number in own]
        batches.append(make_batch(layout, rows))
    return HostDecoded(
        batches=tuple(batches),
        which=np.array(which, np.uint16),
        ts=np.array([ts for _, ts, _ in hits], np.uint64),
        cpu=np.array([cpu for cpu, _, _ in hits], np.uint16),
        namings=(),
        lost=0,
    )


def numbers(events: Events) -> list[int]:
    columns = [batch.values[0].tolist() for batch in events.batches]
    pairs = zip(events.batch.tolist(), events.row.tolist(), strict=True)
    return [columns[batch][row] for batch, row in pairs]


def test_events_wait_until_no_cpu_can_bring_an_earlier_one() -> None:
    merger = HostMerger()

    assert numbers(merger.push([part([(0, 10, 1), (0, 30, 2)])])) == []
    assert numbers(merger.push([part([(1, 20, 3), (1, 40, 4)])])) == [1, 3, 2]
    assert merger.horizon == 30
    assert numbers(merger.finish()) == [4]


def test_events_of_one_time_go_by_cpu_and_then_as_in_their_ring() -> None:
    merger = HostMerger()
    merger.push([part([(0, 5, 1), (0, 5, 2), (0, 5, 3), (1, 5, 6)])])

    assert numbers(merger.push([part([(0, 5, 4), (1, 5, 7)])])) == [1, 2, 3, 4, 6, 7]


def test_nothing_comes_of_nothing() -> None:
    merger = HostMerger()

    assert numbers(merger.push([])) == []
    assert numbers(merger.push([part([])])) == []
    assert numbers(merger.finish()) == []


def test_any_rounds_come_out_in_the_order_of_time_cpu_and_ring() -> None:
    random = Random(1)
    for _ in range(60):
        hits = _random_hits(random)
        expected = [number for _, _, number in sorted(hits, key=lambda hit: (hit[1], hit[0]))]
        merger = HostMerger()
        shown: list[int] = []
        # Every round brings what was stamped before it began.
        rounds = sorted(random.sample(range(60), 3))
        begin = -1
        for end in [*rounds, 99]:
            own = [hit for hit in hits if begin < hit[1] <= end]
            by_cpu = sorted(own, key=lambda hit: hit[0])
            cut = random.randrange(len(by_cpu) + 1)
            shown += numbers(merger.push([part(by_cpu[:cut]), part(by_cpu[cut:])]))
            begin = end
        shown += numbers(merger.finish())

        assert shown == expected


def _random_hits(random: Random) -> list[Hit]:
    hits = [
        (cpu, ts, 0)
        for cpu in range(3)
        for ts in sorted(random.randrange(60) for _ in range(random.randrange(20)))
    ]
    return [(cpu, ts, number) for number, (cpu, ts, _) in enumerate(hits)]
