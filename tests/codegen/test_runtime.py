"""The guest-side runtime's IR and the C that it was compiled from."""

import pytest

from kprobes.codegen.runtime import part
from tools.compile_runtime import DIRECTORY, digest

PARTS = sorted(path.stem for path in DIRECTORY.glob("*.c"))


@pytest.mark.parametrize("name", PARTS)
def test_the_ir_of_a_part_was_compiled_from_its_c_as_it_is(name: str) -> None:
    header = part(name).splitlines()[1]

    assert header == f"; {digest(name)}", "run `make runtime`"
