"""Changes of a running trace from outside: ``--control fifo:CTL[,ACK]`` or ``fd:CTL[,ACK]``.

One operation per line, as perf record(1) has them, and each is answered by a line, ``ack`` or
``error: ...``, once it is done:

    enable [EVENT]            disable [EVENT]           EVENT and GROUP/EVENT may be shell patterns
    define DEFINITION         delete EVENT
    filter EVENT [EXPRESSION]                           without one the filter goes
    trigger EVENT [!]TRIGGER                            with ! it goes
    evlist                                              a line for each event before the ack
    hist [EVENT]                                        what hist triggers have counted, likewise
    ping                      stop                      stop ends the trace
"""

import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kprobes.errors import KprobesError, UsageError
from kprobes.model.visible import visible

if TYPE_CHECKING:
    from kprobes.open import AnySession

_POLL_S = 0.1
_LONGEST_LINE = 1 << 16
_FORM = "fifo:CTL[,ACK] or fd:CTL[,ACK]"


class Control:
    """Reads operations in a thread of its own and makes them, until it is closed.

    Attributes:
        is_stopped: whether the trace is to end.
    """

    def __init__(self, spec: str, session: "AnySession") -> None:
        """Open what a specification names.

        Args:
            spec: ``fifo:CTL[,ACK]``: two named pipes; ``fd:CTL[,ACK]``: two descriptors.
            session: that is recorded.

        Raises:
            UsageError: it is wrong, or cannot be opened.
        """
        self.is_stopped = False
        self._session = session
        self._undo = ExitStack()
        with ExitStack() as undo:
            self._read, self._write = _opened(spec, undo)
            self._undo = undo.pop_all()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kprobes-control", daemon=True)
        self._operations: Mapping[str, Callable[[str], Iterator[str]]] = {
            "enable": self._enable,
            "disable": self._disable,
            "define": self._define,
            "delete": self._delete,
            "filter": self._filter,
            "trigger": self._trigger,
            "evlist": self._list,
            "hist": self._hist,
            "ping": lambda _: iter(()),
            "stop": self._stop,
        }

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Read no more, and let the pipes go."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._undo.close()

    def answer(self, line: str) -> list[str]:
        """Make the operation of a line, and return the lines of its answer."""
        word, _, rest = line.strip().partition(" ")
        try:
            if word not in self._operations:
                known = ", ".join(self._operations)
                raise UsageError(f"no such operation: {word!r} ({known})")
            return [*self._operations[word](rest.strip()), "ack"]
        except KprobesError as error:
            return [f"error: {str(error).splitlines()[0].removeprefix('error: ')}"]

    def _run(self) -> None:
        left = b""
        while not self._is_over.is_set():
            if not select.select([self._read], [], [], _POLL_S)[0]:
                continue
            found = os.read(self._read, _LONGEST_LINE)
            if not found:
                return
            *lines, left = (left + found).split(b"\n")
            left = left[-_LONGEST_LINE:]
            for line in lines:
                self._tell(self.answer(line.decode(errors="replace")))

    def _tell(self, lines: list[str]) -> None:
        if self._write is None:
            return
        data = "".join(f"{line}\n" for line in lines).encode()
        while data and not self._is_over.is_set():
            # Who does not read its answers waits for nothing else: where there is room, so many
            # bytes fit into a pipe that blocks, too.
            if select.select([], [self._write], [], _POLL_S)[1]:
                try:
                    data = data[os.write(self._write, data[: select.PIPE_BUF]) :]
                except BrokenPipeError:
                    return

    def _enable(self, pattern: str) -> Iterator[str]:
        self._session.select(pattern or "*").enable()
        return iter(())

    def _disable(self, pattern: str) -> Iterator[str]:
        self._session.select(pattern or "*").disable()
        return iter(())

    def _define(self, text: str) -> Iterator[str]:
        self._session.probe(text)
        return iter(())

    def _delete(self, pattern: str) -> Iterator[str]:
        self._session.select(_given(pattern)).delete()
        return iter(())

    def _filter(self, text: str) -> Iterator[str]:
        pattern, _, expression = text.partition(" ")
        self._session.select(_given(pattern)).set_filter(expression.strip())
        return iter(())

    def _trigger(self, text: str) -> Iterator[str]:
        pattern, _, trigger = text.partition(" ")
        self._session.select(_given(pattern)).trigger(trigger)
        return iter(())

    def _list(self, pattern: str) -> Iterator[str]:
        if not pattern and not self._session.definitions:
            return
        for number in self._session.select(pattern or "*").numbers:
            yield self._session.describe(number)

    def _hist(self, pattern: str) -> Iterator[str]:
        for each in self._session.select(pattern or "*").histograms:
            if each.event:
                yield visible(each.event)
            yield from visible(each.text().decode(errors="surrogateescape"), keep="\n").splitlines()

    def _stop(self, _: str) -> Iterator[str]:
        self.is_stopped = True
        return iter(())


def _given(pattern: str) -> str:
    if not pattern:
        raise UsageError("which event? give its name")
    return pattern


def _opened(spec: str, undo: ExitStack) -> tuple[int, int | None]:
    kind, _, places = spec.partition(":")
    names = places.split(",")
    if kind not in ("fifo", "fd") or not all(names) or len(names) > 2:
        raise UsageError(f"invalid control: {spec!r} (use {_FORM})")
    try:
        if kind == "fd":
            found = [int(name) for name in names]
            for each in found:
                os.fstat(each)
        else:
            found = [os.open(name, os.O_RDWR | os.O_NONBLOCK) for name in names]
            for each in found:
                undo.callback(os.close, each)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot open the control {spec!r}: {error}") from error
    return found[0], found[1] if len(found) > 1 else None
