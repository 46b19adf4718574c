"""Findings of a check-up, as lines for people or programs."""

from collections.abc import Sequence
from dataclasses import asdict

from kprobes.cli.words import aligned, counted
from kprobes.drivers.finding import Finding, Verdict
from kprobes.sinks.json_fields import dumps

_MARKS = {Verdict.OK: "ok", Verdict.NOTE: "--", Verdict.MISSING: "NO"}


def as_text(findings: Sequence[Finding]) -> str:
    """Return a line per finding, advice below it, and a last line that sums up."""
    rows = [(_MARKS[f.verdict], f.subject, f.found) for f in findings]
    lines = aligned(rows).splitlines()
    column = lines[0].index(findings[0].found)
    text = "".join(
        f"{line}\n" + (f"{'':{column}}-> {finding.advice}\n" if finding.advice else "")
        for line, finding in zip(lines, findings, strict=True)
    )
    missing = sum(finding.verdict is Verdict.MISSING for finding in findings)
    return text + (
        f"{counted(missing, 'problem')}\n" if missing else "all that is needed is here\n"
    )


def as_json(findings: Sequence[Finding]) -> str:
    """Return one JSON object per line."""
    return "".join(f"{dumps(asdict(finding))}\n" for finding in findings)
