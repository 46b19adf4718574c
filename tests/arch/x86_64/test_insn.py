"""Effects of single instructions on the stack."""

import pytest

from kprobes.arch.x86_64.decode import decode_one
from kprobes.arch.x86_64.insn import Stack, added, after
from tests.build.text import START

BEFORE = Stack(depth=40, frame=16, caller=-8)


@pytest.mark.parametrize(
    ("code", "by"),
    [
        ("55", -8),
        ("9c", -8),
        ("6a00", -8),
        ("58", 8),
        ("4154", -8),
        ("e800000000", 0),
        ("ffd0", 0),
        ("ffd5", 0),
        ("4839ec", 0),
        ("54", -8),
        ("488d442408", 0),
        ("4889e0", 0),
        ("c3", 8),
    ],
)
def test_pushes_and_pops_are_counted_and_callees_are_not(code: str, by: int) -> None:
    assert added(decode_one(bytes.fromhex(code), START)) == by


@pytest.mark.parametrize(
    ("code", "stack"),
    [
        ("4883ec18", (64, 16, -8)),
        ("4883c418", (16, 16, -8)),
        ("4883e4f0", (None, 16, -8)),
        ("488da42480000000", (-88, 16, -8)),
        ("488d65f8", (24, 16, -8)),
        ("4889ec", (16, 16, -8)),
        ("4889e5", (40, 40, -8)),
        ("488d6c2410", (40, 24, -8)),
        ("c9", (8, None, -8)),
        ("5d", (32, None, -8)),
        ("5c", (None, 16, -8)),
        ("4889fd", (40, None, -8)),
        ("89fd", (40, None, -8)),
        ("488b6f10", (40, None, -8)),
        ("498d62f8", (0, 16, -8)),
        ("4894", (None, 16, -8)),
        ("4c8d542408", (40, 16, -8)),
        ("488b27", (None, 16, -8)),
        ("c8100000", (None, 16, -8)),
    ],
)
def test_what_sets_a_pointer_is_followed(code: str, stack: tuple[int | None, ...]) -> None:
    decoded = decode_one(bytes.fromhex(code), START)

    assert added(decoded) is None
    assert tuple(after(decoded, BEFORE)) == stack


def test_the_first_register_that_keeps_the_stack_pointer_is_remembered() -> None:
    decoded = decode_one(bytes.fromhex("4c8d542408"), START)

    assert after(decoded, Stack(0)) == Stack(0, None, -8)
