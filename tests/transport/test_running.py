"""QEMU processes of this machine, by command lines of many kinds and a /proc of a few files."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.errors import UnreachableError, UsageError
from kprobes.transport.running import (
    Qemu,
    booted_file,
    domain_pid,
    find_qemus,
    named_address,
    parse_command,
)
from kprobes.units import GIB, MIB

MAPS = (
    "7f0000000000-7f0020000000 rw-s 00000000 00:01 77 /memfd:ram (deleted)\n"
    "7f0030000000-7f0030001000 r--p 00000000 00:00 0\n"
)
TCP = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
    "   0: 0100007F:04D2 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000\n"
)
ACCEPTED = "   1: 0100007F:04D2 0100007F:D431 01 00000000:00000000 00:0 00000000  1000 0 41\n"


def process(proc: Path, pid: int, command: str, maps: str = MAPS) -> None:
    """Make the files of one process."""
    directory = proc / str(pid)
    (directory / "fd").mkdir(parents=True)
    (directory / "cmdline").write_bytes(b"".join(w.encode() + b"\0" for w in command.split()))
    (directory / "maps").write_text(maps)
    (directory / "cwd").symlink_to("/srv")
    (directory / "fd" / "3").symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("words", "stubs", "monitors"),
    [
        ("-s -S", ["localhost:1234"], []),
        ("--gdb tcp:127.0.0.1:99,server=on -s", ["127.0.0.1:99", "localhost:1234"], []),
        ("-gdb tcp:0.0.0.0:99", ["localhost:99"], []),
        ("-gdb tcp:[::1]:99", ["[::1]:99"], []),
        ("-gdb unix:/run/a,,b.sock,server=on,wait=off", ["/run/a,b.sock"], []),
        ("-gdb unix:gdb.sock,server", ["./gdb.sock"], []),
        ("-chardev socket,id=g,path=/g.sock,server=on -gdb chardev:g", ["/g.sock"], []),
        ("-gdb stdio -monitor stdio -qmp none", [], []),
        ("-qmp tcp:localhost:3636,server,nowait", [], ["localhost:3636"]),
        ("-qmp unix:/q,server=on -monitor unix:/m,server=on", [], ["/q", "/m"]),
        ("-monitor telnet::55,server,nowait", [], ["localhost:55"]),
        (
            "-chardev socket,id=m,host=localhost,port=7,server=on -mon chardev=m,mode=control",
            [],
            ["localhost:7"],
        ),
        # A descriptor that was passed on, as libvirt does; a client; somebody else's device.
        ("-chardev socket,id=m,fd=38,server=on -mon chardev=m", [], []),
        ("-chardev socket,id=m,path=/m -mon chardev=m", [], []),
        (
            "-name guest=one -chardev socket,id=charmonitor,fd=38,server=on",
            [],
            ["libvirt:one"],
        ),
        ("-chardev socket,id=m,path=/m,server=on -mon chardev=other", [], []),
        ("-append -s -kernel -gdb", [], []),
    ],
)
def test_where_stubs_and_monitors_listen(words: str, stubs: list[str], monitors: list[str]) -> None:
    command = parse_command(["/usr/bin/qemu-system-x86_64", *words.split()])
    assert command is not None
    assert list(command.stubs) == stubs
    assert list(command.monitors) == monitors


def test_a_domain_is_the_process_that_libvirt_talks_to(tmp_path: Path) -> None:
    words = "qemu-system-x86_64 -name guest=one -chardev socket,id=charmonitor,fd=3,server=on"
    process(tmp_path, 7, words.replace("guest=one", "guest=two"))
    process(tmp_path, 8, words)
    process(tmp_path, 9, "qemu-system-x86_64 -name guest=three -monitor unix:/m,server=on")

    assert domain_pid("libvirt:one", tmp_path) == 8
    assert domain_pid("libvirt:three", tmp_path) is None
    assert [named_address(name, tmp_path) for name in ("pid:8", "name:two", "name:three")] == [
        "libvirt:one",
        "libvirt:two",
        "/m",
    ]
    assert find_qemus(tmp_path)[0].is_free("libvirt:two", tmp_path)


def test_what_a_guest_is() -> None:
    words = (
        "qemu-system-aarch64 -nographic -machine virt,accel=kvm:tcg -M gic-version=3 -m size=1.5G "
        "-smp 2,maxcpus=8 -name guest=one,,two,debug-threads=on -kernel /boot/Image"
    )
    command = parse_command(words.split())
    assert command is not None
    assert (command.arch, command.name, command.machine) == ("arm64", "one,two", "virt")
    assert (command.cpus, command.memory, command.accel) == (2, 3 * GIB // 2, "kvm")
    assert command.kernel == "/boot/Image"


@pytest.mark.parametrize(
    ("words", "cpus", "memory", "accel"),
    [
        ("", 1, 128 * MIB, "tcg"),
        ("-m 512 -smp 4 -enable-kvm", 4, 512 * MIB, "kvm"),
        ("-m 4096K -smp sockets=2,cores=3,threads=2 -accel tcg,thread=single", 12, 4 * MIB, "tcg"),
        ("-m none -smp many -accel kvm -accel tcg", 1, 128 * MIB, "kvm"),
    ],
)
def test_what_is_not_said_is_qemus_default(words: str, cpus: int, memory: int, accel: str) -> None:
    command = parse_command(["qemu-system-riscv64", *words.split()])
    assert command is not None
    assert (command.cpus, command.memory, command.accel) == (cpus, memory, accel)
    assert (command.arch, command.name, command.machine) == ("riscv64", "", "")


@pytest.mark.parametrize("words", ["", "bash -c qemu-system-x86_64", "qemu-img", "qemu-system-"])
def test_other_programs_are_none(words: str) -> None:
    assert parse_command(words.split()) is None


def test_processes_are_found_with_what_their_files_tell(tmp_path: Path) -> None:
    process(tmp_path, 20, "qemu-system-x86_64 -m 512 -gdb unix:gdb.sock -monitor unix:/m.sock")
    process(tmp_path, 3, "qemu-kvm -m 4G")
    (tmp_path / "3" / "fd" / "9").symlink_to("anon_inode:kvm-vm")
    process(tmp_path, 5, "sleep 5")
    (tmp_path / "7").mkdir()
    (tmp_path / "self").mkdir()

    small, large = find_qemus(tmp_path)

    assert (small.pid, large.pid) == (3, 20)
    assert (small.accel, large.accel) == ("kvm", "tcg")
    # Half a GiB is not the memory of a guest of four.
    assert small.ram is None
    assert large.ram is not None
    assert large.ram.stop - large.ram.start == 512 * MIB
    assert (large.command.stubs, large.command.monitors) == (("/srv/gdb.sock",), ("/m.sock",))


def test_another_user_s_process_has_its_command_line_only(tmp_path: Path) -> None:
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "cmdline").write_bytes(b"qemu-system-x86_64\0-s\0-accel\0kvm\0")

    (found,) = find_qemus(tmp_path)

    assert (found.files, found.accel, found.ram) == (None, "kvm", None)
    assert found.command.stubs == ("localhost:1234",)


def test_a_process_is_named_by_its_number_its_guests_name_or_as_the_only_one(
    tmp_path: Path,
) -> None:
    process(tmp_path, 20, "qemu-system-x86_64 -name one -gdb unix:/g.sock -qmp unix:/q.sock")
    assert named_address("running", tmp_path) == "/g.sock"
    process(tmp_path, 30, "qemu-system-x86_64 -name two -qmp unix:/q.sock")
    assert named_address("pid:20", tmp_path) == named_address("name:one", tmp_path) == "/g.sock"
    assert named_address("name:two", tmp_path) == "/q.sock"


def test_a_name_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="no guest runs on this machine"):
        named_address("running", tmp_path)
    process(tmp_path, 20, "qemu-system-x86_64 -name one")
    process(tmp_path, 30, "qemu-system-x86_64 -name one -s")
    for target in ("running", "name:one"):
        with pytest.raises(UsageError, match="2 guests run: use one of pid:20, pid:30"):
            named_address(target, tmp_path)
    for target in ("pid:21", "name:two"):
        with pytest.raises(UnreachableError, match=f"{target}: no such guest"):
            named_address(target, tmp_path)
    for target in ("pid:", "pid:x", "name:"):
        with pytest.raises(UsageError, match="use pid:NUMBER, name:NAME or vng:NAME"):
            named_address(target, tmp_path)
    with pytest.raises(UnreachableError, match="no gdb stub and no monitor"):
        named_address("pid:20", tmp_path)


def test_guests_of_virtme_ng_have_a_name_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="no guest of virtme-ng runs"):
        named_address("vng", tmp_path)
    process(tmp_path, 20, "qemu-system-x86_64 -name one -s")
    process(tmp_path, 30, "qemu-system-x86_64 -name two -append virtme_hostname=two -gdb tcp::5")
    assert named_address("vng", tmp_path) == named_address("vng:two", tmp_path) == "localhost:5"
    with pytest.raises(UnreachableError, match="vng:one: no such guest"):
        named_address("vng:one", tmp_path)
    process(tmp_path, 40, "qemu-system-x86_64 -name three -append virtme_hostname=three")
    with pytest.raises(UsageError, match="vng: 2 guests run: use one of pid:30, pid:40"):
        named_address("vng", tmp_path)
    with pytest.raises(UnreachableError, match="start it with vng --debug"):
        named_address("vng:three", tmp_path)


def test_whoever_is_connected_keeps_others_out(tmp_path: Path) -> None:
    process(tmp_path, 20, "qemu-system-x86_64 -s")
    (tmp_path / "20" / "fd" / "9").symlink_to("socket:[8]")
    (tmp_path / "20" / "fd" / "10").symlink_to("socket:[41]")
    (tmp_path / "net").mkdir()
    unix = "Num RefCount Protocol Flags Type St Inode Path\n0: 2 0 10000 0001 01 7 /srv/gdb.sock\n"
    (tmp_path / "net" / "tcp").write_text(TCP)
    (tmp_path / "net" / "unix").write_text(unix)
    (qemu,) = find_qemus(tmp_path)
    hidden = replace(qemu, files=None)
    assert is_free(qemu, tmp_path) == is_free(hidden, tmp_path) == [True] * 4

    (tmp_path / "net" / "tcp").write_text(TCP + ACCEPTED)
    (tmp_path / "net" / "unix").write_text(f"{unix}0: 3 0 0 0001 03 8 /srv/gdb.sock\n")
    assert is_free(qemu, tmp_path) == is_free(hidden, tmp_path) == [False, False, True, True]

    # Another QEMU's, whose socket has the same name.
    (tmp_path / "net" / "unix").write_text(f"{unix}0: 3 0 0 0001 03 9 gdb.sock\n")
    assert is_free(qemu, tmp_path) == [True, False, True, True]


def is_free(qemu: Qemu, proc: Path) -> list[bool]:
    addresses = ("/srv/gdb.sock", "localhost:1234", "/srv/other.sock", "localhost:1235")
    return [qemu.is_free(address, proc) for address in addresses]


def test_the_file_that_is_booted_is_seen_from_where_qemu_stands(tmp_path: Path) -> None:
    process(tmp_path, 7, "qemu-system-x86_64 -kernel arch/x86/boot/bzImage -m 512M")
    process(tmp_path, 8, "qemu-system-x86_64 -m 512M")

    assert booted_file(7, tmp_path) == Path("/srv/arch/x86/boot/bzImage")
    assert booted_file(8, tmp_path) is None
    assert booted_file(9, tmp_path) is None
