"""Tasks to a filter: what ``kprobe trace --follow --pid --tgid --comm`` means."""

import re
from collections.abc import Collection

from kprobes.lang.glob import glob, literal
from kprobes.model.filter import (
    Compare,
    Filter,
    Header,
    Matches,
    Pattern,
    Relation,
    any_of,
    every,
)

_COMM_CHARS = 15
"""TASK_COMM_LEN without its NUL: the kernel cuts longer names."""
_SPECIAL = re.compile(r"[*?\[]")
_PID_SIZE = 4


FOLLOWED = 1 << 63
"""``self_exec_id`` of a followed command from its exec on: the top bit, which no other task gets
to. Fork copies it to children and threads, every exec counts on, nothing in user space sets it."""
_IS_FOLLOWED = Compare(source=Header.EXEC_ID, size=8, is_signed=True, relation=Relation.LT, value=0)


def task_filter(
    pids: Collection[int] = (),
    comms: Collection[str] = (),
    *,
    tgids: Collection[int] = (),
    follow: bool = False,
) -> Filter | None:
    """Return the filter that only hits of some tasks pass.

    Args:
        pids: of the tasks; none means any.
        comms: their names, or shell patterns; none means any.
        tgids: of the processes that they are threads of; none means any.
        follow: whether they must be of a followed command, or descend from it.

    Returns:
        The filter, or None for any task.
    """
    chosen: list[Filter] = []
    if follow:
        chosen.append(any_of([_IS_FOLLOWED]))
    for source, numbers in ((Header.PID, pids), (Header.TGID, tgids)):
        if numbers:
            chosen.append(any_of([_is(source, number) for number in numbers]))
    if comms:
        patterns = [pattern for comm in comms for pattern in _patterns(comm)]
        chosen.append(any_of([Matches(source=Header.COMM, pattern=p) for p in patterns]))
    return every(chosen)


def _is(source: Header, number: int) -> Compare:
    value = number & (1 << 8 * _PID_SIZE) - 1
    return Compare(source=source, size=_PID_SIZE, is_signed=True, relation=Relation.EQ, value=value)


def _patterns(comm: str) -> list[Pattern]:
    data = comm.encode("utf-8", "surrogateescape")
    if not _SPECIAL.search(comm):
        return [literal(data[:_COMM_CHARS])]
    # A name may have such characters itself. A pattern is not cut: it says more than it matches.
    return [literal(data), glob(data, has_escapes=False)]
