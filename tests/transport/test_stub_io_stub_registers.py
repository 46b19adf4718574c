import socket
import struct

import pytest

from kprobes.errors import FormatError, TargetError
from tests.build.stub import G_SIZE, FakeStub, packet
from tests.build.stub_client import abandoned, opened


def test_registers_have_names_and_unavailable_ones_are_left_out() -> None:
    fake = FakeStub()

    with opened(fake) as stub:
        found = stub.registers(2)

    assert found == {"rax": 0x0202020202020202, "rip": 0x0202020202020202, "eflags": 0x02020202}


def test_a_register_beyond_the_g_packet_is_read_by_itself() -> None:
    with opened(FakeStub()) as stub:
        assert stub.register(1, "ttbr1") == 0x0123456789ABCDEF


def test_written_registers_are_read_back_on_that_vcpu_only() -> None:
    fake = FakeStub()
    with opened(fake) as stub:
        other = stub.registers(1)

        stub.set_registers(2, {"rip": 0xFFFFFFFF81000000, "eflags": 2})

        assert stub.registers(2) == {
            "rax": 0x0202020202020202,
            "rip": 0xFFFFFFFF81000000,
            "eflags": 2,
        }
        assert stub.registers(1) == other
    # All at once: who is killed in the middle has changed nothing.
    assert sum(asked[:1] in (b"G", b"P") for asked in fake.asked) == 1


def test_registers_that_a_monitor_changes_in_between_stay_as_that_left_them() -> None:
    fake = FakeStub()
    with opened(fake) as stub:
        # What was read since the guest stopped is what they must still be.
        stub.registers(1)
        looks = 1

        def shown(sock: socket.socket) -> None:
            nonlocal looks
            looks += 1
            fake.registers[1][:] = bytes([looks]) * G_SIZE
            sock.sendall(packet(fake.registers[1][:20].hex().encode() + b"x" * 20))

        fake.hooks[b"g"] = shown
        with pytest.raises(TargetError, match="somebody else has changed the registers of vCPU 1"):
            stub.set_registers(1, {"rip": 0xFFFFFFFF81000000})
        del fake.hooks[b"g"]

        assert looks == 2
        assert stub.registers(1)["rip"] == 0x0202020202020202


def test_segments_are_put_back_although_the_guests_tables_are_elsewhere_now() -> None:
    # As in x86_cpu_gdb_load_seg() of QEMU: a segment is looked up by the CR3 that is there when its
    # selector changes, and stays as it was where that leads nowhere.
    core = (
        b'<feature name="core"><reg name="cs" bitsize="64"/><reg name="cr3" bitsize="64"/>'
        b'<reg name="eflags" bitsize="32"/><reg name="st0" bitsize="80"/></feature>'
    )
    kernel, user, tables, gone = 0x10, 0x33, 0x1000, 0x2000
    fake = FakeStub(answers={b"qXfer:features:read:core.xml": b"l" + core})
    values = fake.registers[1]
    values[:16] = struct.pack("<QQ", kernel, gone)

    def is_restored() -> bool:
        return sum(asked == b"g" for asked in fake.asked) > 1

    def shown(sock: socket.socket) -> None:
        if is_restored():
            values[:16] = struct.pack("<QQ", user, tables)
            del fake.hooks[b"g"]
        sock.sendall(packet(values[:20].hex().encode() + b"x" * 20))

    def taken(sock: socket.socket) -> None:
        segment, table = struct.unpack("<QQ", bytes.fromhex(fake.asked[-1][1:33].decode()))
        held, held_table = struct.unpack("<QQ", values[:16])
        if segment != held and held_table == tables:
            held = segment
        values[:16] = struct.pack("<QQ", held, table)
        sock.sendall(packet(b"OK"))

    with opened(fake) as stub:
        stub.registers(1)
        fake.hooks |= {b"g": shown, b"G": taken}
        with pytest.raises(TargetError, match="somebody else has changed the registers of vCPU 1"):
            stub.set_registers(1, {"eflags": 2})

        found = stub.registers(1)
    assert (found["cs"], found["cr3"]) == (user, tables)


def test_what_was_overwritten_is_returned() -> None:
    with opened(FakeStub()) as stub:
        assert stub.set_registers(2, {"rip": 5}) == {"rip": 0x0202020202020202}


def test_a_register_beyond_the_g_packet_is_not_written() -> None:
    fake = FakeStub()
    with opened(fake) as stub:
        before = stub.registers(1)

        with pytest.raises(TargetError, match=r"register ttbr1 of vCPU 1 .* cannot be written"):
            stub.set_registers(1, {"rip": 1, "ttbr1": 2})

        assert stub.registers(1) == before
    assert not any(asked[:1] in (b"G", b"P") for asked in fake.asked)


def test_a_register_that_the_stub_does_not_show_is_named() -> None:
    fake = FakeStub(answers={b"g": b"x" * 16 + b"01" * 8})

    with opened(fake) as stub:
        shown = stub.registers(1)
        with pytest.raises(TargetError, match="does not show register rax of vCPU 1"):
            shown["rax"]
        with pytest.raises(TargetError, match=r"register rax of vCPU 1 .* cannot be written"):
            stub.set_registers(1, {"rax": 1})

    assert shown == {"rip": 0x0101010101010101}


def test_what_the_stub_does_not_have_is_named() -> None:
    with opened(FakeStub()) as stub:
        with pytest.raises(TargetError, match="vCPU 9"):
            stub.registers(9)
        with pytest.raises(TargetError, match="'cr9'"):
            stub.register(1, "cr9")
        with pytest.raises(TargetError, match="'cr9'"):
            stub.set_registers(1, {"cr9": 1})


def test_a_description_without_end_is_refused() -> None:
    fake = FakeStub(answers={b"qXfer": b"m" + b" " * 500}, packet_size=0x10000)

    with abandoned(fake) as stub, pytest.raises(FormatError, match="has no end"):
        stub.registers(1)


def test_at_a_breakpoint_registers_are_read_once_and_nothing_is_selected() -> None:
    fake = FakeStub()
    fake.hooks[b"vCont;c"] = lambda sock: fake.stop(sock, b"T05thread:02;")
    with opened(fake) as stub:
        stub.registers(1)
        stub.resume()
        assert stub.wait(5) is not None
        fake.asked.clear()

        stub.set_registers(2, {"rip": stub.registers(2)["rip"] + 1})
        stub.set_registers(2, {"rip": 7})

        # The second time they are read anew: QEMU may not have taken every bit that was written.
        assert [asked[:1] for asked in fake.asked] == [b"g", b"g", b"G", b"g", b"g", b"G"]
        assert stub.registers(2)["rip"] == 7
