"""Symbols and types of real kernels, found in their RAM and compared with their own."""

import gzip
import lzma
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import Struct

from kprobes.arch.registry import machine_of_stub
from kprobes.errors import TargetError
from kprobes.formats import btf_index
from kprobes.guest.attach import registers_of
from kprobes.image.cache import KernelCache
from kprobes.image.file import check_same_build, kernel_from_image, read_image
from kprobes.image.find import FoundKernel, find_spaces, read_kernel
from kprobes.image.types import BtfTypes
from kprobes.model.kernel import Kernel, Symbol
from kprobes.transport.debian import kernel_image, modules_of
from kprobes.transport.find_ram import RAM_BACKENDS, open_ram
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.transport.stub import Stub
from tests.build.words import WORDS
from tests.system.conftest import SUITES, Boot, boot_or_skip

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("5.10", "7.x"),
]

MODULES = ("drivers/net/dummy.ko", "drivers/block/loop.ko")
PSEUDO = ("__builtin__ftrace", "__builtin__kprobes", "bpf")
"""What /proc/kallsyms shows in brackets besides modules."""
LEAST_SYMBOLS = {"amd64": 50_000, "arm64": 40_000}
ISOLATED = {"amd64": "pti=on", "arm64": "kpti=1"}
SHOWN = re.compile(r"\((\w+)\+0x[0-9a-f]+/0x([0-9a-f]+)\)")
TRACE = """
cd /sys/kernel/tracing
echo 'p:alias __x64_sys_getppid' > kprobe_events && echo 1 > events/kprobes/alias/enable
sh -c 'exec /bin/busybox sh -c "echo \\$PPID"' >/dev/null; sleep 0.1; cat trace
echo 0 > events/kprobes/alias/enable; echo > kprobe_events; echo > trace
"""


class Compared(Struct, frozen=True, kw_only=True):
    """A guest, what we found in its RAM, and what its own /proc/kallsyms says."""

    machine: Machine
    kernel: Kernel
    rows: set[tuple[int, str, str, str]]


def find(
    machine: Machine, *, backends: tuple[str, ...] = RAM_BACKENDS, cache: Path | None = None
) -> Kernel:
    with Stub.open(str(machine.stub_address)) as stub:
        return search(stub, backends, None if cache is None else KernelCache(cache)).kernel


def search(stub: Stub, backends: tuple[str, ...], cache: KernelCache | None) -> FoundKernel:
    machine = machine_of_stub(stub.description.architecture)
    ram = open_ram(stub, backends=backends)
    return read_kernel(find_spaces(ram, machine, registers_of(stub, machine)), cache=cache)


def modules(suite: str, arch: str = "amd64") -> dict[str, bytes]:
    """Some modules of a suite's kernel; none where the package has none beside it."""
    root = modules_of(kernel_image(suite=suite, arch=arch))
    found: dict[str, bytes] = {}
    for name in MODULES if root else ():
        assert root is not None
        path = next(iter((root / "kernel").glob(f"{name}*")))
        data = path.read_bytes()
        found[f"/modules/{path.name.split('.')[0]}.ko"] = (
            lzma.decompress(data) if path.suffix == ".xz" else data
        )
    return found


def own_symbols(machine: Machine) -> set[tuple[int, str, str, str]]:
    output = gzip.decompress(machine.run("gzip -c /proc/kallsyms", 120).output).decode()
    words = [line.split() for line in output.splitlines()]
    rows = ((int(w[0], 16), w[1], w[2], w[3].strip("[]") if w[3:] else "") for w in words)
    return {row for row in rows if row[3] not in PSEUDO}


@pytest.fixture(scope="module", params=SUITES.values(), ids=[*SUITES])
def compared(request: pytest.FixtureRequest, arch: str) -> Iterator[Compared]:
    files = modules(request.param, arch)
    options = MachineOptions(suite=request.param, arch=arch, files=files)
    with boot_or_skip(options) as machine:
        loaded = machine.run("for m in /modules/*.ko; do insmod $m || exit 1; done", 180)
        assert loaded.status == 0 or not files
        rows = own_symbols(machine)
        yield Compared(machine=machine, kernel=find(machine), rows=rows)


def as_row(symbol: Symbol) -> tuple[int, str, str, str]:
    return int(symbol.addr), symbol.type, symbol.name, symbol.module


def listed(kernel: Kernel) -> set[tuple[int, str, str, str]]:
    """Return all symbols but those of data that were found without being listed."""
    found = [as_row(symbol) for symbol in kernel.symbols.glob("*")]
    assert len(found) == len(kernel.symbols)
    is_whole = kernel.symbols.find("_end") is not None
    return {row for row in found if is_whole or row[1] != "d" or row[3]}


def test_every_symbol_is_the_kernels_own(compared: Compared) -> None:
    assert listed(compared.kernel) ^ compared.rows == set()


def test_modules_are_among_them(compared: Compared) -> None:
    owners = {compared.kernel.symbols.named(name).module for name in ("dummy_setup", "loop_add")}

    assert owners == {Path(name).stem for name in MODULES}


def test_release_banner_and_build_id_are_the_kernels_own(compared: Compared) -> None:
    machine, kernel = compared.machine, compared.kernel

    assert kernel.release == machine.run("uname -r", 180).output.decode().strip()
    assert kernel.banner == machine.run("cat /proc/version", 180).output.decode().strip()
    notes = machine.run("cat /sys/kernel/notes", 180).output
    assert kernel.build_id
    assert kernel.build_id in notes


@pytest.mark.arches("amd64", "arm64", matrix="arm64")
def test_types_are_the_kernels_own(compared: Compared) -> None:
    packed = compared.machine.run("gzip -c /sys/kernel/btf/vmlinux", 120).output
    own = btf_index.parse(gzip.decompress(packed))
    types = compared.kernel.types

    assert isinstance(types, BtfTypes)
    assert np.array_equal(types.btf.index.words, own.words)
    assert types.btf.index.names.blob == own.names.blob
    read = types.function("vfs_read")
    assert read is not None
    assert [p.type for p in read.parameters] == ["struct file *", "char *", "size_t", "loff_t *"]


def test_an_alias_and_its_size_are_those_that_the_kernel_prints(
    compared: Compared, arch: str
) -> None:
    printed = compared.machine.run(WORDS[arch].of(TRACE), 180).output.decode()
    shown = SHOWN.search(printed)
    symbols = compared.kernel.symbols

    symbol = symbols.at(symbols.named(WORDS[arch].of("__x64_sys_getppid")).addr)

    assert shown is not None, printed
    assert symbol is not None
    assert (symbol.name, symbol.size) == (shown[1], int(shown[2], 16))


def test_the_boot_image_is_the_same_build_and_another_is_not(compared: Compared) -> None:
    image = read_image(compared.machine.kernel)
    linked = kernel_from_image(image)

    check_same_build(compared.kernel, image)
    name = "do_sys_openat2"
    slid = compared.kernel.symbols.named(name).addr - linked.symbols.named(name).addr
    assert slid == compared.kernel.slide


@pytest.mark.arches("amd64", "arm64", matrix="arm64")
def test_every_way_to_ram_gives_the_same_kernel(compared: Compared) -> None:
    kernels = [find(compared.machine, backends=(backend,)) for backend in RAM_BACKENDS]

    assert len({(kernel.build_id, kernel.slide, len(kernel.symbols)) for kernel in kernels}) == 1


def test_a_warm_cache_gives_the_same_kernel(compared: Compared, tmp_path: Path) -> None:
    find(compared.machine, cache=tmp_path)

    warm = find(compared.machine, cache=tmp_path)

    assert listed(warm) == compared.rows
    assert len(warm.symbols) == len(compared.kernel.symbols)


def test_isolated_page_tables_lead_to_the_kernel(boot: Boot, arch: str) -> None:
    machine = boot(append=f"{ISOLATED[arch]} nokaslr")
    machine.start("while :; do :; done", 60)
    machine.start("while :; do :; done", 60)

    for _ in range(5):
        assert len(find(machine).symbols) > LEAST_SYMBOLS[arch]


def test_another_kernels_file_is_refused(guest: Machine) -> None:
    image = read_image(kernel_image(suite=SUITES["6.12"]))

    with pytest.raises(TargetError, match="is not the guest's kernel"):
        check_same_build(find(guest), image)
