"""Which of the two ways work on rows is done by: Python's and NumPy's, or our C's."""

import pytest

from kprobes.native import library
from kprobes.native.library import function_for
from tools.compile_runtime import NATIVE

PARTS = sorted(NATIVE.glob("*.c"))
"""The C of each part."""


def count_as_few(patch: pytest.MonkeyPatch) -> None:
    """Have all rows count as few."""
    patch.setattr(library, "MANY", 1 << 62)


def count_as_many(patch: pytest.MonkeyPatch) -> None:
    """Have all rows count as many, with every part compiled: nothing else is called then."""
    patch.setattr(library, "MANY", 0)
    for part in PARTS:
        library.load(part.stem)
    assert function_for(0, "records", "records_find", 3) is not None
