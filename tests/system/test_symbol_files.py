"""A kernel that carries no symbols, by its System.map or its vmlinux; built for `make matrix`."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobes.formats.kallsyms import SymbolTable
from kprobes.formats.strtab import Names
from kprobes.image.build import extract
from kprobes.image.file import read_image, read_symbols
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.command import Command, events_of, wait_for_event
from tests.build.own_kernels import build
from tests.build.victim import guardians_of, is_complaint
from tests.build.waiting import becomes_true
from tests.system.conftest import boot_or_skip

pytestmark = [pytest.mark.guest, pytest.mark.matrix, pytest.mark.timeout(4000)]

OPEN = "p:open vfs_open flags=+16($arg2):x32"
_WORK = "while :; do cat /proc/version > /dev/null; usleep 20000; done"


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    """The command, with journals of this test's own."""
    with Command(tmp_path / "state") as command:
        yield command


@pytest.fixture(scope="module")
def tree() -> Path:
    """Where the kernel was built."""
    return build("nameless").parents[3]


@pytest.fixture(scope="module")
def guest(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A guest that was booted from a copy, with no other file beside it."""
    alone = tmp_path_factory.mktemp("alone") / "bzImage"
    shutil.copy(tree / "arch" / "x86" / "boot" / "bzImage", alone)
    with boot_or_skip(MachineOptions(kernel=alone)) as machine:
        machine.start(_WORK)
        yield machine
        assert not is_complaint(machine.run("dmesg").output.decode(errors="replace"))


@pytest.fixture
def target(guest: Machine) -> str:
    return f"qemu:{guest.stub_address}"


def rows(table: SymbolTable) -> set[tuple[int, bytes]]:
    names = Names(table.blob, table.starts)
    return {(addr, names.name(number)) for number, addr in enumerate(table.addrs.tolist())}


def letters(table: SymbolTable) -> set[tuple[bytes, str]]:
    names = Names(table.blob, table.starts)
    return {(names.name(number), letter) for number, letter in enumerate(table.types.decode())}


@pytest.mark.parametrize("kernel", ["nameless", "static"])
def test_an_elf_files_symbols_are_those_that_nm_printed(kernel: str) -> None:
    top = build(kernel).parents[3]

    found, printed = read_symbols(top / "vmlinux"), read_symbols(top / "System.map")

    assert rows(found) == rows(printed)
    # nm knows no letter for an empty section.
    assert letters(printed) - letters(found) <= {(name, "?") for _, name in rows(found)}


def test_they_are_those_of_the_kernels_own_table() -> None:
    path = build("static").parents[3] / "vmlinux"
    image = read_image(path)

    own = rows(extract(image, image.regions, is_file=True).table)

    further = rows(read_symbols(path)) - own
    assert len(own) > 20_000
    assert own <= rows(read_symbols(path))
    # Borders of sections, which kallsyms leaves out.
    assert len(further) < 20


@pytest.mark.parametrize("has_image", [False, True])
def test_without_any_symbols_it_is_said_which_file_would_do(
    kprobe: Command, target: str, tree: Path, *, has_image: bool
) -> None:
    # A boot image has its types at most.
    image = ["--vmlinux", str(tree / "arch" / "x86" / "boot" / "bzImage")] * has_image

    done = kprobe("trace", "-t", target, OPEN, "--duration", "1s", *image)

    said = done.stderr.decode()
    assert done.returncode == 1
    assert said.count("\n") == 1
    assert "no intact kallsyms tables in its memory: name its System.map or vmlinux" in said


@pytest.mark.parametrize("name", ["System.map", "vmlinux"])
def test_a_file_that_is_named_has_its_symbols(
    kprobe: Command, target: str, tree: Path, name: str
) -> None:
    words = ["-t", target, "--symbols", str(tree / name)]

    traced = kprobe("trace", *words, OPEN, "--max-events", "5")
    listed = kprobe("list", *words, "vfs_op*")
    checked = kprobe("check", *words, "p vfs_open", "r vfs_read")

    assert traced.returncode == 0, traced.stderr.decode()
    assert len(events_of(traced.stdout)) == 5
    assert b"vfs_open\n" in listed.stdout
    assert b"2 definitions accepted" in checked.stdout


def test_another_kernels_file_is_refused(kprobe: Command, target: str) -> None:
    other = build("static").parents[3] / "System.map"

    done = kprobe("trace", "-t", target, OPEN, "--symbols", str(other), "--duration", "1s")

    said = done.stderr.decode()
    assert done.returncode == 1
    assert said.count("\n") == 1
    assert f"{other} is not of the guest's kernel" in said


def test_what_a_killed_tracer_leaves_is_put_right_by_the_same_file(
    kprobe: Command, guest: Machine, target: str, tree: Path
) -> None:
    words = ["-t", target, "--symbols", str(tree / "System.map")]
    tracer = kprobe.start("trace", *words, OPEN, "r vfs_read")
    wait_for_event(tracer)
    (guardian,) = guardians_of(str(guest.stub_address))

    tracer.send_signal(signal.SIGKILL)

    assert becomes_true(lambda: not Path(f"/proc/{guardian}").exists())
    assert b"no journal" in kprobe("status").stdout
    again = kprobe("trace", *words, OPEN, "--max-events", "2")
    assert again.returncode == 0, again.stderr.decode()


def test_a_vmlinux_alone_has_them_without_a_guest(kprobe: Command, tree: Path) -> None:
    done = kprobe("check", "--image", str(tree / "vmlinux"), "p vfs_open", "r vfs_read")

    assert done.returncode == 0, done.stderr.decode()
