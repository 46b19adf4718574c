"""A small guest whose ftrace sites have names, for whoever gives it definitions."""

from collections.abc import Sequence

from msgspec.structs import replace

from tests.build.guest import GuestWithSites, make_guest
from tests.build.kernel import make_kernel, symbol


def make_named_guest(*names: str, without_site: Sequence[str] = ()) -> GuestWithSites:
    """Make a guest that can probe these functions, and has others that it cannot."""
    made = make_guest(["p f"] * len(names))
    named = [symbol(name, addr, size=0x20) for name, addr in zip(names, made.sites, strict=True)]
    lonely = [symbol(name, made.sites[-1] + 0x200 + n) for n, name in enumerate(without_site)]
    listed = made.guest.kernel.symbols.all_named("ftrace_pages_start")
    made.guest = replace(made.guest, kernel=make_kernel([*named, *lonely, *listed]))
    return made
