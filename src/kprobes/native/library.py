"""Our C for this machine: a part's LLVM IR to functions that are called with words.

The IR of each part is beside its C, and `make runtime` makes it. Compiling takes some 0.1 s, and
0.1 s more where LLVM was not imported: it is worth it where there are many rows. A thread does it:
who empties a guest's rings does not wait meanwhile. While a function runs other threads have
Python's lock.

What was compiled is kept, XDG_CACHE_HOME/kprobes/code/SHA256 of the IR and of what else the code
depends on: the object's own SHA-256, 32 bytes, and the object.
"""

import ctypes
import hashlib
import pkgutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import ClassVar

from kprobes import directories
from kprobes.errors import StateError

MANY = 1 << 19
"""Rows that a process had work with, each as often, from which on our C is worth its compilation:
some 100,000 events."""
_KEPT = 64
"""Files: a part for one CPU and one LLVM each."""
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
            _Parts.functions[part] = llvm.load_native(_object(f"{text(part)}\n{_ATTRIBUTES}"))


def _object(source: str) -> bytes:
    from kprobes import llvm

    root = directories.cache() / "code"
    name = hashlib.sha256(f"{llvm.native_code()}\n{source}".encode()).hexdigest()
    found = _kept(root / name)
    if found is None:
        found = llvm.compile_native(source)
        with suppress(OSError, StateError):
            directories.make(root, top=root.parent)
            directories.replace_own(root / name, hashlib.sha256(found).digest() + found)
            for path in sorted(root.iterdir(), key=lambda each: each.stat().st_mtime)[:-_KEPT]:
                path.unlink(missing_ok=True)
    return found


def _kept(path: Path) -> bytes | None:
    # What somebody else may have written is not run.
    try:
        directories.check(path.parent, top=path.parent.parent)
        with directories.open_own(path) as file:
            digest, found = file.read(hashlib.sha256().digest_size), file.read()
    except (OSError, StateError):
        return None
    return found if hashlib.sha256(found).digest() == digest else None


def text(part: str) -> str:
    """Return the IR of a part."""
    data = pkgutil.get_data("kprobes.native", f"{part}.ll")
    if data is None:
        raise ValueError(f"{part}.ll is not in the package")
    return data.decode()
