"""Our C for this machine: a part's LLVM IR to functions that are called with words.

The IR of each part is beside its C, and `make runtime` makes it. Compiling takes some 0.1 s, and
0.1 s more where LLVM was not imported: it is worth it where there are many rows. A thread does it:
who empties a guest's rings does not wait meanwhile. While a function runs other threads have
Python's lock.
"""

import ctypes
import pkgutil
import threading
from collections.abc import Callable
from functools import cache
from typing import ClassVar

MANY = 1 << 19
"""Rows that a process had work with, each as often, from which on our C is worth its compilation:
some 100,000 events."""
Function = Callable[..., int]
"""Takes words, which are addresses or numbers, and returns one."""

# No loop becomes a call of the C library.
_ATTRIBUTES = 'attributes #0 = { nounwind "no-builtins" }'


class _Work:
    rows = 0


class _Parts:
    # Those that are compiled, whose code goes with them; and those that are, or are being.
    functions: ClassVar[dict[str, Callable[[str], int]]] = {}
    begun: ClassVar[set[str]] = set()
    lock, compiling = threading.Lock(), threading.Lock()


def function_for(rows: int, part: str, name: str, words: int) -> Function | None:
    """Return a function for so many rows; None where there were few so far, or it is compiled now.

    Args:
        rows: more than there were so far; 0 only asks.
        part: that has it.
        name: of it.
        words: that it takes.
    """
    _Work.rows += rows
    if _Work.rows < MANY:
        return None
    if part in _Parts.functions:
        return function(part, name, words)
    with _Parts.lock:
        is_begun = part in _Parts.begun
        _Parts.begun.add(part)
    if not is_begun:
        threading.Thread(target=load, args=(part,), name=f"kprobes-{part}").start()
    return None


@cache
def function(part: str, name: str, words: int) -> Function:
    """Return a function that there is, or wait for its part to be compiled.

    Args:
        part: that has it.
        name: of it.
        words: that it takes.
    """
    load(part)
    address = _Parts.functions[part](name)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_uint64] * words)(address)


def load(part: str) -> None:
    """Compile a part, where it is not yet."""
    from kprobes import llvm

    with _Parts.compiling:
        if part not in _Parts.functions:
            _Parts.functions[part] = llvm.load(f"{text(part)}\n{_ATTRIBUTES}")


def text(part: str) -> str:
    """Return the IR of a part."""
    data = pkgutil.get_data("kprobes.native", f"{part}.ll")
    if data is None:
        raise ValueError(f"{part}.ll is not in the package")
    return data.decode()
