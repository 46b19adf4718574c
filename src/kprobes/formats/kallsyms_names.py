"""kallsyms' compressed names: the token tables and the stream they expand.

    u8 names[];             // per symbol: its length in tokens, then the tokens. A length of
                            // 128 and more takes two bytes, 7 bits each, low ones first
                            // (since 73bbb94466fd ("kallsyms: support "big" kernel symbols"), v6.1)
    u32 markers[];          // where in names every 256th symbol begins
    char token_table[];     // 256 strings with their NULs; the first letter of a symbol is its type
    u16 token_index[256];   // where in token_table each begins

Written down in the kernel's scripts/kallsyms.c.
"""

import re

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import FormatError

CHUNK = 256
"""Symbols between two markers."""
MAX_NAME = 1024
"""Beyond KSYM_NAME_LEN, 512 since v6.1."""

_TOKENS = 256
_DIGITS = b"".join(b"%d\0" % digit for digit in range(10))
_MAX_TOKEN_TABLE = 1 << 16
_MAX_CANDIDATES = 64
_MAX_BYTES = 1 << 28

Bytes = NDArray[np.uint8]


class Tokens(Struct, frozen=True, kw_only=True, eq=False):
    """The token tables found in an image.

    Attributes:
        start: where the token table begins in the image.
        stop: the first byte after the token index.
        table: the token table.
        index: int64 (256,), where in ``table`` each token begins.
        sizes: int64 (256,), of each token without its NUL.
    """

    start: int
    stop: int
    table: bytes
    index: NDArray[np.int64]
    sizes: NDArray[np.int64]


class Expanded(Struct, frozen=True, kw_only=True, eq=False):
    """Names in full.

    Attributes:
        blob: every name between two NULs, in table order.
        starts: uint32 (n,), where in ``blob`` each begins.
        types: nm's letter of each.
    """

    blob: bytes
    starts: NDArray[np.uint32]
    types: bytes


def find_tokens(data: bytes) -> list[Tokens]:
    """Return every pair of token table and token index in an image that agree."""
    found: list[Tokens] = []
    for count, match in enumerate(re.finditer(re.escape(_DIGITS), data)):
        if count == _MAX_CANDIDATES:
            break
        found += _tokens_around(data, match.start())
    return found


def _tokens_around(data: bytes, zero: int) -> list[Tokens]:
    # Digits stand for themselves, so the token "0" is number 48 and 208 tokens begin with it.
    window = np.frombuffer(data[zero : zero + _MAX_TOKEN_TABLE], np.uint8)
    nuls = np.flatnonzero(window == 0)[: _TOKENS - ord("0")]
    if len(nuls) < _TOKENS - ord("0"):
        return []
    end = zero + int(nuls[-1]) + 1
    # The alignment is 8 bytes up to 6.x, and 4 in 7.x.
    places = {end + -end % 4, end + -end % 8}
    found = (_tokens_at(data, zero, end, at) for at in sorted(places))
    return [tokens for tokens in found if tokens is not None]


def _tokens_at(data: bytes, zero: int, end: int, index_at: int) -> Tokens | None:
    if index_at + 2 * _TOKENS > len(data):
        return None
    index = np.frombuffer(data, "<u2", _TOKENS, index_at).astype(np.int64)
    start = zero - int(index[ord("0")])
    if start < 0:
        return None
    table = data[start:end]
    nuls = np.flatnonzero(np.frombuffer(table, np.uint8) == 0)
    if len(nuls) != _TOKENS or index[0] != 0 or np.any(nuls[:-1] + 1 != index[1:]):
        return None
    stop = index_at + 2 * _TOKENS
    return Tokens(start=start, stop=stop, table=table, index=index, sizes=nuls - index)


def walk(names: Bytes, markers: NDArray[np.int64], n: int) -> NDArray[np.int64] | None:
    """Return where every symbol begins, or None when markers and names differ.

    All chunks are walked in lockstep: 256 steps of array operations, not ``n`` of Python.

    Args:
        names: shape (bytes,), the stream.
        markers: shape (chunks,), where each chunk begins in it.
        n: symbols.

    Returns:
        A new column, shape (n + 1,): where each symbol begins, and where the last ends.
    """
    at = markers.copy()
    places = np.empty((CHUNK, len(markers)), np.int64)
    end = len(names) - 2
    for step in range(CHUNK):
        places[step] = at
        at = np.minimum(at, end)
        at = at + 1 + _sizes(names, at)
    order = places.T.ravel()
    if np.any(at[:-1] != markers[1:]) or np.any(order[:n] >= end):
        return None
    last = int(order[n - 1])
    return np.append(order[:n], last + 1 + _sizes(names, np.array([last])))


def _sizes(names: Bytes, at: NDArray[np.int64]) -> NDArray[np.int64]:
    # Bytes after the first length byte.
    first = names[at].astype(np.int64)
    is_big = first >= 128
    if not is_big.any():
        return first
    return first + is_big * (1 - 128 + (names[at + 1].astype(np.int64) << 7))


def expand(names: Bytes, places: NDArray[np.int64], tokens: Tokens) -> Expanded:
    """Turn compressed names into one blob, a copy.

    Args:
        names: shape (bytes,), the stream.
        places: shape (n + 1,), from ``walk``.
        tokens: its tables.

    Raises:
        FormatError: a name is longer than any kernel's.
    """
    stream = names[: places[-1]]
    starts, sizes = tokens.index[stream], tokens.sizes[stream]
    lengths = places[:-1]
    is_big = stream[lengths] >= 128
    first = lengths + 1 + is_big
    if np.any(first >= places[1:]):
        raise FormatError("kallsyms: a symbol without a name")
    # The length becomes the NUL before the name, the type letter goes to a column of its own.
    starts[lengths], sizes[lengths] = tokens.sizes[0], 1
    sizes[lengths[is_big] + 1] = 0
    types = np.frombuffer(tokens.table, np.uint8)[starts[first]]
    if np.any(sizes[first] == 0):
        raise FormatError("kallsyms: a symbol without a type")
    starts[first] += 1
    sizes[first] -= 1
    out = np.cumsum(sizes)
    name_starts = out[lengths]
    longest = int(np.diff(name_starts, append=out[-1] + 1).max())
    if longest > MAX_NAME or out[-1] > _MAX_BYTES:
        raise FormatError(f"kallsyms: a name of {longest} bytes")
    blob = _gather(tokens.table, starts, sizes, out)
    return Expanded(blob=blob + b"\0", starts=name_starts.astype(np.uint32), types=types.tobytes())


def _gather(
    table: bytes,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    out: NDArray[np.int64],
) -> bytes:
    # Byte i of the output is byte i + shift of the table, one shift per token.
    shift = (starts - (out - sizes)).astype(np.int32)
    index = np.repeat(shift, sizes)
    index += np.arange(len(index), dtype=np.int32)
    return np.frombuffer(table, np.uint8)[index].tobytes()
