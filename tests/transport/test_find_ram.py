import mmap
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kprobes.errors import FormatError, TargetError
from kprobes.transport.find_ram import Mapping, open_ram, parse_host_address, parse_maps
from kprobes.transport.stub import Stub
from tests.build.stub import FakeStub, listening

SIZE = 0x8000
MTREE = """FlatView #0
 AS "memory", root: system
  0000000000000000-0000000000002fff (prio 0, ram): ram @0000000000001000
  0000000000003000-0000000000003fff (prio 0, rom): ram @0000000000004000
  0000000000004000-0000000000005fff (prio 0, ram): ram @0000000000005000
"""
"""The guest's memory is at 0x1000 of the block."""


@dataclass
class Guest:
    """A process (this one) that has a block of RAM, and a stub that shows the same."""

    fake: FakeStub
    memory: mmap.mmap

    def print(self, command: str, text: str) -> None:
        self.fake.answers[b"qRcmd," + command.encode().hex().encode()] = (
            text.encode().hex().encode()
        )

    def open(self, backends: Sequence[str] = ("shared", "process", "stub")) -> str:
        with listening(self.fake) as path, Stub.open(path) as stub:
            ram = open_ram(stub, backends=backends)
            assert ram.runs == ((0, 0x3000), (0x4000, 0x2000))
            assert ram.read(0x4FF0, 0x20) == bytes(self.fake.physical[0x4FF0:0x5010])
            ram.write(0x4008, b"new")
            through_block = self.memory[0x5008:0x500B] == b"new"
            through_stub = bytes(self.fake.physical[0x4008:0x400B]) == b"new"
            assert through_block != through_stub
            ram.close()
            return ram.backend


@contextmanager
def guest(fd: int, flags: int = mmap.MAP_SHARED) -> Generator[Guest]:
    content = os.urandom(SIZE)
    with mmap.mmap(fd, SIZE, flags) as memory:
        memory.write(content)
        view = np.frombuffer(memory, np.uint8)
        found = Guest(FakeStub(physical=bytearray(content[0x1000:])), memory)
        found.print("info mtree -f", MTREE)
        found.print(
            "gpa2hva 0x0",
            f"Host virtual address for 0x0 (ram) is {int(view.ctypes.data) + 0x1000:#x}\r\n",
        )
        yield found
        del view


@pytest.fixture
def shared() -> Generator[Guest]:
    fd = os.memfd_create("ram")
    os.ftruncate(fd, SIZE)
    with guest(fd) as found:
        yield found
    os.close(fd)


@pytest.fixture
def private() -> Generator[Guest]:
    with guest(-1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as found:
        yield found


def test_a_file_that_the_process_shares_is_mapped(shared: Guest) -> None:
    assert shared.open() == "shared"


def test_private_memory_is_read_from_the_process(private: Guest) -> None:
    assert private.open() == "process"


@pytest.mark.parametrize("backend", ["shared", "process", "stub"])
def test_a_way_can_be_asked_for(shared: Guest, backend: str) -> None:
    assert shared.open((backend,)) == backend


def test_another_process_than_the_guests_is_not_believed(shared: Guest) -> None:
    shared.fake.physical[0x4000:] = os.urandom(0x3000)

    assert shared.open() == "stub"


def test_no_way_left_says_why_each_failed(private: Guest) -> None:
    with pytest.raises(TargetError, match="shared: RAM at 0x0 is not in a shared file"):
        private.open(("shared",))


def test_a_block_that_the_process_does_not_have_is_read_through_the_stub(private: Guest) -> None:
    private.print("gpa2hva 0x0", "Host virtual address for 0x0 (ram) is 0x1000\r\n")

    assert private.open() == "stub"


@pytest.mark.parametrize(
    "text",
    ["", "Memory at address 0xfebc0000 is not RAM", "No memory is mapped at address 0x1", "is 0xg"],
)
def test_no_host_address_is_a_format_error(text: str) -> None:
    with pytest.raises(FormatError, match="gpa2hva"):
        parse_host_address(text)


def test_mappings_are_read_with_their_files() -> None:
    lines = [
        "7fdcd3e00000-7fdcf3e00000 rw-s 00001000 00:2d 12345      /tmp/my ram (deleted)\n",
        "7ffd1000-7ffd2000 rw-p 00000000 00:00 0 \n",
    ]

    assert parse_maps(iter(lines)) == [
        Mapping(
            start=0x7FDCD3E00000,
            stop=0x7FDCF3E00000,
            flags="rw-s",
            offset=0x1000,
            inode=12345,
            path="/tmp/my ram (deleted)",
        ),
        Mapping(start=0x7FFD1000, stop=0x7FFD2000, flags="rw-p", offset=0, inode=0, path=""),
    ]


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(FormatError):
        parse_maps(iter(["nonsense\n"]))
