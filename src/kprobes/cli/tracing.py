"""One trace from the first connection to the last word: sinks in a row, an end, a summary."""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Protocol

from kprobes.cli.choose import is_host
from kprobes.cli.options import strategy, way
from kprobes.cli.output import NoEvents, Output, open_output
from kprobes.cli.progress import Progress
from kprobes.cli.script import Script
from kprobes.cli.stop import Stop
from kprobes.cli.summary import Calls, Summary
from kprobes.cli.target import check_options, opened, opened_host
from kprobes.cli.words import counted, say, say_bytes
from kprobes.cli.workload import Job, Workload
from kprobes.errors import RefusedError
from kprobes.model.definition import Definition
from kprobes.model.hits import Counts, Hits
from kprobes.ports import Sink
from kprobes.sinks import FORMATS
from kprobes.sinks.origin import Origin
from kprobes.sinks.tally import Tally
from kprobes.transport.agent import Command

if TYPE_CHECKING:
    # A third of a second to import, which this machine's own kernel does not need.
    from kprobes.session import Session

_LOST = 6


class Tracer(Protocol):
    """A session, whatever kernel it is with."""

    definitions: list[Definition]

    @property
    def origin(self) -> Origin:
        """What sinks need to know of the kernel."""
        ...

    def probe(
        self, text: str, *, filter: str = "", duration: bool = False, exits: bool = False
    ) -> None:
        """Add definitions."""
        ...

    def choose_tasks(self, *, pids: Collection[int] = (), comms: Collection[str] = ()) -> None:
        """Record hits of some tasks only."""
        ...

    def stream(self, sink: Sink, *, is_done: Callable[[], bool]) -> Counts:
        """Write events until it is done."""
        ...

    def hits(self) -> list[Hits]:
        """Return what was counted of every probe."""
        ...

    def start(self, command: Command) -> Job:
        """Start a command where the kernel runs."""
        ...


@dataclass(slots=True, kw_only=True)
class Until:
    """Says when a trace is over. It is first asked when everything is armed.

    Attributes:
        stop: the user's wish.
        output: ends the trace when nobody reads it any more.
        tally: ends it when it is full.
        workload: ends it, and is started here, or None.
        progress: is done.
        duration_s: counts from here.
    """

    stop: Stop
    output: Output
    tally: Tally
    workload: Workload | None
    progress: Progress
    duration_s: float = math.inf
    _deadline: float | None = None

    def __call__(self) -> bool:
        """Whether it is over."""
        if self.stop.is_asked:
            return True
        if self._deadline is None:
            self._begin()
            self._deadline = time.monotonic() + self.duration_s
        return (
            self.tally.is_full
            or self.output.is_gone
            or (self.workload is not None and self.workload.is_over)
            or time.monotonic() >= self._deadline
        )

    def _begin(self) -> None:
        self.progress.done()
        if self.workload is not None:
            self.workload.start()


def trace(
    args: argparse.Namespace,
    texts: Sequence[tuple[str, str]],
    out: BinaryIO,
    script: Script | None = None,
) -> int:
    """Trace definitions, texts each with a filter, as the options say; return the exit code."""
    check_options(args)
    with Stop() as stop, Progress(is_quiet=args.quiet) as progress:
        with _opened(args, stop, progress) as (session, guest):
            progress("resolving the definitions")
            if guest is not None:
                guest.driver.strategy, guest.driver.way = strategy(args), way(args)
            session.choose_tasks(pids=args.pid or (), comms=args.comm or ())
            for text, filter_text in texts:
                session.probe(
                    text,
                    filter=filter_text,
                    duration=args.has_duration,
                    exits=args.exits,
                )
            if guest is not None:
                guest.driver.tell = guest.handlers.report.tell = _tell
                if not args.quiet:
                    _say_waiting(guest)
                if script is not None:
                    progress("running the handlers' file")
                    script.run(guest)
            stop.check()
            run = _Run(args, session, guest, out)
            run.go(stop, progress)
        # Leaving the guest stops it once more: that counts too.
        summary = run.summary()
    _say(summary, is_quiet=args.quiet)
    return _LOST if args.strict and not summary.is_complete else 0


@contextmanager
def _opened(
    args: argparse.Namespace, stop: Stop, progress: Progress
) -> "Generator[tuple[Tracer, Session | None]]":
    # The session, and once more what only those with guests have.
    if is_host(args):
        progress("reading this machine's symbols and types")
        stop.defer()
        with opened_host(args) as session:
            yield session, None
        return
    with opened(args, stop=stop, progress=progress) as guest:
        yield guest, guest


class _Run:
    def __init__(
        self, args: argparse.Namespace, session: Tracer, guest: "Session | None", out: BinaryIO
    ) -> None:
        self._args = args
        self._session = session
        self._guest = guest
        self._workload = Workload(session.start, args.command) if args.command else None
        self._output = _output(args, session, out)
        self._tally = Tally(self._output, limit=args.max_events)
        self._counts: Counts | None = None
        self._hits: Sequence[Hits] = ()
        self._ending = ""
        self._calls: Sequence[Calls] = ()

    def go(self, stop: Stop, progress: Progress) -> None:
        """Stream until it is over, then end the command and the output."""
        until = Until(
            stop=stop,
            output=self._output,
            tally=self._tally,
            workload=self._workload,
            progress=progress,
            duration_s=self._args.duration or math.inf,
        )
        progress("arming")
        with ExitStack() as undo:
            undo.callback(self._output.close)
            self._counts = self._session.stream(self._tally, is_done=until)
            self._hits = self._session.hits()
            self._end_workload()
            if self._guest is not None:
                self._calls = _calls(self._guest)
        self._output.check()

    def summary(self) -> Summary:
        """Return what was counted."""
        assert self._counts is not None
        counts = self._counts
        stub = None if self._guest is None else self._guest.driver.guest.stub
        return Summary(
            written=self._tally.events,
            faulted=self._tally.faulted,
            probes=self._hits,
            lost=counts.lost,
            damaged=counts.damaged,
            pauses=None if stub is None else (stub.paused_s, stub.stops),
            command=self._ending,
            handlers=self._calls,
        )

    def _end_workload(self) -> None:
        if self._workload is not None:
            finished = self._workload.finish()
            self._ending = self._workload.ending(finished)
            if finished is not None:
                say_bytes(finished.output)


def _output(args: argparse.Namespace, session: Tracer, out: BinaryIO) -> Output:
    stream = out if args.output is None else open_output(args.output)
    if not session.definitions:
        return Output(stream, lambda _: NoEvents(), is_ours=stream is not out)
    sink = FORMATS[args.format]
    origin = replace(session.origin, has_enum_names=args.enum)
    return Output(stream, lambda s: sink(s, origin), is_ours=stream is not out)


def _calls(session: "Session") -> list[Calls]:
    return [
        Calls(
            name=probe.name,
            place=probe.place,
            calls=probe.hits,
            missed=probe.nmissed,
            errors=probe.errors,
        )
        for probe in session.handlers.probes
    ]


def _tell(problem: str) -> None:
    say(f"kprobe: {problem}")


def _say_waiting(session: "Session") -> None:
    for each in session.driver.waiting:
        say(f"{each.event} waits until module {each.place.module} is loaded\n")

    for reason, number in reasons(session.driver.left_out).items():
        say(f"{counted(number, 'function')} left out: {reason}\n")


def reasons(refusals: Sequence[RefusedError]) -> Counter[str]:
    """Count why functions were left out, the most frequent reason first."""
    # Each begins with the function's name.
    texts = (str(each).partition(": ")[2] or str(each) for each in refusals)
    found = Counter(text.removeprefix("its returns cannot be probed: ") for text in texts)
    return Counter(dict(found.most_common()))


def _say(summary: Summary, *, is_quiet: bool) -> None:
    text = summary.losses() if is_quiet else summary.text()
    if text:
        say(text)
