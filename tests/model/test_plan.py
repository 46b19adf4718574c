"""Plans of sites: what follows from what they hold."""

import pytest

from kprobes.model.plan import Displaced, Patch, Site, Strategy
from kprobes.units import Addr

START, STOP = Addr(0x1000), Addr(0x1005)
PUSHES = bytes.fromhex("4157415655")


@pytest.mark.parametrize(("count", "covered"), [(1, ()), (2, ((START + 1, STOP),))])
def test_nobody_may_come_back_in_between_displaced_instructions(
    count: int, covered: tuple[tuple[int, int], ...]
) -> None:
    displaced = Displaced(addr=START, code=PUSHES, count=count, stop=STOP)

    site = Site(strategy=Strategy.JUMP, addr=START, old=PUSHES, displaced=displaced)

    assert site.covered == covered


def test_an_ftrace_site_displaces_nothing() -> None:
    assert Site(strategy=Strategy.FTRACE, addr=START, old=PUSHES).covered == ()


def test_a_patch_changes_as_many_bytes_as_it_knows() -> None:
    with pytest.raises(ValueError, match="5 bytes replaced by 6"):
        Patch(addr=START, old=PUSHES, new=PUSHES + b"\x90")
