"""Numbers as the kernel's kstrtoul and kstrtol read them: whole words, base by prefix, 64 bits."""

import re

from kprobes.units import U64

# lib/kstrtox.c takes 0x only before a hex digit and every other leading 0 for octal, so "0x"
# and "08" are no numbers.
_DIGITS = ((16, re.compile(r"0[xX]([0-9a-fA-F]+)")), (8, re.compile(r"(0[0-7]*)")))
_DECIMAL = re.compile(r"[0-9]+")
_S64_MAX = U64 >> 1


def read_unsigned(text: str, *, most: int = U64) -> int | None:
    """Return 0 to ``most``, or None when the text is no such number; one ``+`` may lead."""
    return _bounded(_magnitude(text.removeprefix("+")), most)


def read_signed(text: str) -> int | None:
    """Return a signed 64-bit number, or None when the text is none; one sign may lead."""
    if not text.startswith("-"):
        return _bounded(_magnitude(text.removeprefix("+")), _S64_MAX)
    magnitude = _bounded(_magnitude(text[1:]), _S64_MAX + 1)
    return None if magnitude is None else -magnitude


def read_decimal(text: str) -> int | None:
    """Return 0 to 2**64-1 from decimal digits alone, or None; a leading 0 means nothing."""
    return _bounded(_in_base(text, 10), U64) if _DECIMAL.fullmatch(text) else None


def read_plain(text: str) -> int | None:
    """Return 0 to 2**64-1 from a number without a sign, as simple_strtoul reads it, or None."""
    return _bounded(_magnitude(text), U64)


def _magnitude(text: str) -> int | None:
    for base, pattern in _DIGITS:
        if found := pattern.fullmatch(text):
            return _in_base(found[1], base)
    is_decimal = _DECIMAL.fullmatch(text) and not text.startswith("0")
    return _in_base(text, 10) if is_decimal else None


def _in_base(text: str, base: int) -> int:
    # Python refuses to convert thousands of decimal digits; no 64-bit number has more than 22.
    digits = text.lstrip("0") or "0"
    return int(digits, base) if len(digits) <= 22 else U64 + 1


def _bounded(value: int | None, most: int) -> int | None:
    return value if value is not None and value <= most else None
