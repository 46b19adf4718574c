"""Words for people, on standard error; standard output is for events and listings alone."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from kprobes.model.visible import visible

_OURS = "\n\t"


def say(text: str) -> None:
    """Write a line, or several, to standard error; control characters of guests' as escapes."""
    if sys.stderr.isatty():
        text = visible(text, keep=_OURS)
    # Nobody may be listening any more, and that must not stop what we are doing.
    try:
        sys.stderr.write(text.rstrip("\n") + "\n")
        sys.stderr.flush()
    except OSError:
        return


def say_bytes(data: bytes) -> None:
    """Write what a guest's command printed to standard error: as it is, but on a terminal."""
    if not data:
        return
    if sys.stderr.isatty():
        data = visible(data.decode(errors="surrogateescape"), keep=_OURS).encode()
    try:
        sys.stderr.flush()
        sys.stderr.buffer.write(data if data.endswith(b"\n") else data + b"\n")
        sys.stderr.buffer.flush()
    except OSError:
        return


def write_text(out: BinaryIO, text: str) -> None:
    """Write a command's text to its output; on a terminal control characters are escapes."""
    if out.isatty():
        text = visible(text, keep=_OURS)
    out.write(text.encode(errors="surrogateescape"))


def is_terminal() -> bool:
    """Whether a person sees standard error."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def aligned(rows: Iterable[Sequence[str]], *, indent: str = "", gap: str = "  ") -> str:
    """Return rows of words as lines whose columns begin below each other."""
    # A name of a guest's must not look like another row.
    table = [tuple(map(visible, row)) for row in rows]
    count = max(map(len, table), default=0)
    widths = [max((len(r[i]) for r in table if len(r) > i + 1), default=0) for i in range(count)]
    lines = (gap.join(map(str.ljust, row, widths)).rstrip() for row in table)
    return "".join(f"{indent}{line}\n" for line in lines)


def counted(count: int, thing: str) -> str:
    """Return ``1 event``, ``1,234 events``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
