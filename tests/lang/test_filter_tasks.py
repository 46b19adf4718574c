"""Tasks to filters."""

from collections.abc import Sequence

import pytest

from kprobes.lang.filter import task_filter
from kprobes.lang.glob import matches
from kprobes.model.filter import ACCEPT, REJECT, Compare, Filter, Header, Matches


def _passes(chosen: Filter, pid: int, comm: bytes) -> bool:
    at = 0
    while at not in (ACCEPT, REJECT):
        step = chosen.steps[at]
        match step.test:
            case Compare(value=value):
                holds = value == pid
            case Matches(pattern=pattern):
                holds = matches(pattern, comm)
            case _:
                raise AssertionError(step)
        at = step.yes if holds else step.no
    return at == ACCEPT


@pytest.mark.parametrize(
    ("pids", "comms", "wanted"),
    [
        ([7], [], [(7, b"ls")]),
        ([8, 9], [], [(8, b"sh"), (9, b"kworker/0:1")]),
        ([], ["sh"], [(8, b"sh")]),
        ([], ["kworker*", "sh"], [(8, b"sh"), (9, b"kworker/0:1")]),
        ([], ["?s", "*:[0-9]"], [(7, b"ls"), (9, b"kworker/0:1")]),
        ([7, 8], ["sh"], [(8, b"sh")]),
        ([7], ["sh"], []),
    ],
)
def test_the_chosen_tasks_pass(
    pids: Sequence[int], comms: Sequence[str], wanted: list[tuple[int, bytes]]
) -> None:
    chosen = task_filter(pids, comms)

    assert chosen is not None
    tasks = [(7, b"ls"), (8, b"sh"), (9, b"kworker/0:1")]
    assert [task for task in tasks if _passes(chosen, *task)] == wanted


def test_processes_are_chosen_as_tasks_are() -> None:
    chosen = task_filter(tgids=[7, 8], follow=True)

    assert chosen is not None
    assert chosen.sources == {Header.TGID, Header.EXEC_ID}
    assert _passes(chosen, 8, b"") is False


def test_no_choice_is_no_filter() -> None:
    assert task_filter() is None


@pytest.mark.parametrize(
    ("wanted", "comm"),
    [
        ("averyveryverylongname", b"averyveryverylo"),
        ("[x]", b"[x]"),
        ('it\'s "x"', b'it\'s "x"'),
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", b"caf\xc3\xa9"),
        ("a\\*", b"a\\b"),
    ],
)
def test_a_name_is_the_kernel_s(wanted: str, comm: bytes) -> None:
    chosen = task_filter(comms=[wanted])

    assert chosen is not None
    assert _passes(chosen, 1, comm)
