r"""The ``print fmt`` of an event's ``format`` file: a format of printk, and C for its values.

    print fmt: "comm=%s pid=%d flags=%s", REC->comm, (int)REC->pid,
        __print_flags(REC->flags, "|", { 1, "A" }, { (1 << 3), "B" })

The format itself is no C: its escapes have been read, so that a quotation mark in it stands as it
is. It ends where what follows has as many values as it has conversions.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from kprobes.errors import FormatError
from kprobes.formats.print_c import PrintExpression, UnknownPrint, parse_values, unescaped

LINE_MAX = 1 << 13
"""Bytes of the kernel's longest line: TRACE_SEQ_BUFFER_SIZE of include/linux/trace_seq.h."""
_TEXT_MAX = 1 << 16
_CONVERSIONS_MAX = 64


class Conversion(Struct, frozen=True, kw_only=True):
    """One conversion of the format with what it prints.

    Attributes:
        text: as it is written.
        flags: those of ``-+ #0`` that it has.
        width, precision: numbers, or what they are computed from; None for none.
        bits: of the number that is printed.
        letter: one of ``diuxXocsp``.
        suffix: the letters after ``%p``.
        value: that is printed.
    """

    text: str
    flags: str
    width: int | PrintExpression | None
    precision: int | PrintExpression | None
    bits: int
    letter: str
    suffix: str
    value: PrintExpression


class PrintFmt(Struct, frozen=True, kw_only=True):
    """What is printed of an event: bytes as they are, and conversions."""

    pieces: tuple[bytes | Conversion, ...]


def parse_print(text: str) -> PrintFmt:
    """Read what stands after ``print fmt:``.

    Raises:
        UnknownPrint: it has what is not known here.
        FormatError: it is no format with values.
    """
    if len(text) > _TEXT_MAX:
        raise UnknownPrint(f"a print fmt of {len(text)} bytes")
    first: FormatError | None = None
    for form, rest in _splits(text.strip()):
        try:
            return _printed(form, parse_values(rest))
        except FormatError as e:
            first = first or e
    raise first or FormatError(f"no print fmt: {text[:40]!r}")


_STRINGS = re.compile(r'(?:"(?:\\.|[^"\\])*"\s*)+', re.DOTALL)
_STRING = re.compile(r'"((?:\\.|[^"\\])*)"', re.DOTALL)
_FORMAT_END = re.compile(r'"(?:, |$)')
_SPLITS_MAX = 8


def _splits(text: str) -> Iterator[tuple[bytes, str]]:
    # The format and its values, as C reads it first, then by each place where it might end.
    strings = _STRINGS.match(text)
    if strings is None:
        return
    rest = text[strings.end() :]
    if not rest or rest.startswith(","):
        yield b"".join(map(unescaped, _STRING.findall(strings[0]))), rest[1:]
    ends = _FORMAT_END.finditer(text, 1)
    for end, _ in zip(ends, range(_SPLITS_MAX), strict=False):
        yield unescaped(text[1 : end.start()]), text[end.end() :]


_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\d+|\*)?(?:\.(?P<precision>\d+|\*|))?"
    r"(?P<length>hh|h|ll|l|L|q|z|Z|t|j)?(?P<letter>p(?P<suffix>[A-Za-z0-9]*)|[diuxXocs%])"
)
_BITS = {None: 32, "hh": 8, "h": 16}


def _printed(form: bytes, values: list[PrintExpression]) -> PrintFmt:
    pieces: list[bytes | Conversion] = []
    left = iter(values)
    text, at, room = form.decode("latin-1"), 0, len(form)
    for found in _CONVERSION.finditer(text):
        pieces.append(_plain(text[at : found.start()]))
        at = found.end()
        if found["letter"] == "%":
            pieces.append(b"%")
            continue
        piece = _conversion(found, left)
        room += sum(each for each in (piece.width, piece.precision) if isinstance(each, int))
        pieces.append(piece)
    pieces.append(_plain(text[at:]))
    if next(left, None) is not None:
        raise FormatError("a print fmt with more values than conversions")
    if room > LINE_MAX or len(pieces) > 2 * _CONVERSIONS_MAX:
        raise UnknownPrint(f"a line of {room} bytes with {len(pieces) // 2} conversions")
    return PrintFmt(pieces=tuple(piece for piece in pieces if piece != b""))


def _plain(text: str) -> bytes:
    if "%" in text:
        raise UnknownPrint(f"the conversion {text[text.index('%') :][:8]!r}")
    return text.encode("latin-1")


def _conversion(found: re.Match[str], values: Iterator[PrintExpression]) -> Conversion:
    width, precision = (
        _value(values) if given == "*" else None if given is None else int(given[:9] or "0")
        for given in (found["width"], found["precision"])
    )
    return Conversion(
        text=found[0],
        flags=found["flags"],
        width=width,
        precision=precision,
        bits=_BITS.get(found["length"], 64),
        letter=found["letter"][0],
        suffix=found["suffix"] or "",
        value=_value(values),
    )


def _value(values: Iterator[PrintExpression]) -> PrintExpression:
    value = next(values, None)
    if value is None:
        raise FormatError("a print fmt with fewer values than conversions")
    return value
