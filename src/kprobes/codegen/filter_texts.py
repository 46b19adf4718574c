"""Texts in memory beside patterns: constants in the instructions, words where bytes are given."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kprobes.codegen.ir import Function, Value, const
from kprobes.model.filter import Pattern, Piece

_WORDS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text in memory, with a NUL behind it.

    Attributes:
        address: where.
        most: characters that it has at most.
        length: characters that it has, or None where nobody has counted yet.
    """

    address: Value
    most: int
    length: Value | None = None


def emit_match(f: Function, pattern: Pattern, text: Text, targets: tuple[str, str]) -> None:
    """Branch to the first label when a text looks like a pattern, to the second when not."""
    yes, no = targets
    first, *others = pattern.pieces
    if pattern.length > text.most:
        f.jump(no)
        return
    is_first = _is_at(f, first, text.address)
    if not others:
        end = f.load(f.op("add", text.address, len(first)), "i8")
        f.branch(f.op("and", is_first, f.compare("eq", end, 0)), yes, no)
    elif others == [()]:
        f.branch(is_first, yes, no)
    else:
        begins = f.label("begins")
        f.branch(is_first, begins, no)
        f.place(begins)
        _emit_rest(f, pattern, text, targets)


def is_within(f: Function, number: Value, ranges: Sequence[tuple[int, int]]) -> Value:
    """Return whether a number without sign is in one of some ranges."""
    found = const(0, "i1")
    for low, high in ranges:
        found = f.op("or", found, f.compare("ule", f.op("sub", number, low), high - low))
    return found


def _emit_rest(f: Function, pattern: Pattern, text: Text, targets: tuple[str, str]) -> None:
    yes, no = targets
    first, *middle, last = pattern.pieces
    length = text.length or _length(f, text)
    at = const(len(first))
    for piece in filter(None, middle):
        at = _find(f, piece, (text.address, at, length), no)
    tail = f.label("tail")
    f.branch(f.compare("ule", f.op("add", at, len(last)), length), tail, no)
    f.place(tail)
    end = f.op("sub", length, len(last))
    f.branch(_is_at(f, last, f.op("add", text.address, end)), yes, no)


def _find(f: Function, piece: Piece, where: tuple[Value, Value, Value], no: str) -> Value:
    # The leftmost place leaves most to what follows, so no other need be tried.
    address, start, length = where
    fits, found, go_on = f.label("fits"), f.label("found"), f.label("next")
    with f.count_up(start) as at:
        end = f.op("add", at, len(piece))
        f.branch(f.compare("ule", end, length), fits, no)
        f.place(fits)
        f.branch(_is_at(f, piece, f.op("add", address, at)), found, go_on)
        f.place(go_on)
    f.place(found)
    return end


def _length(f: Function, text: Text) -> Value:
    found, go_on = f.label("end"), f.label("next")
    with f.count_up(const(0)) as at:
        is_end = f.compare("eq", f.load(f.op("add", text.address, at), "i8"), 0)
        f.branch(f.op("or", is_end, f.compare("uge", at, text.most)), found, go_on)
        f.place(go_on)
    f.place(found)
    return at


def _is_at(f: Function, piece: Piece, address: Value) -> Value:
    holds = const(1, "i1")
    for at, size, allowed in _parts(piece):
        number = f.load(f.op("add", address, at), f"i{8 * size}")
        if isinstance(allowed, bytes):
            is_it = f.compare("eq", number, int.from_bytes(allowed, "little"))
        else:
            is_it = is_within(f, number, allowed)
        holds = f.op("and", holds, is_it)
    return holds


def _parts(piece: Piece) -> Iterator[tuple[int, int, bytes | Sequence[tuple[int, int]]]]:
    # Bytes that are given come in words, the others one by one.
    at = 0
    while at < len(piece):
        given = _given(piece[at:])
        size = next((size for size in _WORDS if size <= len(given)), 0)
        yield at, size or 1, given[:size] if size else _ranges(piece[at])
        at += size or 1


def _given(piece: Piece) -> bytes:
    found = bytearray()
    for allowed in piece[: _WORDS[0]]:
        if allowed.bit_count() != 1:
            break
        found.append(allowed.bit_length() - 1)
    return bytes(found)


def _ranges(allowed: int) -> Sequence[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for byte in range(256):
        if not allowed >> byte & 1:
            continue
        if found and found[-1][1] == byte - 1:
            found[-1] = (found[-1][0], byte)
        else:
            found.append((byte, byte))
    return found
