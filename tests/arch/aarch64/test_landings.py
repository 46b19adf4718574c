"""Kernels that are compiled so that calls through pointers land on bti, and others."""

import pytest

from kprobes.arch.aarch64.landings import has_landings
from tests.build.a64 import NOP, PACIASP, RET, START, code_of
from tests.build.armed_sites import SparseMemory


@pytest.mark.parametrize(
    ("words", "site", "is_guarded"),
    [
        (f"{RET} d503245f {NOP} {NOP} {PACIASP}", 12, True),
        (f"{RET} {NOP} {NOP} {NOP} {PACIASP}", 12, False),
    ],
)
def test_the_words_before_the_tracer_s_sites_tell(words: str, site: int, is_guarded: bool) -> None:
    memory = SparseMemory({START: code_of(words)})

    assert has_landings(memory.read, [START + site]) == is_guarded


def test_what_is_not_known_is_taken_to_be_guarded() -> None:
    memory = SparseMemory()

    assert has_landings(memory.read, [])
    assert has_landings(memory.read, [START])
