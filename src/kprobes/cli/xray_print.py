"""X-rays as lines of styled pieces: plain text when joined, colours where a terminal shows them.

Styled lines as a terminal shows them.

X-rays as one JSON object; docs/reference/formats/json.md has its members.

X-rays of whole functions with their ways out: marked in the listing, the proof below it.

What an x-ray is to look at, as text: a site, or a range of addresses.
"""

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kprobes.cli.terminal import json_lines
from kprobes.cli.verdicts import exit_as_text, exits_as_object, exits_as_text, proof
from kprobes.errors import TargetError, UsageError
from kprobes.guest.text import Classified
from kprobes.inspect.model import ChangeSource, Detour, FunctionText, Row, Side, TextChange
from kprobes.model.kernel import Symbols, name_of
from kprobes.model.visible import visible
from kprobes.units import U64, Addr

Piece = tuple[str, str]
"""Text and its style, in rich's words; "" for none."""
Line = tuple[Piece, ...]

_BYTES_WIDTH = 7
"""Bytes of an instruction that there is always room for."""
_SIGNS = {Side.BOTH: (" ", ""), Side.IMAGE: ("-", "red"), Side.MEMORY: ("+", "green")}
_STYLES = {
    ChangeSource.OURS: "bold magenta",
    ChangeSource.FTRACE: "bold yellow",
    ChangeSource.KPROBE: "bold yellow",
    ChangeSource.UNKNOWN: "bold red",
}
_NOTE = "cyan"
_DIM = "dim"
_HEAD = "bold"


def as_lines(function_text: FunctionText, *, has_verdicts: bool) -> list[Line]:
    """Return an x-ray for people.

    Args:
        function_text: what was seen.
        has_verdicts: whether each line says if it may carry a probe.
    """
    lines = [*_head(function_text), (), *_text(function_text, has_verdicts=has_verdicts)]
    if function_text.verdict is not None:
        verdict, why = function_text.verdict.verdict, function_text.verdict.why
        lines += [(), (("probe: ", _HEAD), (verdict, _verdict_style(verdict)), (f": {why}", ""))]
    for detour in function_text.detours:
        lines += [(), *_detour(detour)]
    return lines


def part_lines(function_text: FunctionText, *, has_verdicts: bool) -> list[Line]:
    """Return the x-ray of a further part of a function: without what the first has said."""
    head = next(_head(function_text))
    lines = [head, *_text(function_text, has_verdicts=has_verdicts)]
    for detour in function_text.detours:
        lines += [(), *_detour(detour)]
    return lines


def as_text(lines: Sequence[Line]) -> str:
    """Return lines without their styles."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def _head(function_text: FunctionText) -> Iterator[Line]:
    kernel, subject = function_text.kernel, function_text.subject
    at = subject.start if subject.site is None else subject.site
    name = name_of(kernel.symbols, at)
    upto = "" if subject.site is not None else f", {subject.stop - subject.start:,} bytes"
    if function_text.is_running:
        slide = f"KASLR moved it by {kernel.slide:#x}" if kernel.slide else "not moved by KASLR"
        where = f"  {at:#x} in memory, {function_text.linked(at):#x} as linked ({slide}){upto}"
    else:
        where = f"  {at:#x} as linked{upto}"
    yield (name, _HEAD), (where, "")
    image = f"image {function_text.image}" if function_text.image is not None else "no image"
    why = f": {function_text.why_no_image}" if function_text.why_no_image else ""
    what = "" if function_text.is_running else "; no guest: only what is in the file"
    yield ((f"{kernel.release}, {image}{why}{what}", _DIM),)
    if function_text.is_compared:
        is_same = all(row.side is Side.BOTH for row in function_text.rows)
        yield (
            ("image and memory hold the same" if is_same else "- in the image, + in memory", _DIM),
        )


def _text(function_text: FunctionText, *, has_verdicts: bool) -> Iterator[Line]:
    changes, width = list(function_text.changes), _width(function_text.rows)
    for row in function_text.rows:
        while changes and changes[0].start < row.line.next:
            yield _mark(changes.pop(0))
        site = function_text.subject.site
        is_site = site is not None and row.line.addr <= site < row.line.next
        yield (("=>" if is_site else "  ", _HEAD), *_row(row, width, has_verdict=has_verdicts))
    for change in changes:
        yield _mark(change)


def _mark(change: TextChange) -> Line:
    style = _STYLES.get(change.source, "yellow" if change.is_changed else _DIM)
    size = change.stop - change.start
    return ((f"    # {size} byte{'' if size == 1 else 's'}: {change.description}", style),)


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
    if has_verdict and row.verdict is not None:
        pieces.append((f"  [{row.verdict.verdict}]", _verdict_style(row.verdict.verdict)))
        if row.verdict.is_refused:
            pieces.append((f" {row.verdict.why}", _DIM))
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


def as_colors(lines: Sequence[Line]) -> str:
    """Return lines with a terminal's escape sequences."""
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    # No line is broken: a terminal does that itself, and nothing is lost in a pager.
    console = Console(file=out, force_terminal=True, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text.assemble(*((visible(text), style) for text, style in line)))
    return out.getvalue()


def as_json(function_text: FunctionText) -> str:
    """Return an x-ray as a line of JSON."""
    return json_lines([as_object(function_text)])


def as_object(function_text: FunctionText) -> dict[str, Any]:
    """Return an x-ray for JSON; addresses and bytes are hexadecimal strings."""
    kernel, subject = function_text.kernel, function_text.subject
    verdict = function_text.verdict
    return {
        "kernel": kernel.release,
        "image": str(function_text.image) if function_text.image is not None else None,
        "slide": f"{kernel.slide:#x}" if function_text.is_running else None,
        "site": f"{subject.site:#x}" if subject.site is not None else None,
        "name": name_of(kernel.symbols, subject.start if subject.site is None else subject.site),
        "start": f"{subject.start:#x}",
        "stop": f"{subject.stop:#x}",
        "linked": f"{function_text.linked(subject.start):#x}",
        "probe": {"verdict": verdict.verdict, "why": verdict.why} if verdict else None,
        "marks": [_change_as_json(change) for change in function_text.changes],
        "text": [
            _row_as_json(row, is_compared=function_text.is_compared) for row in function_text.rows
        ],
        "detours": [_detour_as_json(detour) for detour in function_text.detours],
    }


def _change_as_json(change: TextChange) -> dict[str, object]:
    return {
        "start": f"{change.start:#x}",
        "stop": f"{change.stop:#x}",
        "author": change.source.value,
        "says": change.description,
        "is_changed": change.is_changed,
        "leads_to": f"{change.leads_to:#x}" if change.leads_to is not None else None,
        "probe": change.probe or None,
    }


def _row_as_json(row: Row, *, is_compared: bool = False) -> dict[str, object]:
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
    if row.verdict is not None:
        found["probe"] = {"verdict": row.verdict.verdict, "why": row.verdict.why}
    return found


def _detour_as_json(detour: Detour) -> dict[str, object]:
    return {
        "title": detour.title,
        "address": f"{detour.addr:#x}",
        "text": [_row_as_json(row) for row in detour.rows],
    }


_END = "its path ends here"


def with_exits(function_text: FunctionText, found: Classified) -> FunctionText:
    """Return an x-ray whose instructions say which of them leave the function, and how."""
    description = _notes(found)
    rows = tuple(_noted(row, description.get(row.line.addr, "")) for row in function_text.rows)
    return replace(function_text, rows=rows)


def exits_as_lines(
    parts: Sequence[FunctionText], found: Classified, *, has_verdicts: bool
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


def exits_as_json(parts: Sequence[FunctionText], found: Classified) -> str:
    """Return a function's x-ray as a line of JSON."""
    whole, *colds = (as_object(with_exits(part, found)) for part in parts)
    return json_lines([whole | {"exits": exits_as_object(found), "cold": colds}])


def _notes(found: Classified) -> dict[Addr, str]:
    description = dict.fromkeys(found.exits.noreturn_sites, _END)
    description |= {each.addr: exit_as_text(found, each) for each in found.exits.exits}
    gap = found.exits.why_not
    if gap is not None:
        before = f"{description[gap.addr]}; " if gap.addr in description else ""
        description[gap.addr] = f"{before}the proof fails here: {gap.why}"
    return description


def _noted(row: Row, description: str) -> Row:
    # Where file and memory differ, it is memory's instruction that was looked at.
    if not description or row.side is Side.IMAGE:
        return row
    return replace(row, note=f"{row.note}; {description}" if row.note else description)


_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|[0-9]+")
_BARE_ADDRESS = re.compile(r"[0-9a-fA-F]{16}")
_PLACE = re.compile(r"(?:(?P<module>[\w-]+):)?(?P<symbol>[A-Za-z_.$][\w.$]*)(?:\+(?P<offset>\w+))?")
_MAX_SIZE = 1 << 16


class Chosen(Struct, frozen=True, kw_only=True):
    """Where an x-ray begins, and where it ends if that was said."""

    start: Addr
    stop: Addr | None = None


def read_place(text: str, symbols: Symbols) -> Chosen:
    """Read ``SYM[+OFF]``, ``MODULE:SYM[+OFF]`` or an address; ``START-END`` or ``START:LEN``.

    Raises:
        UsageError: it is none of them, or a range that ends before it begins or is too long.
        UnknownSymbolError, TargetError: no symbol has this name, or none in that module.
        AmbiguousSymbolError: several have it.
    """
    start, dash, end = text.partition("-")
    if dash and _is_place(start) and _is_place(end):
        return _range(text, _addr(start, symbols), _addr(end, symbols))
    start, colon, size = text.rpartition(":")
    if colon and _NUMBER.fullmatch(size):
        at = _addr(start, symbols)
        return _range(text, at, Addr(at + _number(size)))
    return Chosen(start=_addr(text, symbols))


def _range(text: str, start: Addr, stop: Addr) -> Chosen:
    if not start < stop <= U64:
        raise UsageError(f"{text!r}: the range ends before it begins")
    if stop - start > _MAX_SIZE:
        raise UsageError(f"{text!r}: a range of {stop - start:,} bytes; 64 KiB at most")
    return Chosen(start=start, stop=stop)


def _is_place(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text) or _BARE_ADDRESS.fullmatch(text) or _PLACE.fullmatch(text))


def _addr(text: str, symbols: Symbols) -> Addr:
    if _BARE_ADDRESS.fullmatch(text):
        # As kallsyms and System.map have it.
        return Addr(int(text, 16))
    if _NUMBER.fullmatch(text):
        return Addr(_number(text))
    found = _PLACE.fullmatch(text)
    offset = found["offset"] or "0" if found else ""
    if found is None or not _NUMBER.fullmatch(offset):
        raise UsageError(
            f"invalid place: {text!r} (use SYM, SYM+0x4, 0xADDR, START-END or START:LEN)"
        )
    return Addr(_symbol(found["module"], found["symbol"], symbols) + _number(offset))


def _symbol(module: str | None, name: str, symbols: Symbols) -> int:
    if module is None:
        return symbols.named(name).addr
    in_module = [each for each in symbols.all_named(name) if each.module == module]
    if not in_module:
        raise TargetError(f"no symbol {name!r} in a loaded module {module!r}")
    return in_module[0].addr


def _number(text: str) -> int:
    return int(text, 16 if text[:2] in ("0x", "0X") else 10) & U64
