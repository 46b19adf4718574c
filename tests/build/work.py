"""Work counted in bytecodes: the same on every machine, busy or not."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

COUNTS = (8, 32, 256)
"""How many things ``is_linear`` takes."""


def bytecodes(act: Callable[[], object]) -> int:
    """Run something and return how many bytecodes Python has executed for it."""
    done = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal done
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        done += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return done


def is_linear(act: Callable[[int], object]) -> bool:
    """Whether eight times as many things are less than twelve times the work."""
    once, few, many = COUNTS
    # What is made but once has been made then.
    act(once)
    return bytecodes(lambda: act(many)) < 12 * bytecodes(lambda: act(few))
