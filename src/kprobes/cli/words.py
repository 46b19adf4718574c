"""Words for people, on standard error; standard output is for events and listings alone."""

import os
import sys
from collections.abc import Iterable, Sequence


def say(text: str) -> None:
    """Write a line, or several, to standard error."""
    # Nobody may be listening any more, and that must not stop what we are doing.
    try:
        sys.stderr.write(text.rstrip("\n") + "\n")
        sys.stderr.flush()
    except OSError:
        return


def say_bytes(data: bytes) -> None:
    """Write what a guest's command printed to standard error, as it is."""
    if not data:
        return
    try:
        sys.stderr.flush()
        sys.stderr.buffer.write(data if data.endswith(b"\n") else data + b"\n")
        sys.stderr.buffer.flush()
    except OSError:
        return


def is_terminal() -> bool:
    """Whether a person sees standard error."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def aligned(rows: Iterable[Sequence[str]], *, indent: str = "", gap: str = "  ") -> str:
    """Return rows of words as lines whose columns begin below each other."""
    table = [tuple(row) for row in rows]
    count = max(map(len, table), default=0)
    widths = [max((len(r[i]) for r in table if len(r) > i + 1), default=0) for i in range(count)]
    lines = (gap.join(map(str.ljust, row, widths)).rstrip() for row in table)
    return "".join(f"{indent}{line}\n" for line in lines)


def counted(count: int, thing: str) -> str:
    """Return ``1 event``, ``1,234 events``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
