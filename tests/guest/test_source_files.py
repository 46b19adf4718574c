"""Which file has the debug information of a guest's kernel, or of a module that it has loaded."""

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.errors import TargetError
from kprobes.guest.source_files import KernelFiles, ModulesInMemory, SourceFiles
from kprobes.image.symbols import SymbolMap
from kprobes.model.kernel import Kernel
from kprobes.model.source import Location, LocationKind
from tests.build.kernel import make_kernel
from tests.build.loaded_module import DATA, MODULE, NOTE, PER_CPU, TEXT, ModuleMemory, loaded
from tests.build.objects import FOLDER
from tests.image.test_symbols import table


def kernel_with(*names: str) -> Kernel:
    """Return a kernel that has loaded the module of the tests under these names."""
    modules = [loaded(name=name) for name in names]
    return replace(make_kernel([]), symbols=SymbolMap(table([(1, "T", "_text")]), modules))


def files(
    kernel: Kernel, *modules: Path, note: bytes = NOTE, named: Path | None = None
) -> SourceFiles:
    of_kernel = [] if named is None else [named]
    files = KernelFiles(named=of_kernel, modules=modules)
    return SourceFiles(kernel, ModulesInMemory(ModuleMemory(note), kernel.types), files)


@pytest.mark.parametrize("note", [NOTE, b""], ids=["build", "no-build"])
def test_a_module_is_in_the_file_that_is_named(note: bytes) -> None:
    kernel = kernel_with("module", "other")
    found = files(kernel, FOLDER / "other.ko", MODULE, note=note)

    source = found.open(kernel, "module")

    function = source.function(TEXT)
    assert function is not None
    assert function.file.endswith("module.c")
    assert found.open(kernel, "module") is source


def test_a_module_is_found_where_its_kernel_was_built(tmp_path: Path) -> None:
    (tmp_path / "modules.order").write_text("drivers/module.o\n")
    (tmp_path / "drivers").mkdir()
    shutil.copy(MODULE, tmp_path / "drivers/module.ko")
    kernel = kernel_with("module")

    source = files(kernel, named=tmp_path / "vmlinux").open(kernel, "module")

    assert source.function(TEXT) is not None


def test_a_file_of_another_build_is_refused_where_it_is_named(tmp_path: Path) -> None:
    kernel = kernel_with("module")
    another = NOTE[:-8] + bytes(8)
    with pytest.raises(TargetError, match="its build is 0102030405060708"):
        files(kernel, MODULE, note=another).open(kernel, "module")
    text = tmp_path / "module.ko"
    text.write_text("no object")
    with pytest.raises(TargetError, match="is not of the module that is loaded"):
        files(kernel, text).open(kernel, "module")
    with pytest.raises(TargetError, match="No such file"):
        files(kernel, tmp_path / "nosuch/module.ko").open(kernel, "module")


def test_without_a_file_it_is_said_how_to_get_one() -> None:
    kernel = kernel_with("module")

    with pytest.raises(TargetError, match=r"build 0102030405060708: name its file by --module"):
        files(kernel).open(kernel, "module")
    with pytest.raises(TargetError, match="build unknown"):
        files(kernel, note=b"").open(kernel, "module")
    with pytest.raises(TargetError, match="the module other is not loaded"):
        files(kernel).open(kernel, "other")
    with pytest.raises(TargetError, match="give its vmlinux by --vmlinux"):
        files(kernel).open(kernel)


def test_the_kernels_own_is_in_its_file() -> None:
    kernel = replace(kernel_with("module"), build_id=b"", slide=0x1000)
    found = files(kernel, named=FOLDER / "lines-5.so")

    source = found.open(kernel)

    assert found.open(kernel_with()) is source
    lines = source.file_lines("source.c", 1, 99)
    assert all(addr >= 0x1000 for each in lines for addr in each.addrs)


@pytest.mark.parametrize("has_areas", [True, False])
def test_what_a_module_has_of_others_is_the_kernels_and_the_rest_its_own(
    *, has_areas: bool
) -> None:
    names = [(1, "T", "_text"), (0x2000, "D", "total"), (0x3000, "D", "nowhere")]
    if has_areas:
        names += [(0x2800, "D", "__per_cpu_start"), (0x3800, "D", "__per_cpu_end")]
    module = loaded({"sums": TEXT, "total": DATA, "own": PER_CPU}, name="externs")
    kernel = replace(make_kernel([]), symbols=SymbolMap(table(sorted(names)), [module]))
    source = files(kernel, FOLDER / "externs.ko").open(kernel, "externs")

    found = {each.name: each.location for each in source.externs(TEXT)}

    assert found == {
        "total": Location(kind=LocationKind.STATIC, number=DATA),
        "words": Location(kind=LocationKind.STATIC, number=DATA + 8),
        "own": Location(kind=LocationKind.PER_CPU, number=PER_CPU),
        "unused": None,
        # Not without knowing whether each CPU has one of its own.
        "nowhere": Location(kind=LocationKind.PER_CPU, number=0x3000) if has_areas else None,
    }
