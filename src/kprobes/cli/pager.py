"""The user's pager, for what is longer than a terminal."""

import os
import shlex
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from typing import BinaryIO, cast

from kprobes.cli.files import WholeFile

_DEFAULT = "less"
_LESS = "FRX"
"""As git has it: it ends where all is on one screen, and leaves it there."""


class _Paged(WholeFile):
    # A guest's text must not change what else is shown there.
    def isatty(self) -> bool:
        return True


@contextmanager
def paged(out: BinaryIO, *, is_wanted: bool = True) -> Generator[BinaryIO]:
    """Have the pager show what is written, where ``out`` is a terminal; wait until it is left.

    ``PAGER`` says which: ``less`` if it is not set, none if it is empty or ``cat``. Where it cannot
    be started, ``out`` is used.

    Args:
        out: standard output.
        is_wanted: whether it is to be asked for at all.
    """
    words = shlex.split(os.environ.get("PAGER", _DEFAULT))
    if not is_wanted or not out.isatty() or words in ([], ["cat"]):
        yield out
        return
    try:
        pager = subprocess.Popen(
            words, stdin=subprocess.PIPE, env={"LESS": _LESS, "LV": "-c", **os.environ}
        )
    except OSError:
        yield out
        return
    assert pager.stdin is not None
    try:
        yield cast("BinaryIO", _Paged(pager.stdin.fileno()))
    finally:
        # Ctrl-C is the pager's while it is there.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        pager.stdin.close()
        pager.wait()
        signal.signal(signal.SIGINT, before)
