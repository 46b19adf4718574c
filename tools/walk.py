"""Modules of kprobes that one definition passes on its way from the command line to a printed line.

    python tools/walk.py

It boots the embedded guest, traces one command there, and prints each module of kprobes in which
a function was called, in the order of the first call, with the number of its functions that were
called. Module and class bodies, and what they call while they are imported, do not count. The
guardian, a process of its own, is not followed. Of two trees the other one's modules are measured
with ``PYTHONPATH=TREE/src``. The first run in a tree may fill its caches: the second one's figure
is to be compared.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

_PACKAGE = "kprobes"
_ARGUMENTS = ["trace", "--target", "guest", "p:open do_sys_openat2 path=+0($arg2):ustring"]
_WORKLOAD = ["--", "ls /"]


class Walk:
    """Functions of kprobes that were called, by module, in the order of their first calls."""

    def __init__(self) -> None:
        """Nothing was called yet."""
        self.functions: dict[str, set[CodeType]] = {}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; a trace function that returns None is not called for its lines."""
        name = frame.f_globals.get("__name__", "")
        if event != "call" or name.partition(".")[0] != _PACKAGE:
            return
        called = self.functions.get(name, ())
        if frame.f_code not in called and not _is_imported(frame):
            self.functions.setdefault(name, set()).add(frame.f_code)


def _is_imported(frame: FrameType | None) -> bool:
    while frame is not None:
        of_kprobes = frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE
        # Bodies of modules and classes are not optimised, as their names are not fast locals.
        if of_kprobes and not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return True
        frame = frame.f_back
    return False


def follow(act: Callable[[], object]) -> Walk:
    """Return what a call of a function, with the threads that it starts, passes."""
    walk = Walk()
    threading.settrace(walk.note)
    sys.settrace(walk.note)
    try:
        act()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # pyright: ignore[reportArgumentType]
    return walk


def main() -> int:
    """Trace one command in the embedded guest, and print the walk."""
    from kprobes.__main__ import main as kprobe

    sys.argv = ["kprobe", *_ARGUMENTS, *_WORKLOAD]
    walk = follow(kprobe)
    sys.stdout.flush()
    for at, (name, functions) in enumerate(walk.functions.items(), 1):
        print(f"{at:4}  {name:44} {len(functions):4}")
    total = sum(map(len, walk.functions.values()))
    print(f"{len(walk.functions)} modules, {total} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
