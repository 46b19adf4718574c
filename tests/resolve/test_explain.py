"""Fetches of fields, in words."""

import pytest

from kprobes.resolve.explain import explain
from tests.build.kernel import DATA_SYMBOL, make_probe


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("%di:s32", "s32 = %di"),
        ("$arg2", "x64 = %si"),
        ("$arg8", "x64 = *(u64 *)(%sp + 0x10)"),
        ("$stack", "x64 = %sp"),
        ("$stack0", "x64 = *(u64 *)(%sp)"),
        (r"\-1:u8", "u8 = 0xffffffffffffffff"),
        ('\\"hi%"', 'string = "hi%"'),
        ("$comm", "string = the running task's name"),
        ("$current", "x64 = current"),
        ("+8(%di):u16", "u16 at %di + 0x8, read from kernel memory"),
        ("-8(%di):u16", "u16 at %di - 0x8, read from kernel memory"),
        ("+u0(%di):u16", "u16 at %di, read from user space"),
        ("+0(%si):ustring", "ustring at %si, read from user space"),
        ("+0(+8(%si)):string", "string at *(u64 *)(%si + 0x8), read from kernel memory"),
        ("+4(+u8(%si)):x8", "x8 at *(u64 __user *)(%si + 0x8) + 0x4, read from kernel memory"),
        ("@data+8:u32", f"u32 at {DATA_SYMBOL + 8:#x}, read from kernel memory"),
        ("%flags:b1@9/64", "u64 = %flags, bit 9 of it"),
        ("+0(%di):b3@4/8[2]", "u8[2] at %di, read from kernel memory, bits 4 to 6 of it"),
        (
            "+8(%di):string[4]",
            "string[4], their pointers u64[4] at %di + 0x8, read from kernel memory",
        ),
        ("this_cpu_ptr(@data)", f"x64 = this_cpu_ptr({DATA_SYMBOL:#x})"),
        (
            "this_cpu_read(+8(%di)):u8",
            "u8 at this_cpu_ptr(*(u64 *)(%di + 0x8)), read from kernel memory",
        ),
    ],
)
def test_a_field_is_said_with_its_arithmetic(word: str, said: str) -> None:
    (fetch,) = make_probe(f"p f {word}").fetches

    assert explain(fetch) == said


@pytest.mark.parametrize(
    ("word", "said"),
    [("$retval:s32", "s32 = the returned value"), ("$arg1", "x64 = %di at entry")],
)
def test_at_a_return_there_are_the_result_and_what_was_at_entry(word: str, said: str) -> None:
    (fetch,) = make_probe(f"r f {word}").fetches

    assert explain(fetch) == said
