"""Tasks by pid and name to a filter: what ``kprobe trace --pid --comm`` means."""

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


def task_filter(pids: Collection[int] = (), comms: Collection[str] = ()) -> Filter | None:
    """Return the filter that only hits of some tasks pass.

    Args:
        pids: of the tasks; none means any.
        comms: their names, or shell patterns; none means any.

    Returns:
        The filter, or None for any task.
    """
    chosen: list[Filter] = []
    if pids:
        chosen.append(any_of([_is_pid(pid) for pid in pids]))
    if comms:
        patterns = [pattern for comm in comms for pattern in _patterns(comm)]
        chosen.append(any_of([Matches(source=Header.COMM, pattern=p) for p in patterns]))
    return every(chosen)


def _is_pid(pid: int) -> Compare:
    value = pid & (1 << 8 * _PID_SIZE) - 1
    return Compare(
        source=Header.PID, size=_PID_SIZE, is_signed=True, relation=Relation.EQ, value=value
    )


def _patterns(comm: str) -> list[Pattern]:
    data = comm.encode("utf-8", "surrogateescape")
    if not _SPECIAL.search(comm):
        return [literal(data[:_COMM_CHARS])]
    # A name may have such characters itself. A pattern is not cut: it says more than it matches.
    return [literal(data), glob(data, has_escapes=False)]
