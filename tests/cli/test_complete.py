"""Completions of a command line, and where they come from."""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobes.arch.x86_64.paging import PageTables
from kprobes.image.build import Region, extract
from kprobes.image.cache import KernelCache
from kprobes.transport.qemu_command import Places
from kprobes.units import Addr
from tests.build.journals import write_journal
from tests.build.linux import RODATA, LinuxSpec, boot

_KPROBE = Path(sys.executable).with_name("kprobe")


@pytest.fixture(autouse=True)
def _own_directories(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Names of sockets are short.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            monkeypatch.setenv(name, directory)
        monkeypatch.setenv("KPROBES_TARGET", "guest")
        yield


def offered(line: str) -> set[str]:
    """Ask as the scripts of shells do: by the environment, with an answer on descriptor 8."""
    with tempfile.TemporaryFile() as file:
        asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line}
        asked |= {"COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE_SHELL": "fish"}
        command = f"{shlex.quote(str(_KPROBE))} 8>&{file.fileno()} 9>/dev/null"
        subprocess.run(
            ["bash", "-c", command],
            pass_fds=[file.fileno()],
            env={**os.environ, **asked},
            check=False,
            capture_output=True,
        )
        file.seek(0)
        return {text.partition("\t")[0].rstrip() for text in file.read().decode().splitlines()}


def store_kernel() -> None:
    """Have a kernel in the cache, as after a look at a guest."""
    linux = boot(LinuxSpec())
    start = Addr(linux.spec.text + RODATA)
    memory = PageTables(linux.ram, linux.cr3)
    build = extract(memory, [Region(addr=start, data=memory.read(start, 0x2_0000))])
    KernelCache(Path(os.environ["XDG_CACHE_HOME"]) / "kprobes" / "kernels").store(build)


def test_commands_and_options_are_offered() -> None:
    assert offered("kprobe ") >= {"trace", "check", "list", "xray", "guest", "status", "--version"}
    assert offered("kprobe st") == {"stats", "status"}
    assert offered("kprobe trace --call") == {"--call-duration"}
    assert offered("kprobe trace 'p f' --filter 'x == 1' --call") == {"--call-duration"}
    assert offered("kprobe check 'p f' --strategy b") == {"breakpoint"}
    assert offered("kprobe guest --arch ") >= {"amd64", "arm64"}


def test_trace_options_are_those_that_the_command_has() -> None:
    assert offered("kprobe record -O no") == {"norecord-tgid", "nostacktrace", "nouserstacktrace"}
    assert offered("kprobe report -O re") == {"record-tgid"}
    assert offered("kprobe trace -O s") == {"stacktrace", "sym-addr", "sym-offset", "sym-userobj"}


def test_targets_are_those_of_this_machine_and_of_journals() -> None:
    write_journal("localhost:1", name="1-1")
    guest = Path(os.environ["XDG_RUNTIME_DIR"]) / "kprobes-1"
    guest.mkdir()
    places = Places(directory=guest, ram_directory=guest)
    places.stub.touch()

    known = {"host", "qemu:localhost:1"}
    assert offered("kprobe status -t ") == known
    assert offered("kprobe trace 'p f' --target ") == {*known, "auto", "guest"}
    places.qmp.touch()
    assert offered("kprobe status -t ") == {*known, f"qemu:{places.stub}"}


def test_functions_are_those_of_the_kernel_that_was_seen_last() -> None:
    assert offered("kprobe list do_") == set()

    store_kernel()

    assert offered("kprobe list v") == {"vfs_read"}
    assert offered("kprobe xray v") == {"vfs_read"}
    assert offered("kprobe trace 'p:open v") == {"p:open vfs_read"}
    assert offered("kprobe check 'p f' -q 'r vfs_") == {"r vfs_read"}
    assert offered("kprobe xray vfs_read --arm 'p v") == {"p vfs_read"}
    assert offered("kprobe trace 'p vfs_read f") == set()


def test_functions_of_the_host_are_its_own() -> None:
    names = re.findall(r"^\w+ [tT] (vfs_[\w.]*)", Path("/proc/kallsyms").read_text(), re.MULTILINE)

    assert offered("kprobe list -t host vfs_") == {*names}


def test_nothing_is_offered_for_a_guest_s_command() -> None:
    store_kernel()

    assert offered("kprobe trace --python x.py 'p v") == {"p vfs_read"}
    assert offered("kprobe trace --python x.py -- 'p v") == set()


def test_an_event_that_was_defined_can_be_taken_away() -> None:
    assert offered("kprobe trace 'p:open f' @more 'r g $retval' -:") == {"-:open", "-:r_g_0"}
    assert offered("kprobe trace 'p:open f' 'p:other g' -:op") == {"-:open"}
    assert offered("kprobe trace 'p:open f x=' -:") == set()


def test_files_are_offered_where_files_are_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probes.txt").touch()
    monkeypatch.chdir(tmp_path)

    assert offered("kprobe trace @pro") == {"@probes.txt"}
    assert offered("kprobe trace -o pro") == {"probes.txt"}
    assert offered("kprobe trace --filter pro") == set()
    assert offered("kprobe trace --comm pro") == set()
    assert offered("kprobe trace 'p f' -- pro") == set()


def test_a_guest_is_never_asked() -> None:
    store_kernel()
    with socket.create_server(("localhost", 0)) as stub:
        stub.settimeout(0)
        target = f"qemu:localhost:{stub.getsockname()[1]}"

        assert offered(f"kprobe trace -t {target} 'p v") == {"p vfs_read"}
        assert offered(f"kprobe status -t {target}"[:-1]) == set()

        with pytest.raises(BlockingIOError):
            stub.accept()
