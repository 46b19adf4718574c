"""Putting back what was written to a guest: all of it, whatever happened to some."""

import pytest

from kprobes.errors import TargetError
from kprobes.guest.armed import ArmedPatch
from kprobes.guest.patches import restore_text
from kprobes.units import Addr, Phys
from tests.build.guest import FakeStub
from tests.build.pages import FakeRam


def undo(phys: int, old: bytes, new: bytes, what: str = "vfs_read") -> ArmedPatch:
    return ArmedPatch(phys=Phys(phys), addr=Addr(phys + 0xFFFF_0000), old=old, new=new, what=what)


UNDOS = [undo(0x10, b"\x0f\x1f\x44\x00\x00", b"\xe8abcd"), undo(0x40, b"\0" * 8, b"\1" * 8, "ö")]


def _patched(patches: list[ArmedPatch]) -> FakeStub:
    ram = FakeRam(4096)
    for one in patches:
        ram.write(one.phys, one.new)
    return FakeStub(ram)


def test_every_place_gets_its_old_bytes() -> None:
    stub = _patched(UNDOS)

    assert restore_text(UNDOS, stub) == 2
    assert [stub.ram.read(u.phys, len(u.old)) for u in UNDOS] == [u.old for u in UNDOS]


@pytest.mark.parametrize("there", [1, 2, 3])
def test_of_several_patches_of_one_place_that_which_is_there_is_taken_back(there: int) -> None:
    patches = [undo(0x10, b"a", b"b"), undo(0x10, b"a", b"c"), undo(0x10, b"a", b"d")]
    stub = _patched(patches[:there])

    assert restore_text(patches, stub) == 1
    assert stub.ram.read(0x10, 1) == b"a"


def test_rolling_back_twice_does_nothing_the_second_time() -> None:
    stub = _patched(UNDOS)
    restore_text(UNDOS, stub)
    stub.events.clear()

    assert restore_text(UNDOS, stub) == 0
    assert stub.events == []


def test_patches_that_were_never_made_are_left_alone() -> None:
    stub = _patched(UNDOS[:1])

    assert restore_text(UNDOS, stub) == 1


def test_strange_bytes_are_reported_and_all_others_put_back() -> None:
    patches = [*UNDOS, undo(0x80, b"o", b"n", "third")]
    stub = _patched(patches)
    stub.ram.write(0x40, b"somebody")

    with pytest.raises(TargetError, match=r"1 places .* 0xffff0040 \(ö\)"):
        restore_text(patches, stub)

    assert stub.ram.read(0x40, 8) == b"somebody"
    assert [stub.ram.read(u.phys, len(u.old)) for u in patches if u.phys != 0x40] == [
        u.old for u in patches if u.phys != 0x40
    ]


def test_a_place_that_cannot_be_written_does_not_keep_the_others_from_it() -> None:
    patches = [*UNDOS, undo(0x80, b"o", b"n", "third")]
    stub = _patched(patches)
    stub.fails_at = 1

    with pytest.raises(TargetError):
        restore_text(patches, stub)

    assert [stub.ram.read(u.phys, len(u.old)) == u.old for u in patches] == [True, False, True]
