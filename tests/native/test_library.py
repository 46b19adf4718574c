"""The IR of our C, and the C that it was compiled from."""

from pathlib import Path

import pytest

from kprobes.native.library import text
from tools.compile_runtime import NATIVE, digest

PARTS = sorted(NATIVE.glob("*.c"))


@pytest.mark.parametrize("source", PARTS, ids=[path.stem for path in PARTS])
def test_the_ir_of_a_part_was_compiled_from_its_c_as_it_is(source: Path) -> None:
    assert text(source.stem).splitlines()[1] == f"; {digest(source)}", "run `make runtime`"
