"""Data that a function names: code of a Debian 6.1 kernel, and the addresses known from it."""

import pytest

from kprobes.arch.aarch64.machine import references

FTRACE = "00c400b0 f68700a9 13bc44f9 330300b4"
"""adrp x0; stp x22, x1, [sp, #8]; ldr x19, [x0, #0x978]; cbz x19"""
BLACKLIST = "d3b800b0 73a21491 e00313aa 810240f9 60820091"
"""adrp x19; add x19, x19, #0x528; mov x0, x19; ldr x1, [x20]; add x0, x19, #0x20"""
NOTE = "14c600b0 94423d91 828240a9"
"""adrp x20; add x20, x20, #0xf50; ldp x2, x0, [x20, #8]"""

LIST = "14c600b0 94423d91 e10314aa 330c47f8"
"""adrp x20; add x20, x20, #0xf50; mov x1, x20; ldr x19, [x1, #0x70]!"""


@pytest.mark.parametrize(
    ("code", "addr", "found"),
    [
        (FTRACE, 0xFFFF_DD06_535C_3BC0, [0xFFFF_DD06_54E4_4978]),
        (BLACKLIST, 0xFFFF_DD06_535B_3DC0, [0xFFFF_DD06_54CC_C528, 0xFFFF_DD06_54CC_C548]),
        (LIST, 0xFFFF_DD06_5358_14AC, [0xFFFF_DD06_54E4_2F50, 0xFFFF_DD06_54E4_2FC0]),
        (NOTE, 0xFFFF_DD06_5358_14AC, [0xFFFF_DD06_54E4_2F50, 0xFFFF_DD06_54E4_2F58]),
        ("a3ab00b0 61c047b9", 0xFFFF_DD06_536A_9590, [0xFFFF_DD06_54C1_E7C0]),
        ("f5ffffb0 b5023391", 0xFFFF_DD06_535C_3BD0, [0xFFFF_DD06_535C_0CC0]),
        ("610640f9 1f2003d5", 0x1000, []),
        ("", 0, []),
    ],
)
def test_what_instructions_compute_is_found(code: str, addr: int, found: list[int]) -> None:
    assert list(references(bytes.fromhex(code), addr)) == found
