"""Pages of the kernel's trace rings: built, and read slowly, one record after the other."""

import struct
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.formats.ftrace import PageFormat

PAGE = PageFormat(size=4096, data=16, commit=8)
U64 = (1 << 64) - 1


class Record(Struct, frozen=True):
    """One record of a page.

    ``kind`` is ``data``, ``long`` (data whose length stands in a word of its own), ``discarded``,
    ``extend`` or ``stamp``; of the last two, ``delta`` may have 59 bits.
    """

    delta: int
    data: bytes = b""
    kind: str = "data"

    def packed(self) -> bytes:
        """Return the record's bytes."""
        low = (self.delta & (1 << 27) - 1) << 5
        match self.kind:
            case "data":
                assert len(self.data) % 4 == 0 < len(self.data) <= 112
                return struct.pack("<I", low | len(self.data) // 4) + self.data
            case "long":
                return struct.pack("<II", low, len(self.data) + 4) + self.data
            case "discarded":
                return struct.pack("<II", low | 29, len(self.data) + 4) + self.data
            case _:
                kind = 30 if self.kind == "extend" else 31
                return struct.pack("<II", low | kind, self.delta >> 27)


def page(
    stamp: int, records: Iterable[Record], *, lost: int | None = None, form: PageFormat = PAGE
) -> bytes:
    """Return a page; with ``lost`` it says that so many events are missing before it."""
    data = b"".join(record.packed() for record in records)
    commit = len(data)
    if lost is not None:
        commit |= 3 << 30
        data += struct.pack("<Q", lost)
    return (struct.pack("<QQ", stamp, commit) + data).ljust(form.size, b"\xee")


def pages(*whole: bytes) -> NDArray[np.uint8]:
    """Return pages as the decoder takes them."""
    return np.frombuffer(b"".join(whole), np.uint8).reshape(-1, PAGE.size)


class Found(Struct, frozen=True):
    """A data record as the reference reads it."""

    page: int
    at: int
    size: int
    ts: int


def slowly(data: NDArray[np.uint8], form: PageFormat = PAGE) -> Iterator[Found]:
    """Read pages record by record; ``at`` counts from the first page's beginning."""
    for number, one in enumerate(data):
        yield from _page(one.tobytes(), number, form)


def _page(one: bytes, number: int, form: PageFormat) -> Iterator[Found]:
    first, commit = struct.unpack_from("<QI", one)
    ts, at, end = first, form.data, form.data + (commit & 0xFFFFF)
    while at < end:
        (head,) = struct.unpack_from("<I", one, at)
        kind, delta = head & 31, head >> 5
        told = struct.unpack_from("<I", one, at + 4)[0] if at + 8 <= end else 0
        begin, size = at + 4, 4 * kind
        match kind:
            case 0:
                begin, size = at + 8, told - 4
                ts += delta
            case 29 if delta == 0:
                return
            case 29:
                size = told
                ts += delta
            case 30:
                size = 4
                ts += delta | told << 27
            case 31:
                size = 4
                ts = _whole(delta | told << 27, first)
            case _:
                ts += delta
        if kind < 29:
            yield Found(number, number * form.size + begin, size, ts & U64)
        at = begin + size


def _whole(stamp: int, page_stamp: int) -> int:
    top = page_stamp >> 59 << 59
    whole = top | stamp & (1 << 59) - 1
    return whole + (1 << 59) if top and whole < page_stamp else whole
