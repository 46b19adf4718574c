"""Which files have debug information, and how many kernels' packages stay unpacked."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import TargetError
from kprobes.image.debug_info import debug_root
from kprobes.image.symbols import SymbolMap
from kprobes.inspect import debug_files
from kprobes.inspect.debug_files import DebugFile, fetch_debug_files
from kprobes.inspect.source import SourceKernel
from kprobes.model.kernel import Kernel
from kprobes.model.source import SourceInfo
from kprobes.transport.debian import Package
from tests.build.kernel import make_kernel
from tests.build.loaded_module import loaded
from tests.build.source_info import FakeSource
from tests.image.test_symbols import table

SYMBOLS = SymbolMap(table([(1, "T", "_text")]), [loaded(name="fat"), loaded(name="snd_pcm")])


KERNEL = replace(make_kernel([], release="6.1.0"), symbols=SYMBOLS)


def opened(kernel: Kernel, module: str = "") -> SourceInfo:
    """Open what is there of two modules, of which one has no file."""
    assert kernel is KERNEL
    if module == "snd_pcm":
        raise TargetError("nothing is known")
    return FakeSource()


class FakePackage(Struct):
    """A package of nothing. Implements what is used of ``transport.debian.DebugPackage``."""

    package: Package = Package(name="dbg", version="1", depends=(), size=3 << 20)
    suite: str = "sid"

    def unpack(self, into: Path, modules: Iterable[str]) -> None:
        into.mkdir(parents=True)
        (into / " ".join(modules)).touch()

    def close(self) -> None:
        pass


def test_each_has_its_file_or_none() -> None:
    asked = SourceKernel(
        kernel=KERNEL, registers=(), open_source=opened, locate=lambda function: function.addr
    )

    assert debug_files.debug_files(asked) == [
        DebugFile(module="", file="made up"),
        DebugFile(module="fat", file="made up"),
        DebugFile(module="snd_pcm", file=""),
    ]


def test_the_last_two_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked, said = list[tuple[str, str]](), list[str]()

    def package(release: str, *, arch: str, **_: object) -> FakePackage:
        asked.append((release, arch))
        return FakePackage()

    monkeypatch.setattr(debug_files, "debug_package", package)
    for age, release in enumerate(("5.10.0", "6.6.0")):
        debug_root(release).mkdir(parents=True)
        os.utime(debug_root(release), (age, age))

    fetch_debug_files(KERNEL, said.append)

    assert asked == [("6.1.0", "amd64")]
    assert said == ["downloading dbg of Debian sid: 3 MB", "forgetting 5.10.0"]
    assert [path.name for path in debug_root("6.1.0").iterdir()] == ["fat snd_pcm"]
    assert sorted(path.name for path in debug_root("").iterdir()) == ["6.1.0", "6.6.0"]
