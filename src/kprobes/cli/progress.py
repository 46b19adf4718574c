"""One line on a terminal that says what is being done, and is gone when it is done."""

from types import TracebackType
from typing import Protocol, Self

from kprobes.cli.words import is_terminal
from kprobes.model.visible import visible


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
