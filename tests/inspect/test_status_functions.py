"""Functions that can be probed by name."""

from typing import cast

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import TargetError
from kprobes.inspect.status import probeable
from kprobes.model.kernel import Types
from tests.build.armed_sites import NOP, make_sites
from tests.build.kernel import TEXT, make_kernel, symbol

SITES = {TEXT + n * 0x40: NOP for n in range(4)}
SYMBOLS = [
    symbol("vfs_write", TEXT),
    symbol("vfs_read", TEXT + 0x40),
    symbol("vfs_twice", TEXT + 0x80),
    symbol("vfs_twice", TEXT + 0xC0),
    symbol("vfs_inlined", TEXT + 0x100),
    symbol("vfs_data", TEXT, type="d"),
    symbol("other", TEXT),
]


def names(pattern: str) -> list[str]:
    memory, kernel = make_sites(SITES)
    pages = kernel.symbols.named("ftrace_pages_start")
    kernel = make_kernel([*SYMBOLS, pages])
    found = probeable(memory, kernel, X86_64.site, pattern=pattern)
    return [function.symbol.name for function in found]


def test_functions_with_a_site_and_a_name_of_their_own_are_listed_by_name() -> None:
    assert names("vfs_*") == ["vfs_read", "vfs_write"]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [("nothing_*", "$"), ("vfs_inlined", ": 1 match, but"), ("vfs_twice", ": 1 match, but")],
)
def test_when_none_is_left_it_says_why(pattern: str, why: str) -> None:
    with pytest.raises(TargetError, match=r"no function that can be probed matches .*" + why):
        names(pattern)


def test_a_kernel_without_sites_has_its_functions_listed() -> None:
    memory, _ = make_sites({})

    found = probeable(memory, make_kernel(SYMBOLS), X86_64.site, pattern="vfs_*")

    assert [function.symbol.name for function in found] == ["vfs_inlined", "vfs_read", "vfs_write"]


class _Untouched:
    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"types were asked for {name}")


def test_names_alone_need_no_types() -> None:
    memory, kernel = make_sites(SITES)
    pages = kernel.symbols.named("ftrace_pages_start")
    kernel = replace(make_kernel([*SYMBOLS, pages]), types=cast("Types", _Untouched()))

    found = probeable(memory, kernel, X86_64.site, pattern="vfs_*", is_typed=False)

    assert [function.symbol.name for function in found] == ["vfs_read", "vfs_write"]
