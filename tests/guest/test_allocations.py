"""Allocations of a guest: known at every moment, also from the journal's lines alone."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from kprobes.guest.allocations import Allocation, AllocationLog, Call, Kind
from kprobes.model.plan import InstanceTable
from kprobes.units import Addr

DATA = Allocation(kind=Kind.DATA, addr=0, size=4096)
CODE = Allocation(kind=Kind.CODE, addr=0, size=8192)
ROX = Allocation(kind=Kind.ROX, addr=0x5000, size=8192)


def lending(allocation: Allocation) -> Call:
    return Call(frame=0x100, trap=0x200, allocates=allocation)


def returning(allocation: Allocation) -> Call:
    return Call(frame=0x100, trap=0x200, returns=allocation)


def at(allocation: Allocation, addr: int) -> Allocation:
    return Allocation(kind=allocation.kind, addr=addr, size=allocation.size)


def test_a_new_ledger_is_settled() -> None:
    assert AllocationLog().is_empty


def test_what_a_call_returns_is_where_the_loan_is() -> None:
    allocations = AllocationLog()

    allocations.begin(lending(DATA))
    assert (allocations.live, allocations.is_empty) == ((), False)
    allocations.end(0x1000)

    assert allocations.live == (at(DATA, 0x1000),)
    assert allocations.call is None


def test_a_call_that_returns_nothing_has_allocated_nothing() -> None:
    allocations = AllocationLog()

    allocations.begin(lending(DATA))
    allocations.end(0)

    assert allocations.is_empty


def test_a_seal_counts_from_the_moment_it_may_have_been_made() -> None:
    allocations = AllocationLog()

    allocations.begin(lending(ROX))

    assert allocations.live == (ROX,)
    allocations.end(0)
    assert allocations.live == (ROX,)


def test_what_may_have_been_given_back_is_not_given_back_again() -> None:
    allocations = AllocationLog()
    allocations.begin(lending(DATA))
    allocations.end(0x1000)

    allocations.begin(returning(at(DATA, 0x1000)))
    assert not allocations.is_empty
    allocations.end(0)

    assert allocations.is_empty


@pytest.mark.parametrize("call", [lending(DATA), lending(ROX), returning(at(CODE, 0x9000))])
def test_a_call_that_was_not_made_has_changed_nothing(call: Call) -> None:
    allocations = AllocationLog()
    allocations.begin(lending(CODE))
    allocations.end(0x9000)

    allocations.begin(call)
    allocations.cancel()

    assert allocations.live == (at(CODE, 0x9000),)
    assert (allocations.call, allocations.calls) == (None, 2)


def test_a_call_of_a_journal_that_knew_no_numbers_is_read() -> None:
    allocations, old = AllocationLog(), Call(frame=1, trap=2, allocates=DATA)
    begun = {"frame": 1, "landing": 2, "lends": asdict(DATA), "returns": None}

    allocations.replay({"begin": begun})

    assert allocations.call == old


def test_what_no_single_call_returned_is_dropped_also_from_the_lines_alone() -> None:
    lines: list[dict[str, Any]] = []
    allocations = AllocationLog(lines.append)
    point = Allocation(kind=Kind.TRACEPOINT, addr=0x7000, size=0x5010)
    allocations.begin(lending(point))
    allocations.end(0)

    assert AllocationLog.replayed(json.loads(json.dumps(lines))).live == (point,)
    allocations.drop(point)

    assert allocations.is_empty
    assert AllocationLog.replayed(json.loads(json.dumps(lines))).is_empty


def test_memory_is_what_is_allocated_once() -> None:
    allocations = AllocationLog()
    for number, allocation in enumerate((DATA, CODE, ROX), 1):
        allocations.begin(lending(allocation))
        allocations.end(number << 16)

    assert allocations.memory == 4096 + 8192


def test_every_change_is_said_before_it_is_made() -> None:
    said: list[tuple[dict[str, Any], bool]] = []
    allocations = AllocationLog(lambda line: said.append((line, allocations.is_empty)))

    allocations.begin(lending(DATA))
    allocations.end(0)

    assert [(list(line), settled) for line, settled in said] == [
        (["begin"], True),
        (["end"], False),
    ]


@given(st.lists(st.tuples(st.sampled_from([DATA, CODE, ROX]), st.integers(0, 3), st.booleans())))
def test_its_lines_tell_all_of_it(steps: list[tuple[Allocation, int, bool]]) -> None:
    lines: list[str] = []
    allocations, copy = AllocationLog(lambda line: lines.append(json.dumps(line))), AllocationLog()
    for allocation, result, is_return in steps:
        known = [one for one in allocations.live if one.kind is allocation.kind]
        allocations.begin(returning(known[0]) if is_return and known else lending(allocation))
        if result < 2:
            allocations.end(result)
        if result == 2:
            allocations.cancel()

    for line in lines:
        copy.replay(json.loads(line))

    assert (copy.live, copy.call, copy.calls) == (
        allocations.live,
        allocations.call,
        allocations.calls,
    )


@pytest.mark.parametrize(
    "line",
    [
        {"begin": {}},
        {"begin": 5},
        {"begin": {"frame": 1, "landing": 2, "lends": {"kind": "gold"}, "returns": None}},
        {"end": "x"},
    ],
)
def test_a_line_that_no_log_has_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        AllocationLog().replay(line)


def test_where_calls_in_progress_are_is_known_from_the_lines_too() -> None:
    said: list[dict[str, Any]] = []
    instances = InstanceTable(addr=Addr(0x7000), count=64, stride=40, trampoline=Addr(0x5010))

    allocations = AllocationLog(said.append)
    allocations.keep_instances([instances])

    copy = AllocationLog()
    for line in said:
        copy.replay(json.loads(json.dumps(line)))
    assert copy.instances == allocations.instances == (instances,)
