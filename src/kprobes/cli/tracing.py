"""One trace from the first connection to the last word: sinks in a row, an end, a summary."""

import argparse
import io
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

from msgspec import Struct
from msgspec.structs import replace

from kprobes.cli.control import Control
from kprobes.cli.counting import Counting
from kprobes.cli.definitions import Script
from kprobes.cli.files import report_ready
from kprobes.cli.options import is_host, limits, return_method, return_option, strategy
from kprobes.cli.output import LimitSink, NoEvents, Output, open_output
from kprobes.cli.summary import Calls, Summary
from kprobes.cli.target import BootWait, WaitedError, check_options, opened, opened_host
from kprobes.cli.terminal import Progress, Stop, counted, print_bytes, print_message
from kprobes.cli.trace import Given
from kprobes.cli.until import Until
from kprobes.cli.until_panic import EndOfLog, LastEvents
from kprobes.cli.workload import Workload
from kprobes.counting import with_trigger
from kprobes.errors import (
    GuestCrashedError,
    GuestGoneError,
    GuestMigratedError,
    GuestShutDownError,
    KprobesError,
    RefusedError,
    UsageError,
)
from kprobes.histogram import Histogram
from kprobes.lang.trigger import names_target
from kprobes.model.definition import Kind
from kprobes.model.events import Counts, Hits
from kprobes.model.options import PAUSE_TIMEOUT_S, Options
from kprobes.model.text_options import TextOptions, text_options
from kprobes.ports import Sink
from kprobes.recording_files import RotatingWriter, SnapshotWriter
from kprobes.recording_writer import FileWriter, RecordingWriter, open_recording
from kprobes.sinks import FORMATS, REBOOT_MARKS
from kprobes.sinks.names import TraceSource
from kprobes.units import MIB

if TYPE_CHECKING:
    # A third of a second to import, which this machine's own kernel does not need.
    from kprobes.driver import Driver
    from kprobes.event_table import TraceProbe
    from kprobes.gdbserver.server import GdbServer
    from kprobes.guest.journal import Boot
    from kprobes.open import AnySession, GuestSession

_LOST = 6
_HANG_S = 10.0
_LATE = (
    "the guest's initcalls are over: how far it has booted can only be told of kernels with "
    "CONFIG_KALLSYMS_ALL"
)
_POLL_S = 0.1
"""Between looks whether a paused guest goes on."""


def trace(
    args: argparse.Namespace,
    texts: Sequence[Given],
    out: BinaryIO,
    script: Script | None = None,
    stop: Stop | None = None,
) -> int:
    """Trace what the options say; return the exit code.

    Args:
        args: the options.
        texts: definitions, with what was given for them.
        out: where events go.
        script: of handlers, or None.
        stop: the user's wish, where there is more to end than this.
    """
    check_options(args)
    with nullcontext(stop) if stop is not None else Stop() as chosen:
        return _Tracer(args=args, texts=texts, out=out, script=script, stop=chosen).trace()


class _Tracer(Struct, kw_only=True):
    """One trace, over all boots of a guest if it is to go on with them.

    Attributes:
        args, texts, out, script, stop: what is traced, and how.
        boots: how many were traced.
        events: of them.
        ends_s: when the trace is over, by ``time.monotonic``.
        crashed: the latest boot, if it crashed: it is still there, and of no use.
        writer: of the recording, where one is wanted and has begun.
    """

    args: argparse.Namespace
    texts: Sequence[Given]
    out: BinaryIO
    script: Script | None
    stop: Stop
    boots: int = 0
    events: int = 0
    ends_s: float = math.inf
    crashed: "Boot | None" = None
    writer: RecordingWriter | None = None

    def trace(self) -> int:
        """Trace boot after boot, or one; return the exit code."""
        try:
            return self._trace()
        finally:
            if self.writer is not None:
                self.writer.close()
                if not self.args.quiet:
                    print_message(f"  {self.args.recording}: {self.writer.size:,} bytes")

    def keep(self) -> RecordingWriter:
        """Return what writes the recording: one, over all boots."""
        if self.writer is None:
            self.writer = _writer(self.args, self.out)
        return self.writer

    def is_full(self) -> bool:
        """Whether the recording has as many bytes as it may have."""
        most = self.args.max_size if self.args.rotate is None else None
        return self.writer is not None and most is not None and self.writer.size >= most

    def _trace(self) -> int:
        while True:
            try:
                return self._trace_boot()
            except (GuestGoneError, GuestCrashedError) as error:
                is_moved = isinstance(error, GuestMigratedError)
                if is_moved or not self.args.rearm or self.stop.is_asked or self.is_over():
                    raise
                print_message(f"kprobe: {error}; probes are armed again when it boots")
            except (KeyboardInterrupt, WaitedError):
                if not self.boots:
                    raise
                # Between two boots, with nothing armed.
                return 0

    def is_over(self) -> bool:
        """Whether its time is over, or its guest."""
        return time.monotonic() >= self.ends_s or self.args.has_ended()

    def left_s(self) -> float:
        """Return how long the next boot may be traced."""
        duration_s: float = self.args.duration or math.inf
        return self.ends_s - time.monotonic() if self.boots else duration_s

    def begin_boot(self) -> None:
        """Note that everything is armed in another boot."""
        self.ends_s = time.monotonic() + self.left_s()
        self.boots += 1

    def _trace_boot(self) -> int:
        args, stop = self.args, self.stop
        # Else its line would be in the middle of what the guest's console says.
        is_quiet = args.quiet or args.has_console
        with Progress(is_quiet=is_quiet) as progress, ExitStack() as undo:
            session = undo.enter_context(self._opened(progress))
            progress("resolving the definitions")
            _define(args, session, self.texts, stop)
            if not args.quiet:
                _print_waiting(session.driver)
            _await_cont(session.driver, stop)
            if self.script is not None:
                progress("running the handlers' file")
                session.handlers.report.warn = _warn
                self.script.run(session)
            stop.check()
            run = _Run(self, session, self._output(session))
            if args.listen is not None:
                run.server = undo.enter_context(session.gdbserver(args.listen))
            try:
                with suppress(GuestShutDownError):
                    run.go(progress)
                # Leaving the guest stops it once more: that counts too.
                undo.close()
            finally:
                summary = run.summary()
                if summary is not None:
                    _print_summary(summary, args)
        if summary is not None and (summary.unwritten or (args.strict and not summary.is_complete)):
            return _LOST
        return run.status if args.exit_status == "command" else 0

    @contextmanager
    def _opened(self, progress: Progress) -> "Generator[AnySession]":
        args = self.args
        if is_host(args):
            progress("reading this machine's symbols and types")
            self.stop.defer()
            with opened_host(args, progress) as host:
                yield host
            return
        waiting = None
        if args.wait or args.rearm:
            waiting = BootWait(is_over=self.is_over, crashed=self.crashed, is_said=args.has_console)
        with opened(args, stop=self.stop, progress=progress, waiting=waiting) as guest:
            if args.boot and not guest.driver.is_early:
                _warn(_LATE)
            _remember_programs(args, guest)
            try:
                yield guest
            except GuestCrashedError:
                self.crashed = guest.driver.boot
                raise

    def _output(self, session: "AnySession") -> Output:
        args, path = self.args, self.args.output
        if args.recording is not None:
            return Output(io.BytesIO(), lambda _: NoEvents(), stop=self.stop)
        stream = self.out if path is None else open_output(path, goes_on=self.boots > 0)
        is_ours = stream is not self.out
        if not session.definitions and args.control is None:
            return Output(stream, lambda _: NoEvents(), is_ours=is_ours, stop=self.stop)
        source = replace(
            session.source,
            has_enum_names=args.enum,
            has_wide_numbers=args.json_numbers == "number",
            is_rebooted=self.boots > 0,
            options=_text_options(args),
        )
        sink = _sink_of(args, source, session)
        output = Output(stream, sink, is_ours=is_ours, stop=self.stop)
        if self.boots and args.counting is None:
            output.mark = REBOOT_MARKS[args.format](session.kernel.release)
        return output


def _text_options(args: argparse.Namespace) -> TextOptions:
    found = text_options(args.text_options)
    return found if args.symfs is None else replace(found, sym_userobj=True)


def _remember_programs(args: argparse.Namespace, guest: "GuestSession") -> None:
    is_shown = args.counting is not None or _text_options(args).sym_userobj
    if (
        not (args.userstacktrace and is_shown)
        or args.recording is not None
        or guest.driver.is_early
    ):
        return
    from kprobes.open import remember_programs

    try:
        remember_programs(guest, args.symfs)
    except KprobesError as error:
        _warn(f"files of programs that have ended are not known: {error}")


def _sink_of(
    args: argparse.Namespace, source: TraceSource, session: "AnySession"
) -> Callable[[BinaryIO], Sink]:
    if args.counting is None:
        return lambda stream: FORMATS[args.format](stream, source)
    from kprobes.cli.histograms import HistogramSink

    counting: Counting = args.counting
    read = session.driver.histogram if session.options.trigger else None
    return lambda stream: HistogramSink(stream, source, counting, read)


def _writer(args: argparse.Namespace, out: BinaryIO) -> RecordingWriter:
    path: Path = args.recording
    if str(path) == "-":
        return FileWriter(out, name="standard output", is_ours=False)
    if args.rotate is not None:
        most, most_s = args.rotate
        return RotatingWriter(path, most=most, most_s=most_s, in_all=args.max_size)
    if args.snapshot is None:
        return open_recording(path)
    writer = SnapshotWriter(
        path,
        most=args.snapshot,
        report=lambda size: print_message(f"kprobe: {path}: {size:,} bytes written"),
    )

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        writer.ask()

    signal.signal(signal.SIGUSR2, ask)
    return writer


def define(args: argparse.Namespace, session: "AnySession", texts: Sequence[Given]) -> None:
    """Define what a command line gives.

    Args:
        args: its options.
        session: where it is defined.
        texts: the definitions, with what was given for them.

    Raises:
        DefinitionError, RefusedError: as of ``Session.probe`` and ``TraceProbe.trigger``.
    """
    later: list[tuple[TraceProbe, str]] = []
    for given in texts:
        now = [each for each in given.triggers if not names_target(each)]
        probe = session.probe(
            given.text,
            filter=given.filter,
            triggers=now,
            enabled=given.is_enabled,
            duration=args.call_duration,
            exits=args.exits,
            tgid=args.record_tgid,
            stacktrace=args.stacktrace,
            userstacktrace=args.userstacktrace,
        )
        later += [(probe, each) for each in given.triggers if each not in now]
    # Another event's definition may stand after that of the trigger.
    for probe, trigger in later:
        probe.trigger(trigger)


def _define(
    args: argparse.Namespace, session: "AnySession", texts: Sequence[Given], stop: Stop
) -> None:
    _check_cpus(args, session.driver)
    session.options = Options(
        strategy=strategy(args),
        return_method=return_method(args),
        limits=limits(args),
        hang_timeout_s=_hang_timeout_s(args),
        until_shutdown=args.until_shutdown,
        tracing_on=not args.tracing_off,
        keeps_end=args.snapshot is not None,
        pause_timeout_s=args.pause_timeout or PAUSE_TIMEOUT_S,
        warn=_warn,
        checkpoint=stop.check,
    )
    session.choose_tasks(
        pids=args.pid or (), comms=args.comm or (), tgids=args.tgid or (), follow=args.follow
    )
    define(args, session, texts)
    _check_returns(args, session)
    if args.counting is not None:
        driver = session.driver
        session.options = with_trigger(
            session.options, args.counting.trigger, driver, driver.layouts
        )


def _hang_timeout_s(args: argparse.Namespace) -> float | None:
    # Whoever keeps the end of a trace wants the guest's.
    is_kept = args.until_panic is not None or (args.snapshot is not None and not is_host(args))
    return args.hang_timeout or _HANG_S if is_kept else None


def _check_cpus(args: argparse.Namespace, driver: "Driver") -> None:
    wanted = max((each[-1] for each in args.cpu or ()), default=0)
    if wanted >= driver.cpus:
        raise UsageError(f"--cpu {wanted}: the kernel has CPUs 0 to {driver.cpus - 1} only")


def _check_returns(args: argparse.Namespace, session: "AnySession") -> None:
    # What --control or a script defines later may have returns.
    if args.control is not None or args.python is not None:
        return
    given = return_option(args)
    if given and not any(each.kind is Kind.RETURN for each in session.definitions):
        raise UsageError(f"{given} is for return probes: define one (r FUNCTION)")


class _Run:
    # One boot of it.

    def __init__(self, tracer: _Tracer, session: "AnySession", output: Output) -> None:
        args = tracer.args
        self._args = args
        self._session = session
        self._tracer = tracer
        self._workload = Workload(session.start, args.command) if args.command else None
        self._output = output
        limit = None if args.max_events is None else args.max_events - tracer.events
        self._limit_sink = LimitSink(self._output, limit=limit)
        self._last: LastEvents | None = None
        if args.until_panic is not None:
            self._last = LastEvents(self._limit_sink, most=args.until_panic)
        self._log: EndOfLog | None = None
        self._counts: Counts | None = None
        self._histogram: Histogram | None = None
        self._histograms: Sequence[Histogram] = ()
        self._hits: Sequence[Hits] = ()
        self._ending = ""
        self._calls: Sequence[Calls] = ()
        self._control = None if args.control is None else Control(args.control, session)
        self.server: GdbServer | None = None

    def go(self, progress: Progress) -> None:
        """Stream until it is over, then end the command and the output."""
        tracer = self._tracer
        until = Until(
            stop=tracer.stop,
            output=self._output,
            limit_sink=self._limit_sink,
            workload=self._workload,
            progress=progress,
            duration_s=tracer.left_s(),
            announce=self._announce,
            control=self._control,
            is_full=tracer.is_full,
            is_counting=self._args.counting is not None,
        )
        progress("arming")
        try:
            self._go(until)
        except GuestCrashedError:
            if self._log is not None:
                self._log.show()
            raise
        finally:
            tracer.events += self._limit_sink.events
        self._output.check()

    def _go(self, until: Until) -> None:
        with ExitStack() as undo:
            undo.callback(self._output.close)
            if self._last is not None:
                undo.callback(self._last.pass_on)
            if self._control is not None:
                undo.callback(self._control.close)
            try:
                self._stream(until)
            except GuestCrashedError:
                # Nobody is there who could end it.
                raise
            except BaseException:
                # On this machine it would run on.
                with suppress(KprobesError):
                    self._end_workload()
                raise
            self._end_workload()

    def _stream(self, until: Until) -> None:
        if self.server is not None and not (self._session.definitions or self._session.probes):
            self._serve(until)
            return
        try:
            keep = None if self._args.recording is None else self._tracer.keep
            self._session.stream(self._last or self._limit_sink, is_done=until, keep=keep)
        except KprobesError:
            # As where the guest was paused meanwhile. One that is gone cannot be asked.
            with suppress(KprobesError):
                if until.has_begun:
                    self._count()
            raise
        self._count()
        if self._session.driver.is_stopped and not self._args.quiet:
            _warn("a trigger has ended the trace")

    def _serve(self, until: Until) -> None:
        # Nothing is recorded: for the debugger alone.
        while not until():
            self._session.driver.check()
            time.sleep(_POLL_S)

    def _count(self) -> None:
        self._hits, self._calls = self._session.hits(), _calls(self._session)
        self._counts = self._session.counts()
        self._histogram = self._session.driver.histogram()
        if self._session.definitions:
            self._histograms = self._session.select().histograms

    @property
    def status(self) -> int:
        """What the command ended with by itself, else 0."""
        return self._workload.status if self._workload is not None else 0

    def summary(self) -> Summary | None:
        """Return what was counted; None before anything was armed, or if nobody can tell."""
        counts, histogram = self._counts, self._histogram
        if counts is None:
            return None
        tables = [*self._histograms, *([] if histogram is None else [histogram])]
        writer = self._tracer.writer
        written = self._limit_sink.events - self._output.unwritten
        return Summary(
            written=written if writer is None else sum(counts.recorded.values()),
            unwritten=self._output.unwritten if self._output.is_late else 0,
            faulted=self._limit_sink.faulted,
            probes=self._hits,
            lost=counts.lost,
            damaged=counts.damaged,
            pauses=self._session.driver.pauses,
            command=self._ending,
            status=self.status if self._ending else None,
            handlers=self._calls,
            counted=0 if histogram is None else histogram.hits,
            # Those that share one have each what it dropped.
            dropped=sum({(t.trigger.name or id(t)): t.dropped for t in tables}.values()),
            histograms=self._histograms,
        )

    def _announce(self) -> None:
        self._tracer.begin_boot()
        if self._last is not None:
            self._log = EndOfLog(self._session)
        # From now on an interrupt ends the trace, and not what must be done at its end.
        self._session.options = replace(self._session.options, checkpoint=lambda: None)
        if not self._args.quiet:
            functions = {hits.function for hits in self._session.hits()}
            functions |= {calls.place for calls in _calls(self._session)}
            tables = self._session.driver.tables_size
            where = f", counting in {tables / MIB:.1f} MiB of the guest" if tables else ""
            is_idle = not (self._session.definitions or self._session.probes)
            number = counted(len(functions), "function")
            traced = "" if is_idle else f"tracing {number}{where}; "
            if self.server is not None:
                print_message(f"gdb -ex 'target remote {self.server.address}' joins")
            print_message(f"{traced}Ctrl-C ends")
        if self._control is not None:
            self._control.start()
        if self._args.ready is not None and self._tracer.boots == 1:
            report_ready(self._args.ready)

    def _end_workload(self) -> None:
        if self._workload is not None:
            finished = self._workload.finish()
            self._ending = self._workload.ending(finished)
            if finished is not None:
                print_bytes(finished.output)


def _calls(session: "AnySession") -> list[Calls]:
    return [
        Calls(name=p.name, place=p.place, calls=p.hits, missed=p.nmissed, errors=p.errors)
        for p in session.probes
    ]


def _warn(problem: str) -> None:
    print_message(f"kprobe: {problem}")


def _await_cont(driver: "Driver", stop: Stop) -> None:
    if driver.is_paused:
        _warn("the guest is paused; probes are armed when it goes on (`cont` in its monitor)")
    while driver.is_paused:
        stop.check()
        time.sleep(_POLL_S)


def _print_waiting(driver: "Driver") -> None:
    for each in driver.waiting:
        print_message(f"{each.event} waits until module {each.place.module} is loaded\n")
    for reason, number in reasons(driver.left_out).items():
        print_message(f"{counted(number, 'function')} left out: {reason}\n")


def reasons(refusals: Sequence[RefusedError]) -> Counter[str]:
    """Count why functions were left out, the most frequent reason first."""
    # Each begins with the function's name.
    texts = (str(each).partition(": ")[2] or str(each) for each in refusals)
    found = Counter(text.removeprefix("its returns cannot be probed: ") for text in texts)
    return Counter(dict(found.most_common()))


def _print_summary(summary: Summary, args: argparse.Namespace) -> None:
    form, path = args.summary
    is_short, is_counting = args.quiet and path is None, args.counting is not None
    text = summary.shown(form, is_short=is_short, is_counting=is_counting)
    if path is not None:
        with open_output(path) as file:
            file.write(text.encode())
    elif text:
        print_message(text)
