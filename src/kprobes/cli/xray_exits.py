"""X-rays of whole functions with their ways out: marked in the listing, the proof below it."""

from collections.abc import Sequence
from dataclasses import replace

from kprobes.cli.exits import exit_as_text, exits_as_object, exits_as_text, proof
from kprobes.cli.xray_json import as_object
from kprobes.cli.xray_text import Line, as_lines, part_lines
from kprobes.drivers.anatomy import Anatomy, Row, Side
from kprobes.drivers.exits import Classified
from kprobes.sinks.json_fields import dumps
from kprobes.units import Addr

_END = "its path ends here"


def with_exits(anatomy: Anatomy, found: Classified) -> Anatomy:
    """Return an x-ray whose instructions say which of them leave the function, and how."""
    says = _says(found)
    rows = tuple(_noted(row, says.get(row.line.addr, "")) for row in anatomy.rows)
    return replace(anatomy, rows=rows)


def exits_as_lines(
    parts: Sequence[Anatomy], found: Classified, *, has_verdicts: bool
) -> list[Line]:
    """Return a function's x-ray for people.

    Args:
        parts: the function and its ``.cold`` parts.
        found: its ways out.
        has_verdicts: whether each line says if it may carry a probe.
    """
    whole, *colds = (with_exits(part, found) for part in parts)
    lines = as_lines(whole, has_verdicts=has_verdicts)
    for cold in colds:
        lines += [(), *part_lines(cold, has_verdicts=has_verdicts)]
    table = exits_as_text(found, indent="    ").splitlines()
    return [*lines, (), (("exits: ", "bold"), (proof(found), "")), *(((row, ""),) for row in table)]


def exits_as_json(parts: Sequence[Anatomy], found: Classified) -> str:
    """Return a function's x-ray as a line of JSON."""
    whole, *colds = (as_object(with_exits(part, found)) for part in parts)
    return dumps(whole | {"exits": exits_as_object(found), "cold": colds}) + "\n"


def _says(found: Classified) -> dict[Addr, str]:
    says = dict.fromkeys(found.exits.ends, _END)
    says |= {each.addr: exit_as_text(found, each) for each in found.exits.exits}
    gap = found.exits.why_not
    if gap is not None:
        before = f"{says[gap.addr]}; " if gap.addr in says else ""
        says[gap.addr] = f"{before}the proof fails here: {gap.why}"
    return says


def _noted(row: Row, says: str) -> Row:
    # Where file and memory differ, it is memory's instruction that was looked at.
    if not says or row.side is Side.IMAGE:
        return row
    return replace(row, note=f"{row.note}; {says}" if row.note else says)
