"""Programs for the benchmarks: files that a kernel takes, times that are read back."""

import io
import struct

import pytest
from elftools.elf.elffile import ELFFile

from bench.elf_program import DATA, GETPPID, Loop


def test_a_program_is_a_static_file_that_begins_in_its_code() -> None:
    file = ELFFile(io.BytesIO(Loop(step=GETPPID, steps=10).program()))

    code, *zeroes = file.iter_segments()
    assert file.header["e_type"] == "ET_EXEC"
    assert code["p_vaddr"] < file.header["e_entry"] < code["p_vaddr"] + code["p_filesz"]
    assert [segment["p_filesz"] for segment in zeroes] == [0, 0]
    assert zeroes[-1]["p_vaddr"] == DATA


def test_code_that_a_step_calls_comes_last_and_aligned() -> None:
    body = b"\x90\xc3"

    plain = Loop(step="call body", steps=1).program()
    with_body = Loop(step="call body", steps=1, body=body).program()

    assert with_body.endswith(body)
    assert len(with_body) == len(plain) + len(body)


def test_what_a_step_took_is_its_loop_s_share() -> None:
    loop = Loop(step=GETPPID, steps=1000, repeats=2)
    output = struct.pack("<8Q", 1, 999_999_000, 2, 1000, 5, 0, 5, 500_000)

    assert loop.ns_per_step(output) == [2.0, 500.0]


def test_a_program_that_wrote_too_little_is_not_believed() -> None:
    with pytest.raises(ValueError, match="wrote"):
        Loop(step=GETPPID, steps=1).ns_per_step(b"Killed\n")
