"""A shell pattern as one regular expression over many names that NULs keep apart."""

import re

_ANY = rb"[^\0]"


def to_regex(pattern: str) -> bytes:
    r"""Return the expression for ``*``, ``?``, ``[seq]`` and ``[!seq]``; it matches no NUL.

    What stands between two stars is matched once and never again (atomic groups), as in
    ``fnmatch``: several stars cost no more than one.
    """
    first, *rest = _chunks(pattern)
    if not rest:
        return first
    *middle, last = rest
    between = b"".join(rb"(?>" + _ANY + rb"*?" + chunk + rb")" for chunk in middle)
    return first + between + _ANY + b"*" + last


def _chunks(pattern: str) -> list[bytes]:
    # The expressions between the stars.
    chunks, at = [b""], 0
    while at < len(pattern):
        if pattern[at] == "*":
            chunks.append(b"")
            at += 1
            continue
        chunk, at = _one(pattern, at)
        chunks[-1] += chunk
    return [chunks[0], *(chunk for chunk in chunks[1:-1] if chunk), *chunks[1:][-1:]]


def _one(pattern: str, at: int) -> tuple[bytes, int]:
    # One character's expression, and where the next begins.
    if pattern[at] == "?":
        return _ANY, at + 1
    stop = pattern.find("]", at + 2 + pattern.startswith("[!", at)) if pattern[at] == "[" else -1
    if stop < 0:
        return re.escape(pattern[at].encode()), at + 1
    return _set(pattern[at + 1 : stop]), stop + 1


def _set(inside: str) -> bytes:
    negated = inside.startswith("!")
    body = inside[negated:].encode()
    # A range that runs backwards matches nothing in a shell and is an error in ``re``.
    ranges = re.sub(rb"(.)-(.)", lambda m: m[0] if m[1] <= m[2] else b"", body, flags=re.DOTALL)
    escaped = re.sub(rb"([\\\]\[^&~|])", rb"\\\1", ranges)
    if negated:
        return b"[^\\0" + escaped + b"]"
    return b"[" + escaped + b"]" if escaped else rb"(?!)"
