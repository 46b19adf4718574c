"""Lines of assembly, against objdump's and by their facts."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kprobes.arch.insn import Syntax
from kprobes.arch.x86_64.disasm import list_code
from tests.build.text import START, to

SITE = "0f1f440000"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (SITE, "nopl 0x0(%rax,%rax,1)"),
        (f"e8{to(START + 0x100, 5)}", f"call {START + 0x100:#x}"),
        ("488b4318", "mov 0x18(%rbx),%rax"),
        ("488b03", "mov (%rbx),%rax"),
        ("4883e4f8", "and $-0x8,%rsp"),
        ("48c7c700100081", "mov $0xffffffff81001000,%rdi"),
        ("4a8b04ed00000082", "mov 0xffffffff82000000(,%r13,8),%rax"),
        ("65488b0425c0fb0100", "mov %gs:0x1fbc0,%rax"),
        ("c3", "ret"),
    ],
)
def test_operands_are_written_as_objdump_writes_them(code: str, text: str) -> None:
    (line,) = list_code(bytes.fromhex(code), START)

    assert line.text == text


def test_intel_s_syntax_can_be_had() -> None:
    (line,) = list_code(bytes.fromhex("488b4318"), START, Syntax.INTEL)

    assert line.text == "mov rax,[rbx+0x18]"


def test_what_a_line_names_is_told_beside_its_text() -> None:
    code = f"e8{to(START + 0x100, 5)}488b0510000000 48c7c700100081 65488b0425c0fb0100 488b03"

    call, relative, constant, per_cpu, plain = list_code(bytes.fromhex(code), START)

    assert call.target == START + 0x100
    assert relative.place == relative.next + 0x10
    assert constant.value == 0xFFFF_FFFF_8100_1000
    assert (per_cpu.per_cpu, per_cpu.place) == (0x1FBC0, None)
    assert (plain.target, plain.place, plain.value, plain.per_cpu) == (None, None, None, None)


def test_fields_are_where_a_linker_may_have_put_an_address() -> None:
    code = f"e8{to(START, 5)} 48c7c700100081 48b80010008100000000 488b4318"

    found = [line.fields for line in list_code(bytes.fromhex(code), START)]

    assert found == [(), ((3, 4),), ((2, 8),), ()]


def test_bytes_that_are_no_instruction_are_lines_of_one_byte() -> None:
    lines = list_code(bytes.fromhex("06 06 c3"), START)

    assert [(line.text, line.code.hex()) for line in lines] == [
        ("(bad)", "06"),
        ("(bad)", "06"),
        ("ret", "c3"),
    ]


def test_an_instruction_that_is_cut_off_is_bytes() -> None:
    lines = list_code(bytes.fromhex("0f1f44"), START)

    assert b"".join(line.code for line in lines).hex() == "0f1f44"
    assert {line.mnemonic for line in lines} == {"(bad)"}


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump is installed")
def test_mnemonics_and_lengths_agree_with_objdump(tmp_path: Path) -> None:
    code = bytes.fromhex(
        "554889e54883ec104154 65488b1c2580fb0100 8b431885c0 741f 488b4318 0fb788f0070000 48c1e120"
        "f0480903 0f31 f3a4 f30f1efa 480fb1d1 5d c3"
    )
    (tmp_path / "code").write_bytes(code)

    command = [
        "objdump",
        "-D",
        "-b",
        "binary",
        "-m",
        "i386:x86-64",
        "--insn-width=15",
        tmp_path / "code",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    theirs = [line.split("\t") for line in said.splitlines() if line.count("\t") == 2]
    ours = list_code(code, 0)
    assert [line.code.hex(" ") for line in ours] == [columns[1].strip() for columns in theirs]
    for line, columns in zip(ours, theirs, strict=True):
        # Where a register tells the size, one of them may leave the suffix out.
        assert columns[2].split()[0].startswith(line.mnemonic.split()[0][:3])
