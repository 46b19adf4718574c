"""ELF files and notes."""

import importlib
import io
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.errors import FormatError
from kprobes.formats import elf
from tests.build.elf import build_id_note, note, vmlinux

ID = bytes(range(1, 21))
FILE = vmlinux([(0x2000, b"data"), (0x1000, b"text")], notes=build_id_note(ID))


def test_a_file_gives_its_segments_by_address_and_its_build_id() -> None:
    image = elf.parse(FILE)

    assert [(s.addr, s.data) for s in image.segments] == [(0x1000, b"text"), (0x2000, b"data")]
    assert (image.machine, image.build_id) == (elf.EM_X86_64, ID)


def test_pyelftools_reads_the_same() -> None:
    library: Any = importlib.import_module("elftools.elf.elffile")
    file = library.ELFFile(io.BytesIO(FILE))

    loads = [s for s in file.iter_segments() if s["p_type"] == "PT_LOAD"]
    (notes,) = (s for s in file.iter_segments() if s["p_type"] == "PT_NOTE")
    (found,) = notes.iter_notes()

    image = elf.parse(FILE)
    assert sorted((s["p_vaddr"], s.data()) for s in loads) == [
        (s.addr, s.data) for s in image.segments
    ]
    assert found["n_desc"] == image.build_id.hex()


def test_a_program_with_an_interpreter_needs_a_loader() -> None:
    dynamic = vmlinux([(0x1000, b"text")], interpreter=b"/lib64/ld-linux-x86-64.so.2\0")

    assert elf.parse(dynamic).needs_loader
    assert not elf.parse(FILE).needs_loader


def test_a_build_id_is_read_of_headers_and_notes_alone() -> None:
    asked = list[int]()

    def reading(data: bytes) -> bytes:
        def read(at: int, size: int) -> bytes:
            asked.append(size)
            return data[at : at + size]

        return elf.noted_build_id(read)

    large = vmlinux([(0x1000, bytes(1 << 20))], notes=build_id_note(ID))

    assert reading(large) == ID
    assert sum(asked) < 1 << 12
    assert reading(vmlinux([(0x1000, b"text")])) == b""
    assert reading(b"\x7fELF") == b""
    for size in range(0, len(FILE), 7):
        assert reading(FILE[:size]) in (b"", ID)


def test_the_build_id_is_found_among_other_notes() -> None:
    notes = note(b"Linux", 1, b"abc") + note(b"GNU", 1, b"ABI tag.") + build_id_note(ID)

    assert elf.build_id(notes) == ID
    assert elf.build_id(note(b"Linux", 3, b"not it")) == b""
    assert elf.build_id(b"") == b""


def test_build_id_notes_are_found_anywhere() -> None:
    data = b"x" * 40 + build_id_note(ID) + b"y" * 7 + build_id_note(ID[::-1]) + b"\x04\0\0\0"

    assert list(elf.build_id_notes(data)) == [(40, ID), (83, ID[::-1])]


def test_segments_are_no_more_than_the_file() -> None:
    # Each would be a copy of nearly all of it.
    many = bytearray(vmlinux([(addr, b"") for addr in range(200)] + [(0, bytes(1 << 20))]))
    for at in range(64, 64 + 56 * 200, 56):
        struct.pack_into("<QQQQ", many, at + 8, 0, 0, 0, 1 << 20)

    with pytest.raises(FormatError, match="damaged"):
        elf.parse(bytes(many))


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF\x01\x01", FILE[:64], FILE[:-1], b"\x7fELF\x02\x01" + bytes(40)]
)
def test_what_is_no_whole_elf_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        elf.parse(data)


@settings(max_examples=100)
@given(place=st.integers(0, len(FILE) - 1), value=st.integers(0, 255))
def test_damage_is_a_format_error_or_an_image(place: int, value: int) -> None:
    data = bytearray(FILE)
    data[place] = value

    try:
        elf.parse(bytes(data))
    except FormatError:
        return


@given(st.binary(max_size=100))
def test_any_bytes_may_stand_where_notes_should(data: bytes) -> None:
    assert len(elf.build_id(data)) <= len(data)
