"""``kprobe convert``: a recording's events in files that other tools read."""

import argparse
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli.report import Choice, add_choice, problems
from kprobes.cli.terminal import Stop
from kprobes.errors import KprobesError, UsageError

if TYPE_CHECKING:
    from kprobes.export import File, Peer, SeveralFiles
    from kprobes.model.events import Events
    from kprobes.open_recording import EventFile
    from kprobes.recording import RecordedBoot
    from kprobes.timeline import Shift

NAME = "convert"
HELP = "write the events of recordings for other tools"
USAGE = "kprobe convert [options] FILE... OUT"
EPILOG = """\
examples:
  kprobe convert kprobe.rec events.parquet
  kprobe convert reads.rec reads.csv --event 'read*' --cpu 0
  kprobe convert kprobe.rec reads.rec both.zip

The suffix of OUT says what is written:
  .dat              trace-cmd's file: `trace-cmd report -i OUT`, KernelShark
  .pftrace          a timeline for Perfetto: pip install 'kprobes[perfetto]'
  .html             a page of statistics that any browser opens offline: pip install 'kprobes[html]'
  .parquet .arrow   a table of each event: pip install 'kprobes[arrow]'
  .csv              likewise
  .ndjson .txt      what `kprobe report` prints
Of tables, one event is one file, several are a directory OUT/event=NAME/, which DuckDB, pandas and
polars read as one.

Several recordings, as of several machines, are put on one timeline:
  .dat              a directory of a file each: `trace-cmd report -i OUT/A.dat -i OUT/B.dat`
  .zip              one file for Perfetto, in which each is a machine
How their clocks are related was found out while they were recorded: it is told by how much times
are shifted, and how wrong that may be. Times, also of --from and --to, are those of the first.

Exit status: 0 done, 1 the file is damaged (what is whole is written) or no recording, 2 usage,
4 the filter is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "file",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="the recording, - for standard input; or several, for .dat or .zip",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="what is written, by its suffix")
    add_choice(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Convert; return the exit code."""
    from kprobes.export import SEVERAL, SUFFIXES

    del out
    is_of_several = len(args.file) > 1 or args.out.suffix in SEVERAL.keys() - SUFFIXES.keys()
    with Stop() as stop:
        return _convert_several(args, stop) if is_of_several else _convert_one(args, stop)


def _convert_one(args: argparse.Namespace, stop: Stop) -> int:
    from kprobes.cli.output import check_apart
    from kprobes.export import exporter
    from kprobes.open_recording import opened_recording

    make, (file,) = exporter(args.out), args.file
    check_apart(file, args.out)
    with opened_recording(file) as recording:
        _check(recording, file, args.out)
        for number, boot in enumerate(recording.boots(), 1):
            path = args.out.with_suffix(f".{number}{args.out.suffix}") if number > 1 else args.out
            with _written(path):
                _convert(
                    Choice(args, boot.source), boot, make(path, boot.kernel, boot.source), stop
                )
        return problems(file, recording)


def _convert_several(args: argparse.Namespace, stop: Stop) -> int:
    from kprobes.cli.several import named, shifts_of
    from kprobes.export import Peer, several_exporter

    make, recordings = several_exporter(args.out), named(args.file)
    names = _file_names(args.file)
    if any(path.resolve().is_relative_to(args.out.resolve()) for path in args.file):
        raise UsageError(f"{args.out} would take the place of what is read")
    with _written(args.out):
        files = make(args.out)
        try:
            shifts = shifts_of(recordings, stop).values()
            peers = [Peer(name=n, shift=shift) for n, shift in zip(names, shifts, strict=True)]
            # One whose clock is that of all goes first.
            pairs = sorted(zip(args.file, peers, strict=True), key=_is_shifted)
            codes = [_add(args, path, peer, files, stop) for path, peer in pairs]
            files.close()
        except BaseException:
            files.discard()
            raise
    return max(codes)


def _is_shifted(pair: "tuple[Path, Peer]") -> bool:
    return pair[1].shift is not None


def _file_names(paths: Sequence[Path]) -> list[str]:
    # Of files that are written: as short as they can be to differ.
    from kprobes.sinks.json import valid_text

    short = [path.absolute().stem for path in paths]
    long = [str(path).removesuffix(path.suffix).strip("/").replace("/", "-") for path in paths]
    for names in (short, long):
        if len(set(names)) == len(names):
            return [valid_text(os.fsencode(name)) for name in names]
    raise UsageError("files of two recordings would have one name: rename one of them")


def _add(
    args: argparse.Namespace, path: Path, peer: "Peer", files: "SeveralFiles", stop: Stop
) -> int:
    from kprobes.open_recording import opened_recording

    with opened_recording(path) as recording:
        _check(recording, path, args.out)
        boot = next(recording.boots())
        file = files.add(peer, boot.kernel, boot.source)
        _convert(Choice(args, boot.source), boot, file, stop, peer.shift)
        return problems(path, recording)


def _check(recording: "EventFile", path: Path, out: Path) -> None:
    if not recording.is_ours and out.suffix == ".dat":
        raise UsageError(
            f"{path} is no recording of kprobe: only those become .dat; trace-cmd has `trace-cmd "
            "convert` and `trace-cmd split` for its own"
        )


@contextmanager
def _written(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise KprobesError(f"cannot write {path}: {error.strerror}") from error


def _convert(
    choice: Choice,
    boot: "RecordedBoot",
    file: "File",
    stop: Stop,
    shift: "Shift | None" = None,
) -> None:
    try:
        for events in boot.rounds:
            file.write(_chosen(choice, events, shift))
            for cpu, count in boot.new_lost():
                file.lose(cpu, count)
            stop.check()
        choice.check()
        file.close()
    except BaseException:
        file.discard()
        raise


def _chosen(choice: Choice, events: "Events", shift: "Shift | None") -> "Events":
    # By the first recording's time, with times of its own.
    from msgspec.structs import replace

    from kprobes.timeline import shifted

    (moved,) = shifted(iter((events,)), shift)
    return replace(choice.of(moved), batches=events.batches)
