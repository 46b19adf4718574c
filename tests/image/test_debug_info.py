"""Types of files with debug info: where they may be, and what pahole makes of them is kept."""

import os
from pathlib import Path

import pytest

from kprobes.image import debug_info
from kprobes.image.debug_info import (
    btf_of,
    candidates,
    fetched,
    is_own,
    module_candidates,
    types_root,
)

_PAHOLE = """#!/bin/sh
echo made >> {log}
for word; do case $word in --btf_encode_detached=*) out=${{word#*=}};; esac; done
tail -c +5 "$word" > "$out"
"""
"""Instead of the real one, which tests/system/test_own_kernels.py runs: what it makes is the file
without its first four bytes."""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    (programs / "pahole").write_text(_PAHOLE.format(log=log))
    (programs / "pahole").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return log


def test_what_was_made_of_a_file_is_kept_until_the_file_changes(tmp_path: Path, log: Path) -> None:
    path = tmp_path / "vmlinux"
    path.write_bytes(b"\x7fELFone")

    said: list[str] = []
    assert [btf_of(path, b"id", said.append) for _ in range(2)] == [b"one", b"one"]
    assert said == [f"making types of the debug info in {path}, once; that may take a minute"]
    assert log.read_text() == "made\n"
    path.write_bytes(b"\x7fELFanother")
    assert btf_of(path, b"id") == b"another"


def test_no_more_than_some_are_kept(tmp_path: Path, log: Path) -> None:
    del log
    path = tmp_path / "vmlinux"
    path.write_bytes(b"\x7fELF")

    for number in range(20):
        btf_of(path, bytes([number]))

    assert len(list(types_root().iterdir())) == 16


@pytest.mark.parametrize("data", [b"MZ", b""])
def test_what_is_no_elf_file_is_not_given_to_pahole(tmp_path: Path, log: Path, data: bytes) -> None:
    path = tmp_path / "bzImage"
    path.write_bytes(data)

    assert btf_of(path, b"id") == b""
    assert not log.exists()


def test_without_pahole_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "vmlinux"
    path.write_bytes(b"\x7fELF")

    assert btf_of(path, b"id") == b""
    assert list(types_root().iterdir()) == []


def test_a_tree_that_a_kernel_was_built_in_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    kept = Path("/cache/kprobes/debug/6.1.0/usr/lib/debug")
    found = list(candidates("6.1.0", b"\x12\x34", Path("/src/arch/x86/boot/bzImage")))

    assert Path("/src/vmlinux") in found[:4]
    assert found[4:] == [
        Path("/usr/lib/debug/.build-id/12/34.debug"),
        Path("/usr/lib/debug/boot/vmlinux-6.1.0"),
        Path("/usr/lib/debug/lib/modules/6.1.0/vmlinux"),
        kept / ".build-id/12/34.debug",
        kept / "boot/vmlinux-6.1.0",
        kept / "lib/modules/6.1.0/vmlinux",
        Path("/lib/modules/6.1.0/build/vmlinux"),
    ]


def test_a_module_is_where_its_kernel_was_built_or_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, debug = tmp_path / "linux", tmp_path / "debug"
    (tree / "arch/x86/boot").mkdir(parents=True)
    (tree / "modules.order").write_text("kernel/fs/fat/fat.ko\nsound/snd-pcm.o\nsound/snd.o\n")
    installed = debug / "lib/modules/6.1.0/kernel/sound"
    installed.mkdir(parents=True)
    for name in ("snd-pcm.ko.debug", "snd-pcm.ko", "snd.ko", "snd_pcm.txt"):
        (installed / name).touch()
    monkeypatch.setattr(debug_info, "_DEBUG", debug)

    def found(name: str) -> list[Path]:
        beside = [tree / "arch/x86/boot/bzImage"]
        return list(module_candidates(name, "6.1.0", [b"\x12\x34"], beside))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = debug_info.debug_root("6.1.0") / str(debug).removeprefix("/")
    own = [top / ".build-id/12/34.debug" for top in (debug, kept)]
    pcm = [installed / "snd-pcm.ko", installed / "snd-pcm.ko.debug"]
    assert found("fat") == [tree / "fs/fat/fat.ko", *own]
    assert sorted(found("snd_pcm")) == sorted([tree / "sound/snd-pcm.ko", *own, *pcm])
    assert found("snd_pcm")[0] == tree / "sound/snd-pcm.ko"
    assert list(module_candidates("snd", "../6.1.0", [], [])) == []


_CLIENT = """#!/bin/sh
[ "$1 $2" = "debuginfo 1234" ] && [ "$DEBUGINFOD_URLS" = https://here ] && echo {found}
"""


@pytest.mark.parametrize(
    ("build_id", "servers", "is_found"),
    [
        (b"\x12\x34", "https://here", True),
        (b"\x12\x35", "https://here", False),
        (b"\x12\x34", "", False),
        (b"", "https://here", False),
    ],
)
def test_servers_that_the_environment_names_are_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build_id: bytes,
    servers: str,
    *,
    is_found: bool,
) -> None:
    program, found, said = tmp_path / "debuginfod-find", tmp_path / "vmlinux", list[str]()
    program.write_text(_CLIENT.format(found=found))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DEBUGINFOD_URLS", servers)

    assert list(fetched(build_id, said.append)) == [found] * is_found
    assert len(said) == bool(build_id and servers)


def test_without_a_client_no_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("DEBUGINFOD_URLS", "https://here")

    assert list(fetched(b"\x12\x34")) == []


def test_files_of_others_are_not_read_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fifo = tmp_path / "vmlinux", tmp_path / "fifo"
    path.touch()
    os.mkfifo(fifo)

    assert [is_own(each) for each in (path, fifo, tmp_path / "absent")] == [True, False, False]
    if os.geteuid() == 0:
        os.chown(path, 1, 1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not is_own(path)


@pytest.mark.parametrize("release", ["", "../../etc"])
def test_nothing_of_a_guests_memory_but_a_name_becomes_a_path(release: str) -> None:
    assert list(candidates(release, b"", None)) == []
