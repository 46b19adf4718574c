"""Paths of a patched place's bytes: through the stub, or past it."""

from typing import cast

import pytest

from kprobes.errors import MemoryFault
from kprobes.guest.patches import StoppedMemory
from kprobes.transport.ram import StubRam
from kprobes.transport.stub import Stub
from kprobes.units import Phys
from tests.build.guest import FakeStub
from tests.build.pages import FakeRam

CODE, DATA = Phys(0x100), Phys(0x200)


def _make() -> tuple[StoppedMemory, FakeStub, FakeRam]:
    # Two memories, so that it shows which one was written.
    stub, mapped = FakeStub(FakeRam(0x1000)), FakeRam(0x1000)
    places = StoppedMemory(cast("Stub", stub), mapped)
    places.note_data([DATA])
    return places, stub, mapped


def test_code_is_written_through_the_stub_and_data_is_not() -> None:
    places, stub, mapped = _make()

    places.write_physical_many([(DATA, b"data"), (CODE, b"code")])

    assert (stub.ram.read(CODE, 4), mapped.read(CODE, 4)) == (b"code", bytes(4))
    assert (stub.ram.read(DATA, 4), mapped.read(DATA, 4)) == (bytes(4), b"data")


def test_what_is_mapped_is_read_without_the_stub() -> None:
    places, stub, mapped = _make()
    mapped.write(CODE, b"here")
    stub.dies_at = 0

    assert places.read_physical_many([(CODE, 4), (DATA, 2)]) == [b"here", bytes(2)]


def test_without_mapped_ram_all_goes_through_the_stub() -> None:
    stub = FakeStub(FakeRam(0x1000))
    places = StoppedMemory(cast("Stub", stub), StubRam(cast("Stub", stub), [(Phys(0), 0x1000)]))
    places.note_data([DATA])

    places.write_physical_many([(DATA, b"data"), (CODE, b"code")])

    assert places.read_physical_many([(CODE, 4), (DATA, 4)]) == [b"code", b"data"]
    assert stub.writes == 2


def test_a_write_that_fails_does_not_keep_the_others_from_being_tried() -> None:
    places, stub, mapped = _make()
    stub.fails_at = 0

    with pytest.raises(MemoryFault):
        places.write_physical_many([(CODE, b"code"), (DATA, b"data"), (CODE + 8, b"more")])

    assert mapped.read(DATA, 4) == b"data"
    assert stub.ram.read(CODE + 8, 4) == b"more"
