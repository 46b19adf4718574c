"""The names that a kernel exports to modules, found by their looks.

    struct kernel_symbol { int value_offset, name_offset, namespace_offset; };   // linux/export.h

Each offset counts from itself; the names are strings nearby. Written down in kernel/module.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

_MAX_PLACES = 16


def find(data: bytes, addr: int, names: Iterable[str]) -> Mapping[str, int]:
    """Return the addresses of those names that are exported.

    Args:
        data: a kernel's read-only data, aligned to words.
        addr: where it is.
        names: to look for.
    """
    words = np.frombuffer(data, "<i4", len(data) // 4)
    targets = words + 4 * np.arange(len(words), dtype=np.int64)
    found = ((name, _value(data, words, targets, name)) for name in names)
    return {name: addr + value for name, value in found if value is not None}


def _value(data: bytes, words: np.ndarray, targets: np.ndarray, name: str) -> int | None:
    for place in _places(data, name):
        for at in np.flatnonzero(targets == place).tolist():
            if at:
                return 4 * (at - 1) + int(words[at - 1])
    return None


def _places(data: bytes, name: str) -> Iterator[int]:
    text = re.compile(rb"(?<=\0)" + re.escape(name.encode()) + rb"\0")
    for number, match in enumerate(text.finditer(data)):
        if number == _MAX_PLACES:
            return
        yield match.start()
