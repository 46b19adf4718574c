"""Guests of every architecture are booted, reached and read alike."""

import gzip
from collections.abc import Iterator

import pytest

from kprobes.open import GuestSession, attach
from kprobes.plan.ftrace import read_sites
from kprobes.transport.qemu import Machine

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

WORDS = {"amd64": b"x86_64\n", "arm64": b"aarch64\n"}


@pytest.fixture(scope="module")
def session(guest: Machine) -> Iterator[GuestSession]:
    with attach(f"{guest.stub_address}") as attached:
        yield attached


def test_a_guest_names_its_architecture(guest: Machine, session: GuestSession, arch: str) -> None:
    said = guest.run("uname -m; uname -r", 180).output

    assert said.startswith(WORDS[arch])
    assert session.kernel.arch.encode() + b"\n" == WORDS[arch]
    assert session.kernel.release.encode() in said


# Of arm64 test_find has it.
@pytest.mark.arches("amd64", "arm64", matrix="arm64")
def test_every_listed_symbol_is_the_kernels_own(guest: Machine, session: GuestSession) -> None:
    output = gzip.decompress(guest.run("gzip -c /proc/kallsyms", 120).output).decode()
    words = [line.split() for line in output.splitlines()]
    listed = {(int(w[0], 16), w[1], w[2]) for w in words if not w[3:]}
    found = {(int(s.addr), s.type, s.name) for s in session.kernel.symbols.glob("*")}

    assert listed <= found
    # What is not listed is data that was found by other means.
    assert {kind for _, kind, _ in found - listed} <= {"d"}


def test_data_is_found_whether_it_is_listed_or_not(guest: Machine, session: GuestSession) -> None:
    memory, symbols = session.driver.guest.memory, session.kernel.symbols
    types = session.kernel.types

    assert types is not None
    comm = symbols.named("init_task").addr + types.offset("task_struct", "comm")
    assert memory.read(comm, 9) == b"swapper/0"
    assert memory.read(symbols.named("nr_cpu_ids").addr, 4)[0] == guest.options.cpus
    for name in ("modules", "kprobe_blacklist", "shepherd", "__start___jump_table"):
        assert symbols.find(name) is not None, name


def test_the_function_tracers_sites_are_those_of_the_kernel(
    guest: Machine, session: GuestSession
) -> None:
    memory, kernel = session.driver.guest.memory, session.kernel
    own = int(guest.run("wc -l </sys/kernel/tracing/available_filter_functions", 180).output)

    assert len(read_sites(memory, kernel).addrs) >= own > 10_000


def test_the_slide_is_what_the_kernel_notes_for_crash_dumps(session: GuestSession) -> None:
    memory, kernel = session.driver.guest.memory, session.kernel

    note = memory.u64(kernel.symbols.named("vmcoreinfo_data").addr)

    assert f"KERNELOFFSET={kernel.slide:x}\n".encode() in memory.read(note, 4096)
