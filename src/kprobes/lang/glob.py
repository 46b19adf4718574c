"""Text patterns of filters to what they match, as lib/glob.c in the kernel reads them."""

from kprobes.model.filter import Pattern, Piece

ANY = (1 << 256) - 2
"""Every byte but NUL."""


def literal(text: bytes) -> Pattern:
    """Return the pattern of one text."""
    return Pattern(pieces=(tuple(1 << byte for byte in text),))


def glob(text: bytes, *, has_escapes: bool = True) -> Pattern:
    """Return the pattern of a text with ``*``, ``?``, ``[...]`` and ``\\``.

    Args:
        text: without NUL.
        has_escapes: whether a backslash takes the meaning of what follows it, as in the kernel;
            in a shell's pattern without quotes it is a character like others.
    """
    pieces: list[Piece] = []
    piece: list[int] = []
    at = 0
    while at < len(text):
        if text[at : at + 1] == b"*":
            pieces.append(tuple(piece))
            piece = []
            at += 1
            continue
        allowed, at = _one(text, at, has_escapes=has_escapes)
        piece.append(allowed)
    return Pattern(pieces=(*pieces, tuple(piece)))


def matches(pattern: Pattern, text: bytes) -> bool:
    """Whether a text looks like a pattern."""
    first, *others = pattern.pieces
    if not others:
        return len(text) == len(first) and _is_at(first, text, 0)
    *middle, last = others
    if pattern.length > len(text) or not _is_at(first, text, 0):
        return False
    at = len(first)
    for piece in middle:
        # The leftmost place leaves most to what follows.
        places = range(at, len(text) - len(piece) + 1)
        found = next((place for place in places if _is_at(piece, text, place)), None)
        if found is None:
            return False
        at = found + len(piece)
    end = len(text) - len(last)
    return end >= at and _is_at(last, text, end)


def _one(text: bytes, at: int, *, has_escapes: bool) -> tuple[int, int]:
    match text[at : at + 1]:
        case b"?":
            return ANY, at + 1
        case b"[":
            return _class(text, at)
        case b"\\" if has_escapes:
            # At the very end it stands for the NUL after it, which no text holds.
            return (1 << text[at + 1] if at + 1 < len(text) else 0), at + 2
        case _:
            return 1 << text[at], at + 1


def _class(text: bytes, start: int) -> tuple[int, int]:
    # A class that is not closed is the bracket itself.
    is_inverted = text[start + 1 : start + 2] == b"!"
    at = start + 1 + is_inverted
    allowed, is_first = 0, True
    while at < len(text) and (is_first or text[at] != ord("]")):
        low = high = text[at]
        if text[at + 1 : at + 2] == b"-" and text[at + 2 : at + 3] != b"]":
            if at + 2 >= len(text):
                return 1 << ord("["), start + 1
            high = text[at + 2]
            at += 2
        if low <= high:
            allowed |= (1 << high + 1) - (1 << low)
        at, is_first = at + 1, False
    if at >= len(text):
        return 1 << ord("["), start + 1
    return (ANY & ~allowed if is_inverted else allowed), at + 1


def _is_at(piece: Piece, text: bytes, place: int) -> bool:
    part = text[place : place + len(piece)]
    return len(part) == len(piece) and all(
        allowed >> byte & 1 for allowed, byte in zip(piece, part, strict=True)
    )
