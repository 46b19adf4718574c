"""Numbers of print fmts beside those of a C compiler."""

import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.build.printed import of_values, one

SEED, ROWS, EXPRESSIONS = 20261127, 24, 240
# Without a char: whether that is signed depends on the kernel.
TYPES = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
CASTS = ("int", "unsigned int", "long", "unsigned long long", "u8", "s16", "short", "unsigned char")
_PROGRAM = """
#include <stdio.h>
typedef signed char s8; typedef unsigned char u8; typedef short s16; typedef unsigned short u16;
typedef int s32; typedef unsigned u32; typedef long s64; typedef unsigned long u64;
struct record {{ {members} }} records[] = {{ {rows} }};
int main(void) {{
    for (struct record *REC = records; REC < records + {count}; REC++)
        printf("{form}\\n", {values});
}}
"""


def expression(choose: random.Random, depth: int) -> str:
    """Return some C of the fields, nothing of which is undefined with -fwrapv."""
    if depth == 0:
        constant = choose.choice(["0", "1", "7", "0x80000000", "255u", "3L", "-1", "0xffUL", "'a'"])
        return choose.choice([f"REC->{name}" for name in TYPES] + [constant])
    left, right = expression(choose, depth - 1), expression(choose, choose.randrange(depth))
    match choose.randrange(6):
        case 0:
            return f"({choose.choice(CASTS)})({left})"
        case 1:
            return f"{choose.choice('-~!')}({left})"
        case 2:
            return f"(({left}) ? ({right}) : ({expression(choose, depth - 1)}))"
        case 3:
            return f"(({left}) {choose.choice(['<<', '>>'])} (({right}) & 7))"
        case 4:
            divisor = choose.choice(["3", "-7", "1000u", "5L", "10UL"])
            return f"(({left}) {choose.choice('/%')} {divisor})"
        case _:
            operators = ["+", "-", "*", "&", "|", "^", "==", "!=", "<", ">", "<=", ">=", "&&", "||"]
            return f"(({left}) {choose.choice(operators)} ({right}))"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_they_are_those_of_a_compiler(tmp_path: Path) -> None:
    choose = random.Random(SEED)
    found = [expression(choose, choose.randrange(1, 5)) for _ in range(EXPRESSIONS)]
    columns = [
        np.array([choose.choice([0, 1, 127, 128, 1 << 31, choose.getrandbits(64)])
                  for _ in range(ROWS)]).astype(np.uint64)
        .astype(f"{'i' if name[0] == 's' else 'u'}{int(name[1:]) // 8}")
        for name in TYPES
    ]  # fmt: skip
    rows = zip(*(column.tolist() for column in columns), strict=True)
    text = _PROGRAM.format(
        members=" ".join(f"{name} {name};" for name in TYPES),
        rows=", ".join(f"{{{', '.join(map(c_number, row))}}}" for row in rows),
        count=ROWS,
        form=" ".join(["%lld"] * EXPRESSIONS),
        values=", ".join(f"(long long)({each})" for each in found),
    )
    (tmp_path / "x.c").write_text(text)
    subprocess.run(["gcc", "-fwrapv", "-w", "-o", "x", "x.c"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "x"], capture_output=True, check=True, text=True).stdout
    theirs = [line.split() for line in printed.splitlines()]

    for at, each in enumerate(found):
        fields = "; ".join(f"{name} {name}" for name in TYPES)
        mine = of_values(f'"%lld", (long long)({each})', fields, *columns)

        assert [line.decode() for line in mine] == [row[at] for row in theirs], each


def c_number(number: int) -> str:
    return f"{number & ((1 << 64) - 1):#x}"


def test_nothing_is_divided_by_0_and_no_shift_is_too_far() -> None:
    fields, columns = "int a; int b", (np.array([7, -7, 1]), np.array([0, 0, 33]))

    assert of_values('"%d %d", REC->a / REC->b, REC->a % REC->b', fields, *columns) == [
        b"0 7", b"0 -7", b"0 1",
    ]  # fmt: skip
    assert of_values('"%d", REC->a << REC->b', fields, *columns) == [b"7", b"-7", b"2"]


def test_what_depends_on_no_field_is_computed_once() -> None:
    assert one('"%d %lx %d", (1 << 4) - 1, -1UL, !0', "u32 a", 0) == "15 ffffffffffffffff 1"
