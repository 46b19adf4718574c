"""Entries of functions by their bytes: what kernels make of them, which no compiler writes."""

import pytest

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch
from kprobes.arch.entry import MCOUNT_LOC, EntryText, read_entry
from kprobes.arch.insn import Disassembled, Syntax
from kprobes.arch.x86_64.arch import X86_64
from kprobes.units import Addr

ADDR = Addr(0xFFFF_FFFF_8100_0000)
REST = "4157 4156 c3"
A64_REST = "fd7bbea9 fd030091 c0035fd6"
Parts = list[tuple[str, int, str]]


def parts(
    code: str,
    listed: int | None = None,
    *,
    arch: Arch = X86_64,
    before: str = "",
    callee: str = "",
    **known: int | bool | None,
) -> Parts:
    """Return kind, offset and bytes of each part; a table has the place ``listed``."""
    text = EntryText(
        addr=ADDR,
        before=bytes.fromhex(before),
        code=bytes.fromhex(code),
        listed={} if listed is None else {listed: (MCOUNT_LOC,)},
        **known,  # pyright: ignore[reportArgumentType] - as they are named
    )

    def callee_of(line: Disassembled) -> str:
        assert line.mnemonic.startswith(("call", "bl"))
        return callee

    lines = arch.listing.lines(text.code, ADDR, Syntax.ATT)
    found = read_entry(arch.listing.entry, text, lines, callee_of)
    return [(part.kind.value, part.offset, part.code.hex()) for part in found]


@pytest.mark.parametrize(
    ("site", "kind"),
    [
        ("0f1f440000", "nop"),
        ("e800000100", "call"),
        ("e900000100", "jump"),
        ("cc1f440000", "breakpoint"),
    ],
)
@pytest.mark.parametrize("pad", ["", "f30f1efa", "660f1f00"])
def test_a_site_of_a_running_kernel_is_what_stands_there(site: str, kind: str, pad: str) -> None:
    at = len(pad) // 2
    pads: Parts = [("landing_pad" if pad[:2] == "f3" else "sealed", 0, pad)] if pad else []

    found = parts(pad + site + REST, at)

    assert found == [*pads, (kind, at, site if kind != "breakpoint" else "cc")]


def test_code_that_no_table_has_is_no_site() -> None:
    assert parts("e800000100" + REST, callee="other") == []
    assert parts("e900000100" + REST) == []
    assert parts("90" + REST) == []
    assert parts("0f1f440000" + REST) == [("nop", 0, "0f1f440000")]
    assert parts("0f1f440000" + REST, are_listed=True) == []
    # Only at the beginning it is room for a call.
    assert parts("4157 0f1f440000 c3") == []


def test_a_call_of_a_profiler_may_come_after_the_frame_is_made() -> None:
    code = "55 4889e5 4154 53 e800000000 c3"

    assert parts(code, callee="mcount") == [
        ("prologue", 0, "55"),
        ("prologue", 1, "4889e5"),
        ("call", 7, "e800000000"),
    ]
    # After another call nothing is an entry any more.
    assert parts("55 4889e5 e800000000 e800000000", callee="other") == [
        ("prologue", 0, "55"),
        ("prologue", 1, "4889e5"),
    ]


def test_a_landing_pad_further_on_is_none_of_the_entry() -> None:
    assert parts("4157 f30f1efa c3") == []
    assert parts("e00302aa 9f2403d5 c0035fd6", arch=AARCH64) == []


def test_nops_after_a_site_are_not_its_own() -> None:
    assert parts("0f1f440000 9090" + REST, 0) == [("nop", 0, "0f1f440000")]
    assert parts("1f2003d5" * 3 + A64_REST, 4, arch=AARCH64)[0] == ("nop", 0, "1f2003d5" * 2)


def test_a_register_that_is_only_saved_makes_no_frame() -> None:
    assert parts("55 53 4889fb c3") == []
    assert parts("e800000100 55 53", 0) == [("call", 0, "e800000100")]


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("90" * 11 + "b878563412", [("padding", -16, "90" * 11), ("kcfi", -5, "b878563412")]),
        ("b878563412" + "90" * 11, [("kcfi", -16, "b878563412")]),
        ("f30f1efa 4181ea78563412 7402 0f0b 90", [("fineibt", -16, None)]),
        ("90" * 16, [("padding", -16, "90" * 16)]),
    ],
)
def test_what_is_before_a_function_that_callers_through_pointers_check(
    before: str, found: list[tuple[str, int, str | None]]
) -> None:
    whole = bytes.fromhex(before).hex()
    wanted = [(kind, offset, code or whole) for kind, offset, code in found]

    assert parts("f30f1efa" + REST, before=before, padding=16, has_checks=True) == [
        *wanted,
        ("landing_pad", 0, "f30f1efa"),
    ]


def test_without_checks_what_is_before_a_function_is_padding() -> None:
    before = "b878563412" + "90" * 11

    assert parts(REST, before=before) == []
    assert parts(REST, before=before, padding=16) == [("padding", -16, bytes.fromhex(before).hex())]


@pytest.mark.parametrize(
    ("site", "kind"),
    [
        ("1f2003d5", "nop"),
        ("00400094", "call"),
        ("00400014", "jump"),
        ("800020d4", "breakpoint"),
    ],
)
@pytest.mark.parametrize("pad", ["", "5f2403d5"])
def test_a_site_of_a_running_arm64_kernel_comes_after_the_return_address_is_kept(
    site: str, kind: str, pad: str
) -> None:
    at = len(pad) // 2
    pads: Parts = [("landing_pad", 0, pad)] if pad else []
    signed = "3f2303d5"

    found = parts(pad + "e9031eaa" + site + signed + A64_REST, at + 4, arch=AARCH64)

    assert found == [
        *pads,
        ("saved_link", at, "e9031eaa"),
        (kind, at + 4, site),
        ("signing", at + 8, signed),
        ("prologue", at + 12, "fd7bbea9"),
        ("prologue", at + 16, "fd030091"),
    ]


def test_an_arm64_site_may_have_a_pointer_before_its_function() -> None:
    pointer = "0011223344556677"

    found = parts(
        "e9031eaa 1f2003d5" + A64_REST, 4, arch=AARCH64, before="00" * 8 + pointer, pointer=-8
    )

    assert found[0] == ("call_ops", -8, pointer)


def test_an_arm64_word_that_is_no_instruction_is_a_hash() -> None:
    nops = "1f2003d5" * 2

    assert parts(A64_REST, arch=AARCH64, before="94070500" + nops, has_checks=True)[0] == (
        "kcfi",
        -12,
        "94070500",
    )
    for before in ("00000000" + nops, "c0035fd6" + nops, nops):
        found = parts(A64_REST, arch=AARCH64, before=before, has_checks=True)
        assert [part[0] for part in found] == ["prologue", "prologue"]
