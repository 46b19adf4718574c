"""kallsyms tables as scripts/kallsyms.c lays them out, release by release."""

import struct
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

Named = tuple[int, str, str]
"""(address, type letter, name)."""

# Free codes stand for common pieces, so that some names need one token and some need many.
PIECES = (b"vfs_", b"read", b"Tvfs_", b"ym", b"_sys_")


class Layout(StrEnum):
    """The order and meaning of the tables."""

    V5_10 = "5.10: relative base, per-CPU absolute, tokens last"
    V6_1 = "6.1 stable: the same with seqs_of_names before the tokens"
    V6_4 = "6.4: offsets after the tokens"
    V6_15 = "6.15: the same, every offset from the base"
    V7 = "7.x: offsets from their own place, 4-byte alignment"


class Tables(Struct, frozen=True, kw_only=True):
    """A piece of read-only data with the tables in it."""

    data: bytes
    names: int
    markers: int
    tokens: int
    token_index: int
    offsets: int


class _Writer:
    def __init__(self, before: bytes, align: int) -> None:
        self.data, self.align = bytearray(before), align

    def put(self, data: bytes) -> int:
        self.data += bytes(-len(self.data) % self.align)
        self.data += data
        return len(self.data) - len(data)


def many(base: int, n: int = 600) -> list[Named]:
    """Enough symbols for several markers, with aliases and names of all sorts."""
    names = [(base + 16 * i, "tTdDrR"[i % 6], f"sym_{i:04x}") for i in range(n)]
    names[0] = (base, "T", "_text")
    names[1] = (base, "T", "_stext")
    names[10] = (base + 160, "T", "vfs_read")
    names[11] = (base + 160, "t", "alias_of_vfs_read")
    names[12] = (base + 192, "T", "x" * 300)
    names[-2] = (base + 16 * n, "T", "_etext")
    names[-1] = (base + 16 * n + 64, "B", "_end")
    return names


def build(
    symbols: Sequence[Named], layout: Layout, *, addr: int, base: int, before: bytes = b"rodata!!"
) -> Tables:
    """Write the tables of symbols in ascending order.

    Args:
        symbols: what they name.
        layout: how.
        addr: where ``data`` will be in memory.
        base: the relative base.
        before: what comes before the tables.
    """
    out = _Writer(before, 4 if layout == Layout.V7 else 8)
    table, index = _tokens()
    names, markers = _names(symbols)
    seqs = bytes(3 * len(symbols))
    places = {"offsets": 0}

    def put_offsets() -> None:
        at = len(out.data) + -len(out.data) % out.align
        places["offsets"] = out.put(_offsets(symbols, layout, addr + at, base))
        if layout != Layout.V7:
            out.put(struct.pack("<Q", base))

    if layout in (Layout.V5_10, Layout.V6_1):
        put_offsets()
    out.put(struct.pack("<I", len(symbols)))
    places["names"] = out.put(names)
    places["markers"] = out.put(markers)
    if layout == Layout.V6_1:
        out.put(seqs)
    places["tokens"] = out.put(table)
    places["token_index"] = out.put(index)
    if layout not in (Layout.V5_10, Layout.V6_1):
        put_offsets()
        out.put(seqs)
    out.put(b"the end!")
    return Tables(data=bytes(out.data), **places)


def _tokens() -> tuple[bytes, bytes]:
    tokens = [bytes([code]) if 32 < code < 127 else b"" for code in range(256)]
    tokens[200 : 200 + len(PIECES)] = PIECES
    starts = [sum(len(token) + 1 for token in tokens[:i]) for i in range(256)]
    return b"".join(token + b"\0" for token in tokens), struct.pack("<256H", *starts)


def _names(symbols: Sequence[Named]) -> tuple[bytes, bytes]:
    codes = {piece: 200 + i for i, piece in enumerate(PIECES)}
    out, markers = bytearray(), list[int]()
    for i, (_, kind, name) in enumerate(symbols):
        if i % 256 == 0:
            markers.append(len(out))
        tokens = _compress((kind + name).encode(), codes)
        n = len(tokens)
        out += bytes([n]) if n < 128 else bytes([n & 0x7F | 0x80, n >> 7])
        out += tokens
    return bytes(out), struct.pack(f"<{len(markers)}I", *markers)


def _compress(name: bytes, codes: dict[bytes, int]) -> bytes:
    tokens, at = bytearray(), 0
    while at < len(name):
        piece = next((p for p in codes if name.startswith(p, at)), name[at : at + 1])
        tokens.append(codes.get(piece, piece[0]))
        at += len(piece)
    return bytes(tokens)


def _offsets(symbols: Sequence[Named], layout: Layout, addr: int, base: int) -> bytes:
    def offset(i: int, value: int) -> int:
        if layout == Layout.V7:
            return value - (addr + 4 * i)
        if layout == Layout.V6_15:
            return value - base
        return value if value < 1 << 31 else base - 1 - value

    words = (offset(i, value) & 0xFFFFFFFF for i, (value, _, _) in enumerate(symbols))
    return b"".join(struct.pack("<I", word) for word in words)
