"""X-rays as one JSON object; docs/xray.md has its members."""

from typing import Any

from kprobes.drivers.anatomy import Anatomy, Detour, Mark, Row
from kprobes.model.symbol import name_of
from kprobes.sinks.json_fields import dumps


def as_json(anatomy: Anatomy) -> str:
    """Return an x-ray as a line of JSON."""
    return dumps(as_object(anatomy)) + "\n"


def as_object(anatomy: Anatomy) -> dict[str, Any]:
    """Return an x-ray for JSON; addresses and bytes are hexadecimal strings."""
    kernel, subject = anatomy.kernel, anatomy.subject
    opinion = anatomy.opinion
    return {
        "kernel": kernel.release,
        "image": str(anatomy.image) if anatomy.image is not None else None,
        "slide": f"{kernel.slide:#x}" if anatomy.is_running else None,
        "site": f"{subject.site:#x}" if subject.site is not None else None,
        "name": name_of(kernel.symbols, subject.start if subject.site is None else subject.site),
        "start": f"{subject.start:#x}",
        "stop": f"{subject.stop:#x}",
        "linked": f"{anatomy.linked(subject.start):#x}",
        "probe": {"verdict": opinion.verdict, "why": opinion.why} if opinion else None,
        "marks": [_mark(mark) for mark in anatomy.marks],
        "text": [_row(row, is_compared=anatomy.is_compared) for row in anatomy.rows],
        "detours": [_detour(detour) for detour in anatomy.detours],
    }


def _mark(mark: Mark) -> dict[str, object]:
    return {
        "start": f"{mark.start:#x}",
        "stop": f"{mark.stop:#x}",
        "author": mark.author.value,
        "says": mark.says,
        "is_changed": mark.is_changed,
        "leads_to": f"{mark.leads_to:#x}" if mark.leads_to is not None else None,
        "probe": mark.probe or None,
    }


def _row(row: Row, *, is_compared: bool = False) -> dict[str, object]:
    line = row.line
    found: dict[str, object] = {
        "address": f"{line.addr:#x}",
        "side": row.side.value if is_compared else None,
        "bytes": line.code.hex(),
        "text": line.text,
    }
    if row.name:
        found["name"] = row.name
    if row.note:
        found["note"] = row.note
    if row.opinion is not None:
        found["probe"] = {"verdict": row.opinion.verdict, "why": row.opinion.why}
    return found


def _detour(detour: Detour) -> dict[str, object]:
    return {
        "title": detour.title,
        "address": f"{detour.addr:#x}",
        "text": [_row(row) for row in detour.rows],
    }
