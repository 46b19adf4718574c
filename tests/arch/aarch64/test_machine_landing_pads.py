"""Kernels that are compiled so that calls through pointers land on bti, and others."""

import pytest

from kprobes.arch.aarch64.machine import has_landing_pads, listed_sites
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

    assert has_landing_pads(memory.read, [START + site]) == is_guarded


def test_what_is_not_known_is_taken_to_be_guarded() -> None:
    memory = SparseMemory()

    assert has_landing_pads(memory.read, [])
    assert has_landing_pads(memory.read, [START])


def test_a_function_that_nothing_is_before_tells_nothing() -> None:
    memory = SparseMemory({START: code_of(f"{NOP} {NOP} {PACIASP} {NOP} {NOP}")})

    assert not has_landing_pads(memory.read, [START + 4, START + 16])


@pytest.mark.parametrize(
    ("function", "listed", "site"),
    [
        (f"{NOP} {NOP} {PACIASP} {RET} {RET}", 0, 4),
        (f"d503245f {NOP} {NOP} {PACIASP} {RET}", 0, 8),
        (f"{NOP} {NOP} {NOP} {NOP} {PACIASP}", 0, 12),
        (f"{NOP} {NOP} d503245f {NOP} {NOP}", 0, 16),
    ],
)
def test_a_file_lists_the_first_of_the_tracers_words(function: str, listed: int, site: int) -> None:
    memory = SparseMemory({START: code_of(function)})

    assert listed_sites(memory.read, [START + listed]) == [START + site]


def test_nops_of_one_functions_own_are_no_words_before_it() -> None:
    plain, padded = f"{NOP} {NOP} {PACIASP} {RET}", f"{NOP} {NOP} {NOP} {NOP}"
    memory = SparseMemory({START: code_of(f"{plain} {plain} {padded} {plain}")})
    listed = [START, START + 16, START + 32, START + 48]

    assert listed_sites(memory.read, listed) == [at + 4 for at in listed]
