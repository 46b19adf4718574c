"""A kernel that is found in memory: of a process that is no QEMU, but has such memory."""

import mmap
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kprobes.formats.vmcoreinfo import VmcoreInfo, find
from kprobes.inspect import targets
from kprobes.inspect.targets import read_kernel
from kprobes.transport.find_ram import Mapping
from kprobes.transport.running import Qemu
from kprobes.units import MIB
from tests.build.qemus import command_line

PAGE = 4096
TEXT = "OSRELEASE={}\nBUILD-ID={}\nSYMBOL(swapper_pg_dir)=ffffffffa0210000\n"
COMMAND = command_line("qemu-system-x86_64 -m 192")


@contextmanager
def guest(*texts: tuple[int, str]) -> Generator[Qemu]:
    """Have this process pass for a QEMU whose guest has some texts in its memory."""
    # Shared: what is read of a private one that was never touched is nobody's page.
    with mmap.mmap(-1, COMMAND.memory, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as memory:
        for at, text in texts:
            memory[at : at + len(text)] = text.encode()
        view = np.frombuffer(memory, np.uint8)
        start = view.ctypes.data
        del view
        ram = Mapping(
            start=start, stop=start + len(memory), flags="rw-s", offset=0, inode=0, path=""
        )
        yield Qemu(pid=os.getpid(), command=COMMAND, files=None, ram=ram)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_a_kernel_is_found_in_memory_of_which_nothing_else_is_touched() -> None:
    text = TEXT.format("6.1.0", "abcd")
    # The second one is the same kernel's, in a note; the third says nothing of symbols.
    with guest((130 * MIB, text), (3 * PAGE + 24, text), (7 * PAGE, "OSRELEASE=5.10\n")) as qemu:
        before = resident()
        found = read_kernel(qemu)
        assert resident() - before < 64 * MIB
    assert found is not None
    assert (found.release, found.build_id.hex()) == ("6.1.0", "abcd")


def test_of_two_kernels_in_memory_none_is_known_to_run() -> None:
    texts = [(n * PAGE, TEXT.format(f"6.{n}.0", "abcd")) for n in range(2)]
    with guest(*texts) as qemu:
        assert read_kernel(qemu) is None


def test_there_is_a_limit_of_time() -> None:
    with guest((0, TEXT.format("6.1.0", "abcd"))) as qemu:
        assert read_kernel(qemu, at_most_s=0) is None
        assert read_kernel(qemu) is not None


def test_time_that_others_have_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(data: bytes) -> Iterator[VmcoreInfo]:
        time.sleep(0.6)
        return find(data)

    monkeypatch.setattr(targets, "find", slowly)
    with guest((0, TEXT.format("6.1.0", "abcd"))) as qemu:
        assert read_kernel(qemu, at_most_s=0.5) is not None


def test_memory_that_is_gone_or_hidden_tells_nothing() -> None:
    with guest((0, TEXT.format("6.1.0", "abcd"))) as qemu:
        pass
    assert read_kernel(qemu) is None
    assert read_kernel(Qemu(pid=1 << 30, command=COMMAND, files=None, ram=qemu.ram)) is None
    assert read_kernel(Qemu(pid=os.getpid(), command=COMMAND, files=None, ram=None)) is None
