import stat
from pathlib import Path

import pytest

from kprobes.errors import UnreachableError, UsageError
from kprobes.transport import initramfs
from tests.build.newc import Found, read

BUSYBOX = "#!/bin/sh\nprintf 'bin/ls\\nbin/busybox\\nusr/sbin/chroot\\nlinuxrc\\n'\n"


@pytest.fixture
def busybox(tmp_path: Path) -> Path:
    path = tmp_path / "busybox"
    path.write_text(BUSYBOX)
    path.chmod(0o755)
    return path


def build(busybox: Path, files: dict[str, Path | bytes] | None = None) -> dict[str, Found]:
    return read(initramfs.build(busybox, files or {}, agent="ttyS7"))


def test_the_guest_has_busybox_under_all_its_names(busybox: Path) -> None:
    found = build(busybox)

    assert found["bin/busybox"].data == BUSYBOX.encode()
    assert stat.filemode(found["bin/busybox"].mode) == "-rwxr-xr-x"
    for name in ("bin/ls", "usr/sbin/chroot"):
        assert stat.S_ISLNK(found[name].mode)
        assert found[name].data == b"/bin/busybox"
    assert "linuxrc" not in found


def test_a_busybox_that_does_not_run_here_is_linked_in_the_guest(busybox: Path) -> None:
    busybox.write_bytes(b"\x7fELF of another machine")

    found = build(busybox)

    assert "bin/ls" not in found
    assert b"busybox --install" in found["init"].data


def test_init_and_agent_are_programs(busybox: Path) -> None:
    found = build(busybox)

    for name in ("init", "sbin/kprobes-agent"):
        assert found[name].data.startswith(b"#!/bin/busybox sh\n")
        assert found[name].mode & 0o111
    assert found["dev/console"].device == (5, 1)
    assert found["etc/kprobes-agent"].data == b"ttyS7\n"


def test_a_parent_comes_before_its_child(busybox: Path) -> None:
    names = list(build(busybox, {"/opt/a/b/c": b"x"}))

    for name in names:
        parent = name.rpartition("/")[0]
        assert not parent or names.index(parent) < names.index(name)
    assert {"opt", "opt/a", "opt/a/b", "opt/a/b/c"} <= set(names)


def test_the_users_files_keep_their_mode_and_bytes(busybox: Path, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_bytes(b"\0\xff")
    tool.chmod(0o750)

    found = build(busybox, {"/sbin/tool": tool, "/run.sh": b"#!/bin/sh\n", "/data": b"a\0b"})

    assert found["sbin/tool"].data == b"\0\xff"
    assert stat.filemode(found["sbin/tool"].mode) == "-rwxr-x---"
    assert stat.filemode(found["run.sh"].mode) == "-rwxr-xr-x"
    assert stat.filemode(found["data"].mode) == "-rw-r--r--"


def test_a_directory_comes_with_all_below_it(busybox: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "file").write_bytes(b"1")
    (tree / "link").symlink_to("sub/file")

    found = build(busybox, {"/opt/tree/": tree})

    assert found["opt/tree/sub/file"].data == b"1"
    assert found["opt/tree/link"].data == b"sub/file"
    assert stat.S_ISLNK(found["opt/tree/link"].mode)


def test_the_users_file_replaces_an_applet(busybox: Path) -> None:
    found = build(busybox, {"/bin/ls": b"#!/bin/sh\n"})

    assert stat.S_ISREG(found["bin/ls"].mode)


@pytest.mark.parametrize("where", ["relative", "/a/../b", "/", "", "/init", "//init", "/a\0b"])
def test_a_guest_path_that_cannot_be_is_refused(busybox: Path, where: str) -> None:
    with pytest.raises(UsageError, match="in the guest"):
        build(busybox, {where: b""})


def test_a_file_that_is_not_there_is_named(busybox: Path, tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match=r"cannot read .*/absent: No such file"):
        build(busybox, {"/x": tmp_path / "absent"})


def test_a_device_is_not_read_into_the_guest(busybox: Path) -> None:
    with pytest.raises(UnreachableError, match="/dev/zero is neither a file nor a directory"):
        build(busybox, {"/x": Path("/dev/zero")})
