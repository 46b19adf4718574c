"""Waiting for what must become true, and never for ever."""

import time
from collections.abc import Callable

PATIENCE_S = 180.0
"""What a machine that does much else needs at most for what takes no time."""
_SHORTEST_S, _LONGEST_S, _OF_WAIT = 0.002, 0.05, 0.1
"""Between two looks: a part of what was waited for already. A look can cost more than what it
waits for has left to do on a busy machine."""


def wait_until(is_true: Callable[[], object], timeout_s: float = PATIENCE_S) -> float | None:
    """Return how long it took until something was true, or None."""
    start = time.monotonic()
    while not is_true():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            return None
        time.sleep(min(max(waited_s * _OF_WAIT, _SHORTEST_S), _LONGEST_S))
    return time.monotonic() - start


def becomes_true(is_true: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    """Whether something was true in time."""
    return wait_until(is_true, timeout_s) is not None
