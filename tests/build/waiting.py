"""Waiting for what must become true, and never for ever."""

import time
from collections.abc import Callable

PATIENCE_S = 180.0
"""What a machine that does much else needs at most for what takes no time."""
_STEP_S = 0.002


def wait_until(is_true: Callable[[], object], timeout_s: float = PATIENCE_S) -> float | None:
    """Return how long it took until something was true, or None."""
    start = time.monotonic()
    while not is_true():
        if time.monotonic() > start + timeout_s:
            return None
        time.sleep(_STEP_S)
    return time.monotonic() - start


def becomes_true(is_true: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    """Whether something was true in time."""
    return wait_until(is_true, timeout_s) is not None
