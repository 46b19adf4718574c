import pytest

from kprobes.errors import MemoryFault, TargetError
from tests.build.stub import FakeStub
from tests.build.stub_client import opened


def test_memory_is_written_virtual_and_physical() -> None:
    fake = FakeStub()

    with opened(fake) as stub:
        stub.write(3, b"virtual" * 200)
        stub.write_physical_many([(0x10 * i, bytes([i])) for i in range(256)])

        assert stub.read(3, 1400) == b"virtual" * 200
        assert stub.read_physical_many([(0x10 * i, 2) for i in range(256)]) == [
            bytes([i, 0xEE]) for i in range(256)
        ]
        assert stub.read_physical_many([(0x20, 0)]) == [b""]
    assert not fake.is_physical


def test_a_fault_tells_where_and_leaves_virtual_mode() -> None:
    fake = FakeStub()

    with opened(fake) as stub:
        with pytest.raises(MemoryFault, match="E14") as fault:
            stub.read_physical_many([(0, 8), (0x10000, 8), (0x20000, 8)])
        assert (fault.value.addr, fault.value.size) == (0x10000, 8)
        with pytest.raises(MemoryFault, match="cannot write 3 bytes at 0x10000") as fault:
            stub.write_physical_many([(0, b"ab"), (0x10000, b"abc"), (8, b"cd")])
        assert (fault.value.addr, fault.value.size) == (0x10000, 3)

        assert not fake.is_physical
        assert bytes(fake.physical[:10]) == b"ab" + b"\xee" * 6 + b"cd"
        assert stub.read(0, 4) == bytes(range(4))


def test_a_short_answer_to_a_read_is_a_fault() -> None:
    fake = FakeStub(answers={b"m10,": b"00"})

    with opened(fake) as stub, pytest.raises(MemoryFault):
        stub.read(0x10, 2)


def test_a_stub_without_physical_mode_is_not_written_to_by_accident() -> None:
    fake = FakeStub(answers={b"qqemu.PhyMemMode": b""})

    with opened(fake) as stub, pytest.raises(TargetError, match="physical"):
        stub.write_physical(0, b"x")

    assert not any(request.startswith(b"M") for request in fake.asked)


def test_a_refused_physical_mode_writes_nothing() -> None:
    fake = FakeStub()

    with opened(fake) as stub:
        fake.answers[b"Qqemu.PhyMemMode:1"] = b"E22"
        with pytest.raises(TargetError, match="physical"):
            stub.write_physical(0, b"x")

    assert not any(request.startswith(b"M") for request in fake.asked)
