"""Threads that take turns as often as Python can."""

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def short_switch_interval() -> Generator[None]:
    """Let another thread have its turn after every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
