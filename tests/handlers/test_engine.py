"""Places that a guest's driver finds for handlers."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.errors import DefinitionError, UsageError
from kprobes.guest.arena import ArenaSize
from kprobes.guest.driver import GuestDriver
from kprobes.guest.journal import Journal
from kprobes.handlers.engine import GuestEngine
from kprobes.units import Addr
from tests.build.kernel import make_kernel, symbol
from tests.build.named_guest import make_named_guest


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GuestEngine:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    guest = make_named_guest("vfs_read", "vfs_write").guest
    return GuestEngine(GuestDriver(guest, Journal.create("fake"), ArenaSize()))


def test_a_functions_entry_is_its_ftrace_site(engine: GuestEngine) -> None:
    found = engine.find_place("vfs_read")

    assert (found.function.name, found.is_entry, found.module) == ("vfs_read", True, "")
    assert found.addr == found.function.addr
    assert found.following == found.addr + 5


def test_an_address_is_a_place_too(engine: GuestEngine) -> None:
    addr = engine.find_place("vfs_read").addr

    assert engine.find_place(f"{addr:#x}") == engine.find_place("vfs_read")


def test_another_instruction_is_no_entry(engine: GuestEngine) -> None:
    found = engine.find_place("vfs_read+8")

    assert (found.addr - found.function.addr, found.is_entry, found.following) == (8, False, None)


@pytest.mark.parametrize(("offset", "after"), [(0, 4), (4, 8), (8, None)])
def test_an_arm64_entry_and_the_site_after_it_are_both_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, after: int | None
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = make_named_guest("vfs_read")
    listed = made.guest.kernel.symbols.all_named("ftrace_pages_start")
    start = Addr(made.sites[0] - 4)
    kernel = replace(make_kernel([symbol("vfs_read", start), *listed]), arch="aarch64")
    guest = replace(made.guest, kernel=kernel, arch=AARCH64)
    engine = GuestEngine(GuestDriver(guest, Journal.create("fake"), ArenaSize()))

    found = engine.find_place(f"vfs_read+{offset}")

    assert (found.addr, found.is_entry) == (start + offset, offset == 0)
    assert found.following == (None if after is None else start + after)


def test_what_is_no_place_is_refused(engine: GuestEngine) -> None:
    with pytest.raises(DefinitionError, match="Invalid probed address or symbol"):
        engine.find_place("vfs_raed")
    with pytest.raises(UsageError, match="vfs_\\* names many functions"):
        engine.find_place("vfs_*")
