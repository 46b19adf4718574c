import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import GuestGoneError, MemoryFault
from kprobes.transport.ram import (
    FileRun,
    GuestRam,
    ProcessRam,
    ProcessRun,
    RunMap,
    SharedRam,
    StubRam,
)
from kprobes.transport.stub import Stub
from kprobes.units import Phys
from tests.build.stub import FakeStub, listening

# Two neighbours that lie apart in the file, a hole, and a third.
RUNS = ((Phys(0x0), 0x1000), (Phys(0x1000), 0x1000), (Phys(0x3000), 0x1000))
OFFSETS = (0x2000, 0x0, 0x4000)
PAGES = os.urandom(0x5000)


def expected(addr: int, size: int) -> bytes:
    ram = bytearray(0x4000)
    for (start, length), offset in zip(RUNS, OFFSETS, strict=True):
        ram[start : start + length] = PAGES[offset : offset + length]
    return bytes(ram[addr : addr + size])


@contextmanager
def shared() -> Generator[SharedRam]:
    fd = os.memfd_create("ram")
    os.write(fd, PAGES)
    path = Path(f"/proc/self/fd/{fd}")
    ram = SharedRam(
        [
            FileRun(start=start, size=size, path=path, offset=offset)
            for (start, size), offset in zip(RUNS, OFFSETS, strict=True)
        ]
    )
    yield ram
    ram.close()
    os.close(fd)


@contextmanager
def process() -> Generator[ProcessRam]:
    with mmap.mmap(-1, len(PAGES)) as memory:
        memory.write(PAGES)
        view = np.frombuffer(memory, np.uint8)
        base = int(view.ctypes.data)
        ram = ProcessRam(
            os.getpid(),
            [
                ProcessRun(start=start, size=size, addr=base + offset)
                for (start, size), offset in zip(RUNS, OFFSETS, strict=True)
            ],
        )
        yield ram
        ram.close()
        del view


@contextmanager
def stub_only() -> Generator[StubRam]:
    fake = FakeStub(physical=bytearray(expected(0, 0x4000)))
    with listening(fake) as path, Stub.open(path) as stub:
        stub.resume()
        yield StubRam(stub, RUNS)
        assert stub.is_running


RAM_BACKENDS = {"shared": shared, "process": process, "stub": stub_only}


@pytest.fixture(params=sorted(RAM_BACKENDS))
def ram(request: pytest.FixtureRequest) -> Generator[GuestRam]:
    with RAM_BACKENDS[request.param]() as ram:
        yield ram


def test_every_way_reads_and_writes_the_same(ram: GuestRam) -> None:
    assert ram.runs == RUNS
    assert ram.read(0x10, 0x20) == expected(0x10, 0x20)
    assert ram.read_many([(0x3000, 0x1000), (0x8, 0)]) == [expected(0x3000, 0x1000), b""]

    ram.write(0x3FF0, b"sixteen bytes xx")

    assert ram.read(0x3FE8, 0x18) == expected(0x3FE8, 8) + b"sixteen bytes xx"


def test_reads_and_writes_cross_from_a_run_into_its_neighbour(ram: GuestRam) -> None:
    assert ram.read(0xFF0, 0x20) == expected(0xFF0, 0x20)

    ram.write(0xFFC, b"neighbours")

    assert ram.read(0xFF8, 0x10) == expected(0xFF8, 4) + b"neighbours" + expected(0x1006, 2)


@pytest.mark.parametrize(
    ("addr", "size"), [(0x1FFF, 2), (0x2000, 1), (0x2FFF, 2), (0x3FFF, 2), (-1, 2), (1 << 60, 8)]
)
def test_what_is_not_ram_faults_and_nothing_is_written(ram: GuestRam, addr: int, size: int) -> None:
    before = ram.read_many([(0, 0x2000), (0x3000, 0x1000)])

    with pytest.raises(MemoryFault) as fault:
        ram.read(addr, size)
    assert (fault.value.addr, fault.value.size) == (addr, size)
    with pytest.raises(MemoryFault, match="cannot write"):
        ram.write(addr, bytes(size))
    with pytest.raises(MemoryFault):
        ram.view(addr, size)
    assert ram.read_many([(0, 0x2000), (0x3000, 0x1000)]) == before


def test_a_view_of_a_shared_file_changes_with_it() -> None:
    with shared() as ram:
        view = ram.view(0x3000, 0x10)

        assert view is not None
        assert view.tobytes() == expected(0x3000, 0x10)
        ram.write(0x3004, b"new")
        assert view[4:7].tobytes() == b"new"
        view[0] = 0x5A
        assert ram.read(0x3000, 1) == b"\x5a"


def test_a_view_needs_its_bytes_side_by_side() -> None:
    with shared() as ram:
        assert ram.view(0xFFF, 2) is None


def test_a_view_outlives_its_ram() -> None:
    with shared() as ram:
        view = ram.view(0x3000, 0x10)

    assert view is not None
    assert view.tobytes() == expected(0x3000, 0x10)


def test_other_ways_have_no_views() -> None:
    with process() as ram:
        assert ram.view(0, 1) is None
    with stub_only() as ram:
        assert ram.view(0, 1) is None


def test_a_run_beyond_the_files_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ram"
    path.write_bytes(bytes(0x1000))

    with pytest.raises(ValueError, match="beyond the end"):
        SharedRam([FileRun(start=Phys(0), size=0x1000, path=path, offset=1)])


def test_an_address_that_the_process_does_not_map_faults() -> None:
    ram = ProcessRam(os.getpid(), [ProcessRun(start=Phys(0x5000), size=0x1000, addr=0x1000)])

    with pytest.raises(MemoryFault, match="in the QEMU process") as fault:
        ram.read(0x5008, 8)

    assert fault.value.addr == 0x5008
    ram.close()


def test_reading_after_the_end_of_the_process_is_a_guest_gone() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    ram = ProcessRam(pid, [ProcessRun(start=Phys(0), size=0x1000, addr=0x1000)])
    os.kill(pid, 9)
    os.waitpid(pid, 0)

    with pytest.raises(GuestGoneError):
        ram.read(0, 8)
    ram.close()


def test_one_stop_serves_many_reads_through_the_stub() -> None:
    with listening(FakeStub()) as path, Stub.open(path) as stub:
        ram = StubRam(stub, RUNS)
        stub.resume()
        before = stub.stops

        ram.read_many([(0x10 * i, 8) for i in range(50)])

        assert stub.stops == before + 1


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(1, 64)), min_size=1, max_size=6),
    st.integers(-8, 600),
    st.integers(0, 300),
)
def test_pieces_cover_exactly_what_is_asked_or_it_faults(
    unproven: list[tuple[int, int]], addr: int, size: int
) -> None:
    runs: list[tuple[Phys, int]] = []
    at = 0
    for gap, length in unproven:
        runs.append((Phys(at + gap), length))
        at += gap + length
    covered = {byte for start, length in runs for byte in range(start, start + length)}
    wanted = list(range(addr, addr + size))

    try:
        pieces = RunMap(runs).split(addr, size)
    except MemoryFault:
        assert not covered.issuperset(wanted)
        return

    assert [runs[i][0] + at + k for i, at, n in pieces for k in range(n)] == wanted


@pytest.mark.parametrize("runs", [[(4, 0)], [(4, 4), (7, 4)], [(8, 4), (0, 4)], [(-4, 2)]])
def test_senseless_runs_are_our_bug(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="runs of RAM"):
        RunMap([(Phys(start), size) for start, size in runs])
