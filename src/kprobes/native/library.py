"""Our C for this machine: a part's LLVM IR to functions that are called with words.

The IR of each part is beside its C, and `make runtime` makes it. Compiling takes some 0.15 s, and
0.1 s more where LLVM was not imported: it is worth it from some 100,000 rows on. While a function
runs other threads have Python's lock.
"""

import ctypes
import pkgutil
from collections.abc import Callable
from functools import cache

MANY = 1 << 17
"""Rows of a process from which on our C is worth its compilation."""
Function = Callable[..., int]
"""Takes words, which are addresses or numbers, and returns one."""

# No loop becomes a call of the C library.
_ATTRIBUTES = 'attributes #0 = { nounwind "no-builtins" }'


class _Work:
    rows = 0


def is_worth(rows: int) -> bool:
    """Whether so many rows more are for our C: where there were many; they are counted."""
    _Work.rows += rows
    return _Work.rows >= MANY


def function(part: str, name: str, words: int) -> Function:
    """Return a function.

    Args:
        part: that has it.
        name: of it.
        words: that it takes.
    """
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_uint64] * words)(_loaded(part)(name))


def text(part: str) -> str:
    """Return the IR of a part."""
    data = pkgutil.get_data("kprobes.native", f"{part}.ll")
    if data is None:
        raise ValueError(f"{part}.ll is not in the package")
    return data.decode()


@cache
def _loaded(part: str) -> Callable[[str], int]:
    from kprobes import llvm

    return llvm.load(f"{text(part)}\n{_ATTRIBUTES}")
