"""Kernels seen before."""

import os
from pathlib import Path

import numpy as np
import pytest

from kprobes.arch.x86_64.paging import PageTables
from kprobes.image.build import Build, Region, extract
from kprobes.image.cache import KernelCache, default_root
from kprobes.units import Addr
from tests.build.linux import BUILD_ID, RODATA, LinuxSpec, boot


def guest(spec: LinuxSpec | None = None) -> tuple[PageTables, Build]:
    linux = boot(spec)
    start = linux.spec.text + RODATA
    memory = PageTables(linux.ram, linux.cr3)
    region = Region(addr=Addr(start), data=memory.read(start, 0x2_0000))
    return memory, extract(memory, [region])


def stored(tmp_path: Path) -> tuple[KernelCache, Path, PageTables, Build]:
    memory, build = guest()
    cache = KernelCache(tmp_path / "kernels")
    cache.store(build)
    (path,) = (tmp_path / "kernels").glob("*/*")
    return cache, path, memory, build


def test_what_is_stored_comes_back_for_the_same_guest(tmp_path: Path) -> None:
    cache, path, memory, build = stored(tmp_path)

    found = cache.match(memory, LinuxSpec().text)

    assert path.parent.name == BUILD_ID.hex()
    assert found is not None
    assert np.array_equal(found.table.addrs, build.table.addrs)
    assert np.array_equal(found.table.starts, build.table.starts)
    assert (found.table.blob, found.table.types) == (build.table.blob, build.table.types)
    assert (found.banner, found.build_id, found.btf) == (build.banner, build.build_id, build.btf)
    assert np.array_equal(found.type_places, build.type_places)
    assert len(build.type_places)
    assert (found.sources, found.digest) == (build.sources, build.digest)


@pytest.mark.parametrize("spec", [LinuxSpec(has_btf=False), LinuxSpec(build_id=b"")])
def test_kernels_without_types_or_build_id_are_kept_too(tmp_path: Path, spec: LinuxSpec) -> None:
    memory, build = guest(spec)
    cache = KernelCache(tmp_path)
    cache.store(build)

    found = cache.match(memory, spec.text)

    assert found is not None
    assert (found.btf, found.build_id) == (build.btf, build.build_id)


def test_the_newest_is_known_without_its_guest(tmp_path: Path) -> None:
    assert KernelCache(tmp_path).newest() is None

    cache, path, _, build = stored(tmp_path)
    found = cache.newest()

    assert found is not None
    assert (found.blob, found.types) == (build.table.blob, build.table.types)

    path.write_bytes(b"damaged")
    assert cache.newest() is None


def test_a_kernel_at_another_slide_comes_back_moved(tmp_path: Path) -> None:
    cache, _, _, build = stored(tmp_path)
    memory, moved = guest(LinuxSpec(slide=0))

    found = cache.match(memory, LinuxSpec(slide=0).text)

    assert found is not None
    assert np.array_equal(found.table.addrs, moved.table.addrs)
    assert not np.array_equal(found.table.addrs, build.table.addrs)


def test_one_changed_byte_in_the_guest_is_another_kernel(tmp_path: Path) -> None:
    cache, path, memory, build = stored(tmp_path)
    at, size = build.table.sources[1]
    memory.ram.write(memory.physical(at + size - 1), b"\x7f")

    assert cache.match(memory, LinuxSpec().text) is None
    assert path.exists()


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9, 1.0])
def test_a_damaged_file_is_removed_and_made_again(tmp_path: Path, where: float) -> None:
    cache, path, memory, build = stored(tmp_path)
    data = bytearray(path.read_bytes())
    header_end = data.index(b"\n", 80)
    at = min(header_end + int(where * (len(data) - header_end)), len(data) - 1)
    data[at] ^= 0x40
    path.write_bytes(bytes(data))

    assert cache.match(memory, LinuxSpec().text) is None
    assert not path.exists()
    cache.store(build)
    assert cache.match(memory, LinuxSpec().text) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 200,
        b"kprobes-kernel-4 " + b"0" * 64 + b"\n{}\n",
        b"kprobes-kernel-4 " + b"0" * 64 + b"\n[1]\n",
        b"x" * 80 + b'{"sources": [[1, 1e9]]}\n',
        b"x" * 80 + b'{"sources": "abc"}\n',
        b"x" * 80 + b'{"sources": [[Infinity, 1]]}\n',
        b"x" * 80 + b"[" * 60_000 + b"\n",
        b"x" * 80 + b'{"sources": [[1, 1]], "link": "a", "n": 1, "head": 1, "digest": 2, '
        b'"build_id": 3, "banner": 4, "has_types": 5, "n_types": 1}\n',
        b"x" * 80 + b'{"sources": [[1, 1]], "link": 1, "n": 1, "head": 1, "digest": 2, '
        b'"build_id": 3, "banner": 4, "has_types": 5, "n_types": 1}\n',
    ],
)
def test_a_file_that_is_no_kernel_is_passed_over(tmp_path: Path, data: bytes) -> None:
    cache, path, memory, _ = stored(tmp_path)
    path.with_name("zzz").write_bytes(data)

    assert cache.match(memory, LinuxSpec().text) is not None


def test_a_truncated_file_is_passed_over(tmp_path: Path) -> None:
    cache, path, memory, _ = stored(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])

    assert cache.match(memory, LinuxSpec().text) is None


def test_a_guest_without_that_memory_does_not_match(tmp_path: Path) -> None:
    cache, _, memory, _ = stored(tmp_path)

    assert cache.match(memory, 0xFFFF_FFFF_B000_0000) is None


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    _, build = guest()
    (tmp_path / "file").write_text("in the way")
    cache = KernelCache(tmp_path / "file" / "below")

    cache.store(build)

    assert cache.match(PageTables(boot().ram, 0), LinuxSpec().text) is None


def test_only_so_many_kernels_are_kept(tmp_path: Path) -> None:
    cache, path, memory, build = stored(tmp_path)
    for i in range(80):
        path.with_name(f"{i:02}").write_bytes(b"old")

    cache.store(build)

    assert len(list(path.parent.iterdir())) == 64
    assert cache.match(memory, LinuxSpec().text) is not None


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/kprobes/kernels")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/kprobes/kernels"),
        ({}, Path.home() / ".cache/kprobes/kernels"),
    ],
)
def test_the_cache_is_where_xdg_says(
    environment: dict[str, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert default_root() == root


def test_what_somebody_else_may_have_written_names_no_symbols(tmp_path: Path) -> None:
    cache, path, memory, build = stored(tmp_path)

    path.chmod(0o666)
    assert cache.match(memory, LinuxSpec().text) is None

    path.unlink()
    os.mkfifo(path)
    assert cache.match(memory, LinuxSpec().text) is None

    path.unlink()
    cache.store(build)
    assert cache.match(memory, LinuxSpec().text) is not None


def test_the_cache_of_another_user_is_neither_used_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, path, memory, build = stored(tmp_path)
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    cache.store(build)

    assert cache.match(memory, LinuxSpec().text) is None
    assert path.stat().st_mtime_ns == before
