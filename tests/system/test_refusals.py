"""Addresses that may carry a probe: our verdict beside the guest's own ``kprobe_events``."""

import logging
from collections import Counter
from collections.abc import Sequence

import pytest

from kprobes.arch.x86_64.verdict import SlotAction
from tests.system.conftest import SUITES
from tests.system.refusals import Case, compared, explained, unexplained

_log = logging.getLogger(__name__)

RANDOM, WIDE = 800, 3_000


@pytest.fixture(scope="module", params=list(SUITES))
def cases(request: pytest.FixtureRequest) -> list[Case]:
    return compared(SUITES[request.param], RANDOM)


@pytest.mark.guest
def test_refusals_are_the_kernels_or_have_a_documented_reason(cases: Sequence[Case]) -> None:
    _log_differences(cases)
    assert len(cases) > RANDOM
    assert unexplained(cases) == []


@pytest.mark.guest
def test_both_answers_are_among_the_cases(cases: Sequence[Case]) -> None:
    answers = Counter((case.is_accepted, case.ours.verdict) for case in cases)

    assert {verdict for _, verdict in answers} == set(SlotAction)
    assert answers[False, SlotAction.REFUSE] > RANDOM // 5


@pytest.mark.sweep
@pytest.mark.parametrize("version", ["6.1", "6.12"])
def test_refusals_of_thousands_of_addresses_have_a_documented_reason(version: str) -> None:
    cases = compared(SUITES[version], WIDE)

    _log_differences(cases)
    assert len(cases) > WIDE
    assert unexplained(cases) == []


def _log_differences(cases: Sequence[Case]) -> None:
    differ = [case for case in cases if case.is_accepted == case.ours.is_refused]
    _log.info("%d of %d differ: %s", len(differ), len(cases), Counter(map(explained, differ)))
