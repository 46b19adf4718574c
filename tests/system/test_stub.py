"""The stub's client, guest RAM and monitors on a QEMU that was started by hand."""

import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import pytest
from msgspec import Struct

from kprobes.errors import GuestGoneError, MemoryFault, UnreachableError
from kprobes.transport.connect import connect
from kprobes.transport.find_ram import open_ram
from kprobes.transport.stub import Stub
from tests.build.plain_guest import PlainGuest, plain_guest
from tests.build.waiting import PATIENCE_S

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

Reached = tuple[PlainGuest, str]


class Facts(Struct, frozen=True, kw_only=True):
    """What differs between two architectures' guests.

    Attributes:
        name: of the architecture, as the stub says it.
        are_kernels: whether a vCPU's registers are those of a kernel that runs.
        is_inside: whether it is in the kernel just now.
        pc: the instruction pointer's name.
        kept: two registers' names, and what they are set to.
        ram: where memory begins.
        unmapped: an address that nothing can be at.
        shown: what the monitor tells of a vCPU.
    """

    name: str
    are_kernels: Callable[[Mapping[str, int]], bool]
    is_inside: Callable[[Mapping[str, int]], bool]
    pc: str
    kept: Mapping[str, int]
    ram: int
    unmapped: int
    shown: str


INFO = {
    "amd64": Facts(
        name="i386:x86-64",
        are_kernels=lambda found: (
            found["cr0"] >> 31 & 1 == 1
            and found["efer"] & 0x500 == 0x500
            and found["cr3"] & ~0xFFF < 256 << 20
        ),
        is_inside=lambda found: found["rip"] >= 0xFFFFFFFF80000000 and found["cs"] & 3 == 0,
        pc="rip",
        kept={"r15": 0x0123456789ABCDEF, "rax": 1 << 63},
        ram=0,
        unmapped=0xFFFF000000000000 - 0x10,
        shown="CR3=",
    ),
    "arm64": Facts(
        name="aarch64",
        # PSTATE.M: EL0t, EL1t or EL1h.
        are_kernels=lambda found: found["cpsr"] & 0x1F in (0, 4, 5),
        is_inside=lambda found: found["pc"] >= 1 << 63,
        pc="pc",
        kept={"x28": 0x0123456789ABCDEF, "x0": 1 << 63},
        ram=1 << 30,
        unmapped=0xFFF0000000000000 - 0x10,
        shown="PSTATE=",
    ),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, arch: str) -> Generator[Reached]:
    directory, port = tmp_path_factory.mktemp("plain"), free_port()
    with plain_guest(directory, "-gdb", f"tcp::{port}", arch=arch) as guest:
        yield guest, f"localhost:{port}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, arch: str) -> Generator[Reached]:
    directory = tmp_path_factory.mktemp("shared")
    options = (
        *("-object", "memory-backend-memfd,id=ram,size=256M,share=on"),
        *("-machine", "memory-backend=ram"),
        *("-chardev", "socket,id=gdb,path=gdb.sock,server=on,wait=off", "-gdb", "chardev:gdb"),
        *("-qmp", "unix:qmp.sock,server=on,wait=off"),
        *("-monitor", "unix:monitor.sock,server=on,wait=off"),
    )
    with plain_guest(directory, *options, arch=arch) as guest:
        yield guest, str(directory / "gdb.sock")


@pytest.fixture
def info(arch: str) -> Facts:
    return INFO[arch]


@pytest.fixture(params=["plain", "shared"])
def reached(request: pytest.FixtureRequest) -> Reached:
    return request.getfixturevalue(request.param)


def test_registers_are_a_kernels(reached: Reached, info: Facts) -> None:
    _, address = reached

    with Stub.open(address) as stub:
        assert stub.ids() == (1, 2)
        assert stub.description.architecture == info.name
        for cpu in stub.ids():
            registers = stub.registers(cpu)
            assert info.are_kernels(registers)
            assert stub.register(cpu, info.pc) == registers[info.pc]


def test_written_registers_are_read_back_and_restored(reached: Reached, info: Facts) -> None:
    guest, address = reached

    with Stub.open(address) as stub:
        before = stub.registers(2)
        stub.set_registers(2, info.kept)
        changed = stub.registers(2)
        stub.set_registers(2, {name: before[name] for name in info.kept})
        after = stub.registers(2)

    assert changed == {**before, **info.kept}
    assert after == before
    assert guest.is_ticking()


def test_a_guest_of_any_kind_runs_on_after_detaching(reached: Reached) -> None:
    guest, address = reached

    for _ in range(5):
        with Stub.open(address) as stub:
            ticks = guest.ticks()
            time.sleep(0.1)
            assert guest.ticks() == ticks
            stub.resume()
        assert guest.is_ticking()


def test_reconnecting_to_a_stopped_guest_works(reached: Reached, info: Facts) -> None:
    guest, address = reached
    stub = Stub.open(address)
    stub.insert_breakpoint(idle_address(stub, info))

    # As a tracer that was killed.
    stub.close()
    ticks = guest.ticks()
    with Stub.open(address) as again:
        assert guest.ticks() == ticks
        assert again.ids() == (1, 2)
        # QEMU itself forgets those of the first vCPU only: the second would stay at its own.
        again.resume()
        assert guest.is_ticking()
        assert again.wait(0) is None

    assert guest.is_ticking()


def idle_address(stub: Stub, info: Facts) -> int:
    """Return where a vCPU comes by often: it is idle most of the time."""
    # Seen once, it may be in a repeated instruction, at which a step stays.
    seen: Counter[int] = Counter()
    for _ in range(100):
        for cpu in stub.ids():
            registers = stub.registers(cpu)
            if info.is_inside(registers):
                seen[registers[info.pc]] += 1
        often = [place for place, count in seen.items() if count > 2]
        if often:
            return often[0]
        stub.resume()
        time.sleep(0.01)
        stub.stop()
    raise AssertionError("no vCPU was seen in the kernel")


def step_away(stub: Stub, info: Facts, cpu: int) -> None:
    """Step one vCPU until it is elsewhere."""
    # QEMU may end a step before its instruction: another vCPU has come to the breakpoint at the
    # same time, or this one is kicked just then (cpu_tb_exec() takes that for the step's end).
    place = stub.registers(cpu)[info.pc]
    for _ in range(100):
        if stub.step(cpu).cpu == cpu and stub.registers(cpu)[info.pc] != place:
            return
    raise AssertionError(f"100 steps at {place:#x}")


def test_breakpoints_hit_and_steps_move_on(reached: Reached, info: Facts) -> None:
    guest, address = reached
    with Stub.open(address) as stub:
        place = idle_address(stub, info)
        for _ in range(3):
            stub.insert_breakpoint(place)
            stub.resume()
            reply = stub.wait(10)
            assert reply is not None
            assert (reply.signal, reply.cpu in (1, 2)) == (5, True)
            assert reply.cpu is not None
            assert stub.registers(reply.cpu)[info.pc] == place
            stub.remove_breakpoint(place)
            others = {cpu: stub.registers(cpu) for cpu in stub.ids() if cpu != reply.cpu}
            step_away(stub, info, reply.cpu)
            assert {cpu: stub.registers(cpu) for cpu in others} == others

        stub.remove_breakpoint(place)

    assert guest.is_ticking()


def test_memory_is_the_same_by_every_way(reached: Reached, info: Facts) -> None:
    guest, address = reached
    with Stub.open(address) as stub:
        assert stub.peer() == guest.pid
        best = open_ram(stub)
        process = open_ram(stub, backends=("process",))
        last = open_ram(stub, backends=("stub",))
        assert best.backend == ("shared" if "sock" in address else "process")
        assert best.runs == process.runs == last.runs
        spans = [(start, min(size, 0x20000)) for start, size in best.runs]
        spans += [(info.ram + 0x1000000 + 0x100003 * i, 4099) for i in range(64)]

        contents = best.read_many(spans)

        assert process.read_many(spans) == contents
        assert last.read_many(spans) == contents
        assert len(set(contents)) > 8
        best.close()
        process.close()


def test_views_show_what_the_guest_writes(shared: Reached) -> None:
    guest, address = shared
    with Stub.open(address) as stub:
        ram = open_ram(stub)
        start, size = ram.runs[-1]
        view = ram.view(start, size)
        assert view is not None
        before = view.copy()
        stub.resume()
        assert guest.is_ticking()
        with stub.paused():
            changed = (view != before).nonzero()[0]
            assert len(changed) > 0
            place = start + int(changed[0])
            assert stub.read_physical_many([(place, 1)]) == [view[changed[0]].tobytes()]
        del view
        ram.close()


def test_reading_through_the_stub_stops_a_running_guest_and_lets_it_run(
    reached: Reached, info: Facts
) -> None:
    guest, address = reached
    with Stub.open(address) as stub:
        ram = open_ram(stub, backends=("stub",))
        stub.resume()
        before = stub.stops

        ram.read_many([(info.ram + at, 5000) for at in (0x1000000, 0x2000000)])

        assert (stub.is_running, stub.stops) == (True, before + 1)
        assert guest.is_ticking()


def test_virtual_and_physical_addresses_agree(reached: Reached, info: Facts) -> None:
    _, address = reached
    with Stub.open(address) as stub:
        place = idle_address(stub, info)
        cpu = next(cpu for cpu in stub.ids() if stub.registers(cpu)[info.pc] == place)
        code = stub.read(place, 64, cpu=cpu)
        # As that vCPU sees it: arm64's programs may not read there.
        stub.monitor(f"cpu {cpu - 1}")
        found = re.search("gpa: (0x[0-9a-f]+)", stub.monitor(f"gva2gpa {place:#x}"))
        assert found is not None
        physical = int(found[1], 16)

        assert stub.read_physical_many([(physical, 64)]) == [code]
        stub.write_physical_many([(physical + i, code[i : i + 5]) for i in range(0, 60, 5)])
        assert stub.read(place, 64, cpu=cpu) == code
        with pytest.raises(MemoryFault):
            stub.read(info.unmapped, 8)
        assert stub.read_physical_many([(physical, 64)]) == [code]


def test_the_monitor_answers(reached: Reached, info: Facts) -> None:
    _, address = reached
    with Stub.open(address) as stub:
        assert stub.monitor("info status") == "VM status: paused\n"
        assert info.shown in stub.monitor("info registers")
        assert "unknown command" in stub.monitor("bogus")


@pytest.mark.alone
def test_a_second_client_is_told_and_the_guest_runs_after_both(reached: Reached) -> None:
    guest, address = reached
    with Stub.open(address) as stub:
        started = time.monotonic()
        with pytest.raises(UnreachableError, match="in use by another debugger"):
            Stub.open(address, timeout_s=0.5)
        assert time.monotonic() - started < PATIENCE_S
        assert stub.ids() == (1, 2)

    # QEMU now serves the client that gave up; it must not leave the guest stopped.
    assert guest.is_ticking()
    with Stub.open(address) as stub:
        assert stub.ids() == (1, 2)


def test_a_stalled_qemu_is_given_up_and_lets_its_guest_run_later(reached: Reached) -> None:
    guest, address = reached
    stub = Stub.open(address, timeout_s=0.5)

    os.kill(guest.pid, signal.SIGSTOP)
    with pytest.raises(GuestGoneError, match="did not answer"):
        stub.ids()
    stub.detach()
    os.kill(guest.pid, signal.SIGCONT)

    assert guest.is_ticking()


@pytest.mark.parametrize("name", ["qmp.sock", "monitor.sock"])
def test_a_monitor_leads_to_the_stub(shared: Reached, name: str) -> None:
    guest, address = shared

    with connect(f"qemu:{guest.directory / name}") as stub:
        assert stub.address == str(Path(address).resolve())
        assert stub.peer() == guest.pid

    assert guest.is_ticking()


@pytest.mark.parametrize("kind", ["-qmp", "-monitor"])
def test_a_monitor_opens_a_stub_and_a_dead_guest_is_gone(
    tmp_path: Path, kind: str, arch: str, info: Facts
) -> None:
    with plain_guest(tmp_path, kind, "unix:m.sock,server=on,wait=off", arch=arch) as guest:
        for _ in range(2):
            with connect(f"qemu:{tmp_path / 'm.sock'}") as stub:
                place = Path(stub.address)
                assert stub.ids() == (1, 2)
            assert guest.is_ticking()
            assert not place.parent.exists()

        stub = connect(f"qemu:{tmp_path / 'm.sock'}")
        ram = open_ram(stub)
        stub.resume()
        os.kill(guest.pid, signal.SIGKILL)

        with pytest.raises(GuestGoneError):
            stub.wait(5)
        with pytest.raises(GuestGoneError):
            ram.read(info.ram + 0x1000000, 8)
        stub.detach()
        ram.close()
        assert not Path(stub.address).parent.exists()
