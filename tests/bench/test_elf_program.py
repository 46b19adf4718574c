"""Programs for the benchmarks: files that a kernel takes, times that are read back."""

import io
import struct

import pytest
from elftools.elf.elffile import ELFFile

from bench.amd64 import AMD64
from bench.arm64 import ARM64
from bench.elf_program import DATA, Loop
from bench.in_user_space import loop
from bench.isa import Isa

ISAS = (AMD64, ARM64)
MACHINES = {"amd64": "EM_X86_64", "arm64": "EM_AARCH64"}


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_a_program_is_a_static_file_that_begins_in_its_code(isa: Isa) -> None:
    program = Loop(isa=isa, step=isa.programs.getppid, steps=10, repeats=300, cpus=2).program()

    file = ELFFile(io.BytesIO(program))

    code, *zeroes = file.iter_segments()
    assert (file.header["e_type"], file.header["e_machine"]) == ("ET_EXEC", MACHINES[isa.name])
    assert code["p_vaddr"] < file.header["e_entry"] < code["p_vaddr"] + code["p_filesz"]
    assert [segment["p_filesz"] for segment in zeroes] == [0, 0]
    assert zeroes[-1]["p_vaddr"] == DATA


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_code_that_a_step_calls_comes_last_and_aligned(isa: Isa) -> None:
    body = b"\x90\xc3\0\0"

    plain = Loop(isa=isa, step=isa.alone.call, steps=1).program()
    with_body = Loop(isa=isa, step=isa.alone.call, steps=1, body=body).program()

    assert with_body.endswith(body)
    assert len(with_body) == len(plain) + len(body)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_code_alone_is_called_where_it_is(isa: Isa) -> None:
    nothing = loop(isa, None, steps=1, repeats=1)
    something = loop(isa, lambda place: place.to_bytes(8, "little"), steps=1, repeats=1)

    assert nothing.body == b""
    assert int.from_bytes(something.body, "little") % 64 == 0
    assert something.step == nothing.step + isa.alone.call


@pytest.mark.parametrize(("steps", "hits"), [(1000, 1), (2, 500)])
def test_what_a_hit_took_is_its_loop_s_share(steps: int, hits: int) -> None:
    loop = Loop(isa=AMD64, step=AMD64.programs.getppid, steps=steps, hits=hits, repeats=2)
    output = struct.pack("<8Q", 1, 999_999_000, 2, 1000, 5, 0, 5, 500_000)

    assert loop.ns_per_hit(output) == [2.0, 500.0]
    assert loop.total == 2000


def test_a_program_that_wrote_too_little_is_not_believed() -> None:
    with pytest.raises(ValueError, match="wrote"):
        Loop(isa=AMD64, step=AMD64.programs.getppid, steps=1).ns_per_hit(b"Killed\n")
