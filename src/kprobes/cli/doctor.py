"""``kprobe doctor``: what this machine and a target can do, and what to install."""

import argparse
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import aligned, counted, json_lines, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kprobes.model.finding import Finding

NAME = "doctor"
HELP = "check what this machine and a target can do, and what to install"
EPILOG = """\
examples:
  kprobe doctor
  kprobe doctor -t host                       # this machine's own kernel, in detail
  kprobe doctor -t qemu:localhost:1234        # the guest too: kernel, types, clock, ...

Exit status: 0 all that is needed is there, 5 something is missing, 2 usage."""
_MARKS = {"ok": "ok", "note": "--", "missing": "NO"}
_PROBLEMS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    options.add_target(parser, can_boot=False)
    options.add_output(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Look at everything; return the exit code."""
    from kprobes.cli.options import AUTO, GUEST, HOST
    from kprobes.cli.terminal import Stop
    from kprobes.host.obstacles import check_host
    from kprobes.inspect.doctor import check_machine, check_target
    from kprobes.model.finding import Severity

    found = [*check_host(is_wanted=args.target == HOST)]
    found += [] if args.target == HOST else check_machine()
    if args.target not in (None, AUTO, GUEST, HOST):
        with Stop() as stop:
            stop.defer()
            found += check_target(args.target)
            stop.check()
    write_text(out, (findings_as_json if args.format == "json" else findings_as_text)(found))
    return _PROBLEMS if any(each.verdict is Severity.MISSING for each in found) else 0


def findings_as_text(findings: "Sequence[Finding]") -> str:
    """Return a line per finding, advice below it, and a last line that sums up."""
    from kprobes.model.finding import Severity

    rows = [(_MARKS[f.verdict], f.subject, f.found) for f in findings]
    lines = aligned(rows).splitlines()
    column = lines[0].index(findings[0].found)
    text = "".join(
        f"{line}\n" + (f"{'':{column}}-> {finding.advice}\n" if finding.advice else "")
        for line, finding in zip(lines, findings, strict=True)
    )
    missing = sum(finding.verdict is Severity.MISSING for finding in findings)
    return text + (
        f"{counted(missing, 'problem')}\n" if missing else "all that is needed is here\n"
    )


def findings_as_json(findings: "Sequence[Finding]") -> str:
    """Return one JSON object per line."""
    from msgspec.structs import asdict

    return json_lines(map(asdict, findings))
