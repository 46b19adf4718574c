"""The guest-side runtime's IR and the C that it was compiled from."""

from pathlib import Path

import pytest

from kprobes.codegen.runtime import part
from tools.compile_runtime import RUNTIME, digest

PARTS = sorted(RUNTIME.glob("*.c"))


@pytest.mark.parametrize("source", PARTS, ids=[path.stem for path in PARTS])
def test_the_ir_of_a_part_was_compiled_from_its_c_as_it_is(source: Path) -> None:
    header = part(source.stem).splitlines()[1]

    assert header == f"; {digest(source)}", "run `make runtime`"
