"""Text of guests for terminals: what they would act on, written out."""


def visible(text: str, *, keep: str = "") -> str:
    """Return a text with control characters, and whatever else is not a picture, as escapes.

    ``\\x1b`` is ESC, ``\\n`` a line's end that is none of ours, ``\\u202e`` turns the direction of
    writing; a byte that is not UTF-8 (``surrogateescape``) is ``\\x9b``, too.

    Args:
        text: any.
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def visible_line(line: bytes) -> bytes:
    """Return a line that ends with a line feed, which alone stays as it is."""
    text = line[:-1].decode(errors="surrogateescape")
    return visible(text).encode() + line[-1:]


def _escape(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:
        return f"\\x{number - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
