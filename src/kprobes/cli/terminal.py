"""Words for people, on standard error; standard output is for events and listings alone.

One line on a terminal that says what is being done, and is gone when it is done.

Ctrl-C and its relatives: the first one asks us to finish, the second one makes us.

A signal that comes while something must not be torn in two is kept, and acted on where it is
safe to: ``is_asked`` is looked at, or ``check`` raises. Where others can keep us from getting
there, it is kept for a while only. The second ends this process at once.
That harms nobody: the guardian puts an attached guest right, and one of our own ends with us.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import BinaryIO, Protocol, Self

from kprobes.model.visible import visible

_OURS = "\n\t"


def print_message(text: str) -> None:
    """Write a line, or several, to standard error; control characters of guests' as escapes."""
    if sys.stderr.isatty():
        text = visible(text, keep=_OURS)
    # Nobody may be listening any more, and that must not stop what we are doing.
    try:
        sys.stderr.write(text.rstrip("\n") + "\n")
        sys.stderr.flush()
    except OSError:
        return


def print_bytes(data: bytes) -> None:
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


def aligned(
    rows: Iterable[Sequence[str]], *, indent: str = "", most: int | None = None, more: str = ""
) -> str:
    """Return rows of words as lines whose columns begin below each other.

    Args:
        rows: with as many columns as each has.
        indent: of each line.
        most: so many rows are shown, or None for all.
        more: the last line in place of the others; ``{}`` in it becomes their number.
    """
    # A name of a guest's must not look like another row.
    every = [tuple(map(visible, row)) for row in rows]
    table = every[:most]
    rest = f"{indent}... and {more.format(f'{len(every) - len(table):,}')}\n"
    count = max(map(len, table), default=0)
    widths = [max((len(r[i]) for r in table if len(r) > i + 1), default=0) for i in range(count)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    text = "".join(f"{indent}{line}\n" for line in lines)
    return text + rest if len(table) < len(every) else text


def json_lines(values: Iterable[object]) -> str:
    """Return values as JSON, each on one line."""
    # numpy takes a tenth of a second to import, which text does without.
    from kprobes.sinks.json import dumps

    return "".join(f"{dumps(value)}\n" for value in values)


def counted(count: int, thing: str) -> str:
    """Return ``1 event``, ``1,234 events``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


class _Line(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update(self, status: str) -> None: ...


class Progress:
    """Shows words while a person waits; says nothing when nobody looks."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        """Begin with no line."""
        self._line: _Line | None = None
        if is_terminal() and not is_quiet:
            self._line = _rich_line()

    def __enter__(self) -> Self:
        if self._line is not None:
            self._line.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.done()

    def __call__(self, words: str) -> None:
        """Show these words instead of the ones before."""
        if self._line is not None:
            # rich reads [words in brackets] as its own markup.
            self._line.update(visible(words).replace("[", r"\["))

    def done(self) -> None:
        """Take the line away for good."""
        if self._line is not None:
            self._line.stop()
            self._line = None


def _rich_line() -> _Line:
    from rich.console import Console
    from rich.status import Status

    return Status("starting", console=Console(stderr=True, highlight=False))


_FORCED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h"
_WORDS = (
    b"\nkprobe: ended at once; a guest that was attached to is being put right "
    b"(this machine's own kernel by `kprobe restore`)\n"
)


class Stop:
    """Takes SIGINT, SIGTERM and SIGHUP while it is entered.

    Attributes:
        is_asked: whether one has come.
        asked_s: when it came, by ``time.monotonic``; infinite before.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.asked_s = math.inf
        self._subscribed: tuple[Callable[[], None], Callable[[], None]] = (_do_nothing, _do_nothing)
        self._number: int = signal.SIGINT
        self._is_deferring = False
        self._at_most_s = 0.0
        self._is_overdue = False
        self._timer: threading.Timer | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            before = signal.getsignal(number)
            # nohup means it.
            if number != signal.SIGHUP or before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cancel()
        for number, before in self._before.items():
            signal.signal(number, before)  # pyright: ignore[reportArgumentType] - from getsignal

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was kept; nothing is in the middle of anything."""
        if self.is_asked:
            raise KeyboardInterrupt(self._number)

    def defer(self, *, at_most_s: float = 0.0) -> None:
        """Keep the first signal from now on, instead of raising KeyboardInterrupt at once.

        Args:
            at_most_s: after which KeyboardInterrupt is raised all the same; 0 means never.
        """
        self._cancel()
        self._is_deferring = True
        self._at_most_s = at_most_s

    def subscribe(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Call ``first`` in the first signal's handler, ``second`` before the other ends us."""
        self._subscribed = first, second

    def unsubscribe(self) -> None:
        """Call nothing any more."""
        self._subscribed = _do_nothing, _do_nothing

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._is_overdue:
            self._is_overdue = False
            raise KeyboardInterrupt(number)
        if self.is_asked:
            self._subscribed[1]()
            _end_at_once()
        self.is_asked, self.asked_s, self._number = True, time.monotonic(), number
        self._subscribed[0]()
        if not self._is_deferring:
            raise KeyboardInterrupt(number)
        if self._at_most_s:
            self._timer = threading.Timer(self._at_most_s, self._come_again, (number,))
            self._timer.daemon = True
            self._timer.start()

    def _come_again(self, number: int) -> None:
        self._is_overdue = True
        # To the process, so that it ends what the main thread waits for.
        os.kill(os.getpid(), number)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def status_of(number: int) -> int:
    """Return the exit status of what a signal has ended, as shells have it."""
    return 128 + number


def _end_at_once() -> None:
    # The progress line has hidden the cursor.
    os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + _WORDS)
    os._exit(_FORCED)  # no clean-up: it may be what hangs


def _do_nothing() -> None:
    pass
