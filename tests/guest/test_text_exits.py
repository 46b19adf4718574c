"""Functions to their classes: which are looked at, and what is known of those they call last."""

import pytest

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import TargetError
from kprobes.guest.text import Text, classified
from kprobes.model.kernel import Symbol, TextTables
from kprobes.model.plan import ReturnMethod
from tests.build.armed_sites import SparseMemory
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.text import to

F, G, H, OUTSIDE = TEXT + 0x100, TEXT + 0x200, TEXT + 0x300, TEXT + 0x3000_0000
UD2 = "0f0b"


def call(target: int, *, place: int) -> str:
    return "e8" + to(target, 5, place=place)


def options(codes: dict[int, str], *symbols: Symbol, pattern: str = "*") -> dict[str, str]:
    memory = SparseMemory({addr: bytes.fromhex(code) for addr, code in codes.items()})
    kernel = make_kernel(symbols)
    text = Text(kernel=kernel, open_memory=lambda: memory, read_tables=TextTables)
    found = classified(text, X86_64.patch, pattern=pattern)
    return {each.symbol.name: each.exits.return_method for each in found}


def test_every_function_of_the_kernel_s_text_is_classified() -> None:
    codes = {F: "c3", G: "e9" + to(F, 5, place=G), H: UD2}

    found = options(codes, symbol("f", F, size=1), symbol("g", G, size=5), symbol("h", H, size=2))

    assert found == {"f": ReturnMethod.RETINSN, "g": ReturnMethod.TAIL, "h": ReturnMethod.REFUSED}


def test_what_is_no_function_is_left_out() -> None:
    left_out = [
        symbol("f.cold", G, size=1),
        symbol("__pfx_f", H, size=1),
        symbol("data", H, type="d", size=1),
        symbol("freed", OUTSIDE, size=1),
    ]

    assert list(options({F: "c3"}, symbol("f", F, size=1), *left_out)) == ["f"]


def test_a_last_call_of_what_never_returns_is_followed_and_ends_a_path() -> None:
    codes = {
        F: "85c0" + "7401" + "c3" + call(G, place=F + 5),
        G: call(H, place=G),
        H: "90" + UD2,
    }
    names = symbol("f", F, size=10), symbol("g.part.0", G, size=5), symbol("h", H, size=3)

    assert options(codes, *names, pattern="f") == {"f": ReturnMethod.RETINSN}


def test_a_last_call_of_what_returns_stays_a_gap_even_in_a_circle() -> None:
    codes = {F: call(G, place=F), G: call(F, place=G), H: call(F, place=H)}
    names = symbol("f", F, size=5), symbol("g", G, size=5), symbol("h", H, size=5)

    assert set(options(codes, *names).values()) == {ReturnMethod.RETHOOK}


def test_text_that_is_not_there_is_refused() -> None:
    assert options({}, symbol("gone", F, size=1)) == {"gone": ReturnMethod.REFUSED}


def test_a_module_s_functions_are_classified_wherever_they_are() -> None:
    loaded = symbol("loaded", OUTSIDE, size=1, module="ext4")

    assert options({OUTSIDE: "c3"}, loaded) == {"loaded": ReturnMethod.RETINSN}


def test_a_pattern_that_nothing_matches_is_an_error() -> None:
    with pytest.raises(TargetError, match="no function matches 'x'"):
        options({F: "c3"}, symbol("f", F, size=1), pattern="x")
