"""X-rays as lines of styled pieces: plain text when joined, colours where a terminal shows them."""

from collections.abc import Iterator, Sequence

from kprobes.drivers.anatomy import Anatomy, Author, Detour, Mark, Row, Side
from kprobes.model.symbol import name_of

Piece = tuple[str, str]
"""Text and its style, in rich's words; "" for none."""
Line = tuple[Piece, ...]

_BYTES_WIDTH = 7
"""Bytes of an instruction that there is always room for."""
_SIGNS = {Side.BOTH: (" ", ""), Side.IMAGE: ("-", "red"), Side.MEMORY: ("+", "green")}
_STYLES = {
    Author.OURS: "bold magenta",
    Author.FTRACE: "bold yellow",
    Author.KPROBE: "bold yellow",
    Author.UNKNOWN: "bold red",
}
_NOTE = "cyan"
_DIM = "dim"
_HEAD = "bold"


def as_lines(anatomy: Anatomy, *, has_verdicts: bool) -> list[Line]:
    """Return an x-ray for people.

    Args:
        anatomy: what was seen.
        has_verdicts: whether each line says if it may carry a probe.
    """
    lines = [*_head(anatomy), (), *_text(anatomy, has_verdicts=has_verdicts)]
    if anatomy.opinion is not None:
        verdict, why = anatomy.opinion.verdict, anatomy.opinion.why
        lines += [(), (("probe: ", _HEAD), (verdict, _verdict_style(verdict)), (f": {why}", ""))]
    for detour in anatomy.detours:
        lines += [(), *_detour(detour)]
    return lines


def part_lines(anatomy: Anatomy, *, has_verdicts: bool) -> list[Line]:
    """Return the x-ray of a further part of a function: without what the first has said."""
    head = next(_head(anatomy))
    lines = [head, *_text(anatomy, has_verdicts=has_verdicts)]
    for detour in anatomy.detours:
        lines += [(), *_detour(detour)]
    return lines


def as_text(lines: Sequence[Line]) -> str:
    """Return lines without their styles."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def _head(anatomy: Anatomy) -> Iterator[Line]:
    kernel, subject = anatomy.kernel, anatomy.subject
    at = subject.start if subject.site is None else subject.site
    name = name_of(kernel.symbols, at)
    upto = "" if subject.site is not None else f", {subject.stop - subject.start:,} bytes"
    if anatomy.is_running:
        slide = f"KASLR moved it by {kernel.slide:#x}" if kernel.slide else "not moved by KASLR"
        where = f"  {at:#x} in memory, {anatomy.linked(at):#x} as linked ({slide}){upto}"
    else:
        where = f"  {at:#x} as linked{upto}"
    yield (name, _HEAD), (where, "")
    image = f"image {anatomy.image}" if anatomy.image is not None else "no image"
    why = f": {anatomy.why_no_image}" if anatomy.why_no_image else ""
    what = "" if anatomy.is_running else "; no guest: only what is in the file"
    yield ((f"{kernel.release}, {image}{why}{what}", _DIM),)
    if anatomy.is_compared:
        is_same = all(row.side is Side.BOTH for row in anatomy.rows)
        yield (
            ("image and memory hold the same" if is_same else "- in the image, + in memory", _DIM),
        )


def _text(anatomy: Anatomy, *, has_verdicts: bool) -> Iterator[Line]:
    marks, width = list(anatomy.marks), _width(anatomy.rows)
    for row in anatomy.rows:
        while marks and marks[0].start < row.line.next:
            yield _mark(marks.pop(0))
        site = anatomy.subject.site
        is_site = site is not None and row.line.addr <= site < row.line.next
        yield (("=>" if is_site else "  ", _HEAD), *_row(row, width, has_verdict=has_verdicts))
    for mark in marks:
        yield _mark(mark)


def _mark(mark: Mark) -> Line:
    style = _STYLES.get(mark.author, "yellow" if mark.is_changed else _DIM)
    size = mark.stop - mark.start
    return ((f"    # {size} byte{'' if size == 1 else 's'}: {mark.says}", style),)


def _width(rows: Sequence[Row]) -> int:
    return 3 * max([_BYTES_WIDTH, *(len(row.line.code) for row in rows)])


def _row(row: Row, width: int, *, has_verdict: bool) -> Line:
    sign, style = _SIGNS[row.side]
    line = row.line
    pieces: list[Piece] = [
        (f"{sign} ", style),
        (f"{line.addr:x}  ", style or _DIM),
        (line.code.hex(" ").ljust(width), style or "blue"),
        (f" {line.mnemonic:<7}", style or "bold"),
        (f" {line.operands}" if line.operands else "", style),
    ]
    if row.name:
        pieces.append((f" <{row.name}>", "magenta"))
    if row.note:
        pieces.append((f"  # {row.note}", _NOTE))
    if has_verdict and row.opinion is not None:
        pieces.append((f"  [{row.opinion.verdict}]", _verdict_style(row.opinion.verdict)))
        if row.opinion.is_refused:
            pieces.append((f" {row.opinion.why}", _DIM))
    return tuple(pieces)


def _detour(detour: Detour) -> Iterator[Line]:
    yield ((f"{detour.title}, at {detour.addr:#x}", _HEAD),)
    if not detour.rows:
        yield (("  its memory cannot be read", _DIM),)
    before, width = None, _width(detour.rows)
    for row in detour.rows:
        if before is not None and row.line.addr != before:
            yield (("  ...", _DIM),)
        yield _row(row, width, has_verdict=False)
        before = row.line.next


def _verdict_style(verdict: str) -> str:
    return "red" if verdict == "refuse" else "green"
