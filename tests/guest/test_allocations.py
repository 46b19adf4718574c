"""What a guest has lent is known at every moment, also to somebody who only has the lines."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.guest.allocations import Call, Kind, Ledger, Loan
from kprobes.model.plan import Frames
from kprobes.units import Addr

DATA = Loan(kind=Kind.DATA, addr=0, size=4096)
CODE = Loan(kind=Kind.CODE, addr=0, size=8192)
SEAL = Loan(kind=Kind.SEAL, addr=0x5000, size=8192)


def lending(loan: Loan) -> Call:
    return Call(frame=0x100, landing=0x200, lends=loan)


def returning(loan: Loan) -> Call:
    return Call(frame=0x100, landing=0x200, returns=loan)


def at(loan: Loan, addr: int) -> Loan:
    return Loan(kind=loan.kind, addr=addr, size=loan.size)


def test_a_new_ledger_is_settled() -> None:
    assert Ledger().is_settled


def test_what_a_call_returns_is_where_the_loan_is() -> None:
    ledger = Ledger()

    ledger.begin(lending(DATA))
    assert (ledger.loans, ledger.is_settled) == ((), False)
    ledger.end(0x1000)

    assert ledger.loans == (at(DATA, 0x1000),)
    assert ledger.call is None


def test_a_call_that_returns_nothing_has_lent_nothing() -> None:
    ledger = Ledger()

    ledger.begin(lending(DATA))
    ledger.end(0)

    assert ledger.is_settled


def test_a_seal_counts_from_the_moment_it_may_have_been_made() -> None:
    ledger = Ledger()

    ledger.begin(lending(SEAL))

    assert ledger.loans == (SEAL,)
    ledger.end(0)
    assert ledger.loans == (SEAL,)


def test_what_may_have_been_given_back_is_not_given_back_again() -> None:
    ledger = Ledger()
    ledger.begin(lending(DATA))
    ledger.end(0x1000)

    ledger.begin(returning(at(DATA, 0x1000)))
    assert not ledger.is_settled
    ledger.end(0)

    assert ledger.is_settled


@pytest.mark.parametrize("call", [lending(DATA), lending(SEAL), returning(at(CODE, 0x9000))])
def test_a_call_that_was_not_made_has_changed_nothing(call: Call) -> None:
    ledger = Ledger()
    ledger.begin(lending(CODE))
    ledger.end(0x9000)

    ledger.begin(call)
    ledger.cancel()

    assert ledger.loans == (at(CODE, 0x9000),)
    assert (ledger.call, ledger.calls) == (None, 2)


def test_a_call_of_a_journal_that_knew_no_numbers_is_read() -> None:
    ledger, old = Ledger(), Call(frame=1, landing=2, lends=DATA)
    begun = {"frame": 1, "landing": 2, "lends": asdict(DATA), "returns": None}

    ledger.replay({"begin": begun})

    assert ledger.call == old


def test_memory_is_what_is_lent_once() -> None:
    ledger = Ledger()
    for number, loan in enumerate((DATA, CODE, SEAL), 1):
        ledger.begin(lending(loan))
        ledger.end(number << 16)

    assert ledger.memory == 4096 + 8192


def test_every_change_is_said_before_it_is_made() -> None:
    said: list[tuple[dict[str, Any], bool]] = []
    ledger = Ledger(lambda line: said.append((line, ledger.is_settled)))

    ledger.begin(lending(DATA))
    ledger.end(0)

    assert [(list(line), settled) for line, settled in said] == [
        (["begin"], True),
        (["end"], False),
    ]


@given(st.lists(st.tuples(st.sampled_from([DATA, CODE, SEAL]), st.integers(0, 3), st.booleans())))
def test_its_lines_tell_all_of_it(steps: list[tuple[Loan, int, bool]]) -> None:
    lines: list[str] = []
    ledger, copy = Ledger(lambda line: lines.append(json.dumps(line))), Ledger()
    for loan, result, is_return in steps:
        known = [one for one in ledger.loans if one.kind is loan.kind]
        ledger.begin(returning(known[0]) if is_return and known else lending(loan))
        if result < 2:
            ledger.end(result)
        if result == 2:
            ledger.cancel()

    for line in lines:
        copy.replay(json.loads(line))

    assert (copy.loans, copy.call, copy.calls) == (ledger.loans, ledger.call, ledger.calls)


@pytest.mark.parametrize(
    "line",
    [
        {"begin": {}},
        {"begin": 5},
        {"begin": {"frame": 1, "landing": 2, "lends": {"kind": "gold"}, "returns": None}},
        {"end": "x"},
    ],
)
def test_a_line_that_no_ledger_says_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Ledger().replay(line)


def test_where_calls_in_progress_are_is_known_from_the_lines_too() -> None:
    said: list[dict[str, Any]] = []
    frames = Frames(addr=Addr(0x7000), count=64, stride=40, trampoline=Addr(0x5010))

    ledger = Ledger(said.append)
    ledger.keep_frames([frames])

    copy = Ledger()
    for line in said:
        copy.replay(json.loads(json.dumps(line)))
    assert copy.frames == ledger.frames == (frames,)
