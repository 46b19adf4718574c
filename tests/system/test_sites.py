"""Entries of functions of guests' kernels, beside their own list of what can be traced.

Objects made anew, beside what objdump and readelf show of them.
"""

import re
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

import kprobes
from kprobes.inspect.sites import FunctionEntry, sites_of_file, sites_of_kernel
from kprobes.inspect.subject import snapshot_of_guest
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.objects import COMMANDS, make
from tests.build.waiting import PATIENCE_S
from tests.system.oracle import TRACING

pytestmark = pytest.mark.guest

_CHOSEN = "vfs_*"


@pytest.fixture(scope="module")
def session(arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(arch=arch)) as session:
        yield session


def entries(session: GuestSession, pattern: str = "*") -> list[FunctionEntry]:
    guest, machine = session.driver.guest, session.machine
    assert machine is not None
    assert machine.kernel is not None
    snapshot = snapshot_of_guest(guest.memory, guest.kernel, images=[machine.kernel], entries=())
    return list(sites_of_kernel(snapshot, pattern))


def run(session: GuestSession, command: str) -> str:
    assert session.machine is not None
    return session.machine.run(f"cd {TRACING} && {command}", PATIENCE_S).output.decode()


@pytest.mark.arches("amd64", "arm64")
def test_sites_are_those_that_the_kernel_s_tracer_lists(session: GuestSession) -> None:
    listed = run(session, "cat available_filter_functions").splitlines()
    names = {line.split()[0] for line in listed}

    found = entries(session)

    # Names that several functions have are in both as often as they are there.
    ours = {each.name for each in found if each.memory and each.memory.site}
    assert len(ours) > 20_000
    assert ours - names == set()
    # Those that the kernel has no name for, and names that another one at the place has.
    missing = {name for name in names - ours if not name.startswith("__ftrace_invalid_address__")}
    assert len(missing) < len(names) // 100


@pytest.mark.arches("amd64", "arm64")
def test_a_site_is_a_nop_that_was_a_call_and_calls_while_it_is_traced(
    session: GuestSession, arch: str
) -> None:
    idle = {each.name: each for each in entries(session, _CHOSEN)}
    run(session, f"echo '{_CHOSEN}' > set_ftrace_filter; echo function > current_tracer")
    try:
        traced = {each.name: each for each in entries(session, _CHOSEN)}
    finally:
        run(session, "echo nop > current_tracer; echo > set_ftrace_filter")

    assert len(idle) > 50
    for name, before in idle.items():
        assert before.file is not None
        assert before.memory is not None
        if (site := before.memory.site) is None:
            continue
        was, now = before.file.site, traced[name].memory
        assert site.kind == "nop"
        assert was is not None
        assert was.kind == ("call" if arch == "amd64" else "nop")
        assert was.callee == ("__fentry__" if arch == "amd64" else "")
        assert now is not None
        assert now.site is not None
        assert (now.site.kind, now.site.offset) == ("call", site.offset)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [each for each in COMMANDS if not each.startswith("arm64")])
def test_entries_are_where_objdump_and_readelf_have_them(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path)
    listing = _run("objdump", "-dr", "--no-show-raw-insn", str(path))
    symbols = _run("readelf", "-sW", str(path))

    for each in sites_of_file(path, "*"):
        assert re.search(rf" {each.addr:016x} +{each.size} FUNC .* {each.name}\n", symbols)
        (text,) = re.findall(rf"(?m)^{each.addr:016x} <{each.name}>:\n((?:.+\n)*)", listing)
        site = each.now.site
        called = re.findall(r"(?m)^ *([0-9a-f]+):.*(?:\n.*)?\b(mcount|__fentry__)\b", text)
        if site is not None and site.callee:
            assert [(int(at, 16), callee) for at, callee in called] == [
                (each.addr + site.offset, site.callee)
            ]
        else:
            assert called == []
        for part in each.now.parts:
            if part.text and part.offset >= 0:
                first = re.split("[ ;]", part.text)[0].removesuffix("q")
                assert re.search(rf"(?m)^ *{each.addr + part.offset:x}:\t{first}", text)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
