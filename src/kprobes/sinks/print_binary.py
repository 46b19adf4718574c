"""Texts of trace_printk(): the address of a format, and values as vbin_printf() packs them.

    struct bprint_entry {       // kernel/trace/trace_entries.h
        ...;
        unsigned long ip;
        const char *fmt;
        u32 buf[];              // lib/vsprintf.c: numbers, each at a multiple of its size, but one
    };                          // of 8 bytes of 4; strings, up to their NUL

What a pointer leads to, ``%pM`` say, is a string there.
"""

import re
from functools import lru_cache

from kprobes.sinks.names import Names
from kprobes.sinks.print_pointers import address_shown

_CONVERSION = re.compile(
    rb"%(?P<flags>[-+ #0]*)(?P<width>\d+|\*)?(?:\.(?P<precision>\d+|\*|))?"
    rb"(?P<length>hh|h|ll|l|L|q|z|Z|t|j)?(?P<letter>p(?P<suffix>[A-Za-z0-9]*)|[diuxXocs%])"
)
_SIZES = {b"hh": 1, b"h": 2, None: 4}
_SAVED = b"SsxKe"
"""Letters after %p with which the address itself is there."""
_SIGNED = b"di"
_MOST = 1 << 8
"""The widest that a record can make a conversion."""


def binary_text(form: bytes, data: bytes, names: Names) -> bytes:
    """Return what bstr_printf() prints; values that a record has not are 0, and strings empty.

    Args:
        form: the format.
        data: of the record.
        names: of the kernel's symbols.
    """
    values, pieces, at = _Values(data), list[bytes](), 0
    for found in _conversions(form):
        pieces += [form[at : found.start()], _shown(found, values, names)]
        at = found.end()
    return b"".join([*pieces, form[at:]])


@lru_cache(256)
def _conversions(form: bytes) -> tuple[re.Match[bytes], ...]:
    return tuple(_CONVERSION.finditer(form))


class _Values:
    # Of a record, one after the other.
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, size: int, *, is_signed: bool = False) -> int:
        align = min(size, 4)
        begin = -(-self._at // align) * align
        self._at = begin + size
        return int.from_bytes(self._data[begin : self._at], "little", signed=is_signed)

    def text(self) -> bytes:
        found = self._data[self._at :].partition(b"\0")[0]
        self._at += len(found) + 1
        return found


def _shown(found: re.Match[bytes], values: _Values, names: Names) -> bytes:
    letter = found["letter"][:1]
    if letter == b"%":
        return b"%"
    width, precision = (
        values.number(4, is_signed=True)
        if each == b"*"
        else None
        if each is None
        else int(each or 0)
        for each in (found["width"], found["precision"])
    )
    # One below 0 counts as none, and a width as that of what is at the left.
    has_precision = precision is not None and precision >= 0
    flags, tail = found["flags"], b".%d" % _limited(precision or 0) if has_precision else b""
    head = b"" if width is None else b"%d" % _limited(width)
    if letter in b"sp":
        text = values.text() if letter == b"s" else _pointer(found["suffix"], values, names)
        # Neither sign nor zeros are in front of it.
        flags, tail = flags.translate(None, b"+ #0"), tail if letter == b"s" else b""
        return (b"%" + flags + head + tail + b"b") % text
    if letter == b"c":
        return (b"%" + flags.translate(None, b"+ #0") + head + b"c") % values.number(1)
    number = values.number(_SIZES.get(found["length"], 8), is_signed=letter in _SIGNED)
    kind = b"d" if letter in b"diu" else letter
    return (b"%" + flags + head + tail + kind) % number


def _limited(number: int) -> int:
    return max(min(number, _MOST), -_MOST)


def _pointer(suffix: bytes, values: _Values, names: Names) -> bytes:
    if suffix and suffix[0] not in _SAVED:
        return values.text()
    address = values.number(8)
    named = address_shown(suffix.decode()) if suffix[:1] in (b"S", b"s") else None
    return b"%016x" % address if named is None else named(names, address)
