"""Kinds of words: golden, one by one and in columns, and against other disassemblers."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kprobes.arch.aarch64.disasm import text_of
from kprobes.arch.aarch64.insn import Kind, classify, kind_of, leads_to, named_by
from tests.build.a64 import START

GOLDEN = [
    ("14000010", Kind.B, "b"),
    ("97fffff0", Kind.BL, "bl"),
    ("54000200", Kind.B_COND, "b.eq"),
    ("b4000203", Kind.CBZ, "cbz"),
    ("35fffe03", Kind.CBZ, "cbnz"),
    ("b6400205", Kind.TBZ, "tbz"),
    ("371ffe05", Kind.TBZ, "tbnz"),
    ("d61f0200", Kind.BR, "br"),
    ("d71f0822", Kind.BR, "braa"),
    ("d61f083f", Kind.BR, "braaz"),
    ("d63f0100", Kind.BLR, "blr"),
    ("d73f0864", Kind.BLR, "blraa"),
    ("d63f0cbf", Kind.BLR, "blrabz"),
    ("d65f03c0", Kind.RET, "ret"),
    ("d65f0120", Kind.RET, "ret"),
    ("d65f0bff", Kind.RET_AUTH, "retaa"),
    ("d65f0fff", Kind.RET_AUTH, "retab"),
    ("d69f03e0", Kind.ERET, "eret"),
    ("d69f0bff", Kind.ERET, "eretaa"),
    ("d4210000", Kind.BRK, "brk"),
    ("d4400000", Kind.HLT, "hlt"),
    ("00000000", Kind.UDF, "udf"),
    ("d4000002", Kind.CALL_UP, "hvc"),
    ("d4000003", Kind.CALL_UP, "smc"),
    ("d4000001", Kind.CALL_UP, "svc"),
    ("d503201f", Kind.HINT, "nop"),
    ("d503203f", Kind.HINT, "yield"),
    ("d503205f", Kind.WAIT, "wfe"),
    ("d503207f", Kind.WAIT, "wfi"),
    ("d503229f", Kind.HINT, "csdb"),
    ("d503241f", Kind.BTI, "bti"),
    ("d503245f", Kind.BTI, "bti"),
    ("d50324df", Kind.BTI, "bti"),
    ("d503233f", Kind.PACIASP, "paciasp"),
    ("d503237f", Kind.PACIASP, "pacibsp"),
    ("d50323bf", Kind.AUTIASP, "autiasp"),
    ("d50323ff", Kind.AUTIASP, "autibsp"),
    ("d50320ff", Kind.HINT, "xpaclri"),
    ("d50342df", Kind.MSR_IMMEDIATE, "msr"),
    ("d5182000", Kind.MSR, "msr"),
    ("d53b4220", Kind.MRS, "mrs"),
    ("d50b7e23", Kind.OTHER, "dc"),
    ("d508831f", Kind.OTHER, "tlbi"),
    ("d5033fdf", Kind.OTHER, "isb"),
    ("d5033bbf", Kind.OTHER, "dmb"),
    ("d5033f5f", Kind.CLREX, "clrex"),
    ("30008000", Kind.ADR, "adr"),
    ("90000001", Kind.ADRP, "adrp"),
    ("58000200", Kind.LDR_LITERAL, "ldr"),
    ("18fffe01", Kind.LDR_LITERAL, "ldr"),
    ("98000202", Kind.LDRSW_LITERAL, "ldrsw"),
    ("d8000200", Kind.PRFM_LITERAL, "prfm"),
    ("9c000200", Kind.VECTOR_LITERAL, "ldr"),
    ("5c000201", Kind.VECTOR_LITERAL, "ldr"),
    ("c85f7c20", Kind.LOAD_EXCLUSIVE, "ldxr"),
    ("885ffc20", Kind.LOAD_EXCLUSIVE, "ldaxr"),
    ("c87f0440", Kind.LOAD_EXCLUSIVE, "ldxp"),
    ("085ffc20", Kind.LOAD_EXCLUSIVE, "ldaxrb"),
    ("c8027c20", Kind.STORE_EXCLUSIVE, "stxr"),
    ("c802fc20", Kind.STORE_EXCLUSIVE, "stlxr"),
    ("c8220460", Kind.STORE_EXCLUSIVE, "stxp"),
    ("c8dffc20", Kind.OTHER, "ldar"),
    ("c89ffc20", Kind.OTHER, "stlr"),
    ("c8a07c41", Kind.OTHER, "cas"),
    ("48207c82", Kind.OTHER, "casp"),
    ("f8200041", Kind.OTHER, "ldadd"),
    ("f9400020", Kind.OTHER, "ldr"),
    ("8b020020", Kind.OTHER, "add"),
]

BY_MNEMONIC = {
    "b": Kind.B,
    "bl": Kind.BL,
    **dict.fromkeys(("cbz", "cbnz"), Kind.CBZ),
    **dict.fromkeys(("tbz", "tbnz"), Kind.TBZ),
    **dict.fromkeys(("br", "braa", "brab", "braaz", "brabz"), Kind.BR),
    **dict.fromkeys(("blr", "blraa", "blrab", "blraaz", "blrabz"), Kind.BLR),
    "ret": Kind.RET,
    **dict.fromkeys(("retaa", "retab"), Kind.RET_AUTH),
    **dict.fromkeys(("eret", "eretaa", "eretab", "drps"), Kind.ERET),
    "brk": Kind.BRK,
    "hlt": Kind.HLT,
    **dict.fromkeys(("svc", "hvc", "smc", "dcps1", "dcps2", "dcps3"), Kind.CALL_UP),
    "adr": Kind.ADR,
    "adrp": Kind.ADRP,
    "clrex": Kind.CLREX,
}
"""Mnemonics that mean one kind, and kinds that no other mnemonic has."""
WITHDRAWN = ("tcancel",)
"""Of the transactional memory extension, which no CPU has."""
EXCLUSIVE = re.compile(r"(ld|st)[al]?x[rp][bh]?")


def column(word: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.array([word], np.uint32)


@pytest.mark.parametrize(("word", "kind", "mnemonic"), GOLDEN)
def test_the_kind_of_a_word(word: str, kind: Kind, mnemonic: str) -> None:
    shown = text_of(int(word, 16).to_bytes(4, "little"), START)

    assert kind_of(int(word, 16)) is kind
    assert shown is None or shown[0] in (mnemonic, "hint")


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_columns_are_classified_as_words_are(words: list[int]) -> None:
    found = classify(np.array(words, np.uint32))

    assert found.tolist() == [kind_of(word) for word in words]


LEADING = [int(word, 16) for word, kind, _ in GOLDEN if kind is not Kind.OTHER]


@given(st.sampled_from(LEADING), st.integers(0, 2**26 - 1), st.integers(0, 2**45), st.booleans())
def test_columns_lead_where_words_do(word: int, field: int, place: int, is_low: bool) -> None:
    word ^= field & 0xFFFFE0
    addr = 4 * place + (0 if is_low else 0xFFFF_0000_0000_0000)
    kind = kind_of(word)

    found = leads_to(column(word), np.array([kind], np.uint8), np.array([addr], np.uint64))

    assert int(found[0]) == (named_by(word, kind, addr) or 0)


@pytest.mark.parametrize(
    ("word", "target"),
    [
        ("14000010", START + 0x40),
        ("97fffff0", START - 0x40),
        ("54000200", START + 0x40),
        ("35fffe03", START - 0x40),
        ("b6400205", START + 0x40),
        ("371ffe05", START - 0x40),
        ("30008000", START + 0x1001),
        ("b0000001", (START & ~0xFFF) + 0x1000),
        ("18fffe01", START - 0x40),
    ],
)
def test_what_a_word_names_is_where_a_disassembler_says(word: str, target: int) -> None:
    number = int(word, 16)
    shown = text_of(number.to_bytes(4, "little"), START)

    assert named_by(number, kind_of(number), START) == target
    assert shown is not None
    assert shown[1].endswith(f"#{target:#x}")


@example(0x04E8A000)
@given(st.integers(0, 2**32 - 1) | st.sampled_from(LEADING))
def test_capstone_sees_the_same_kinds(word: int) -> None:
    shown = text_of(word.to_bytes(4, "little"), START)
    if shown is not None:
        check_kind(word, shown[0])


def check_kind(word: int, mnemonic: str) -> None:
    kind = kind_of(word)
    # SVE has an adr of its own, of vectors. Arm ARM, "A64 instruction set encoding": op0.
    named = None if word >> 25 & 0b1111 == 0b0010 else BY_MNEMONIC.get(mnemonic)
    if named is not None or kind in BY_MNEMONIC.values():
        assert named is kind, f"{word:#010x} {mnemonic}"
    is_exclusive = kind in (Kind.LOAD_EXCLUSIVE, Kind.STORE_EXCLUSIVE)
    assert bool(EXCLUSIVE.fullmatch(mnemonic)) == is_exclusive, f"{word:#010x} {mnemonic}"
    assert mnemonic.startswith(("b.", "bc.")) == (kind is Kind.B_COND)
    assert kind is not Kind.UNALLOCATED or mnemonic in WITHDRAWN


@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-objdump"), reason="binutils for aarch64 are not installed"
)
def test_objdump_sees_the_same_kinds(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    words = rng.integers(0, 2**32, 40_000, dtype=np.uint32)
    # A quarter each of branches and system instructions, and of loads and stores.
    words[:10_000] = words[:10_000] & 0xE3FFFFFF | 0x14000000
    words[10_000:20_000] = words[10_000:20_000] & 0xF5FFFFFF | 0x08000000
    (tmp_path / "words").write_bytes(words.astype("<u4").tobytes())
    command = ["aarch64-linux-gnu-objdump", "-D", "-b", "binary", "-m", "aarch64"]

    done = subprocess.run(
        [*command, str(tmp_path / "words")], capture_output=True, text=True, check=True
    )

    seen = Counter[Kind]()
    for word, mnemonic in re.findall(r":\t([0-9a-f]{8}) \t(\S+)", done.stdout):
        if mnemonic not in (".inst", "udf", "bad"):
            check_kind(int(word, 16), mnemonic)
            seen[kind_of(int(word, 16))] += 1
    assert seen[Kind.B] > 100
    assert seen[Kind.LOAD_EXCLUSIVE] > 50
