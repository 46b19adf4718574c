"""``kprobe convert``: a recording's events in files that other tools read."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli.report import Choice, add_choice, problems
from kprobes.cli.terminal import Stop
from kprobes.errors import KprobesError

if TYPE_CHECKING:
    from kprobes.export import File
    from kprobes.recording import RecordedBoot

NAME = "convert"
HELP = "write the events of a recording for other tools"
USAGE = "kprobe convert [options] FILE OUT"
EPILOG = """\
examples:
  kprobe convert kprobe.rec events.parquet
  kprobe convert reads.rec reads.csv --event 'read*' --cpu 0
  kprobe convert kprobe.rec trace.dat

The suffix of OUT says what is written:
  .dat              trace-cmd's file: `trace-cmd report -i OUT`, KernelShark
  .pftrace          a timeline for Perfetto: pip install 'kprobes[perfetto]'
  .html             a page of statistics that any browser opens offline: pip install 'kprobes[html]'
  .parquet .arrow   a table of each event: pip install 'kprobes[arrow]'
  .csv              likewise
  .ndjson .txt      what `kprobe report` prints
Of tables, one event is one file, several are a directory OUT/event=NAME/, which DuckDB, pandas and
polars read as one.

Exit status: 0 done, 1 the file is damaged (what is whole is written) or no recording, 2 usage,
4 the filter is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="the recording, - for standard input"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="what is written, by its suffix")
    add_choice(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Convert; return the exit code."""
    from kprobes.export import exporter
    from kprobes.recording import opened_recording

    del out
    make = exporter(args.out)
    with Stop() as stop, opened_recording(args.file) as recording:
        for number, boot in enumerate(recording.boots(), 1):
            path = args.out.with_suffix(f".{number}{args.out.suffix}") if number > 1 else args.out
            try:
                _convert(
                    Choice(args, boot.source), boot, make(path, boot.kernel, boot.source), stop
                )
            except OSError as error:
                raise KprobesError(f"cannot write {path}: {error.strerror}") from error
        return problems(args.file, recording)


def _convert(choice: Choice, boot: "RecordedBoot", file: "File", stop: Stop) -> None:
    try:
        for events in boot.rounds:
            file.write(choice.of(events))
            for cpu, count in boot.new_lost():
                file.lose(cpu, count)
            stop.check()
        choice.check()
        file.close()
    except BaseException:
        file.discard()
        raise
