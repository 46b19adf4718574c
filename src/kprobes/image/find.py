"""Finder of the kernel that runs in a guest's RAM: no file, no agent, no symbol needed.

The image is kept by the places where its pages were when the guest stood still: it never moves, but
the page table through which it was seen may be a process's, which can end as soon as the guest runs
again.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.machine import Machine
from kprobes.errors import MemoryFault, TargetError
from kprobes.formats import vmcoreinfo
from kprobes.formats.vmcoreinfo import VmcoreInfo
from kprobes.image.build import Build, Region, SymbolFiles, extract, kernel_of, no_files
from kprobes.image.cache import KernelCache
from kprobes.image.data_symbols import with_data_symbols
from kprobes.image.module_types import read_module_types
from kprobes.image.modules import read_modules
from kprobes.model.kernel import Kernel, version_of
from kprobes.ports import MappedRun, Ram, Tables
from kprobes.units import MIB, Phys


class ImageWindow:
    """Memory of mapped runs, without page tables. Implements ``ports.Memory``."""

    def __init__(self, ram: Ram, runs: Sequence[MappedRun]) -> None:
        """Take runs sorted by address."""
        self.ram = ram
        self._runs = runs
        self._starts = [run.virt for run in runs]

    def physical(self, addr: int) -> Phys:
        """Return where an address lies in RAM, or raise MemoryFault."""
        return Phys(self._run(addr).phys + addr - self._run(addr).virt)

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        pieces: list[bytes] = []
        at, stop = addr, addr + size
        while at < stop:
            run = self._run(at)
            step = min(stop, run.virt + run.size) - at
            pieces.append(self.ram.read(run.phys + at - run.virt, step))
            at += step
        return b"".join(pieces)

    def _run(self, addr: int) -> MappedRun:
        index = bisect_right(self._starts, addr) - 1
        if index < 0 or addr >= self._runs[index].virt + self._runs[index].size:
            raise MemoryFault(addr, 1)
        return self._runs[index]


_KERNEL_HALF = 1 << 63
_MAX_CPUS = 16
_MAX_IMAGES = 4
_MAX_IMAGE = 512 * MIB
_SCAN_STEP = 16 * MIB
_MAX_SCAN = 8192 * MIB
_PAGE = 4096


class FoundKernel(Struct, frozen=True, kw_only=True, eq=False):
    """A running kernel.

    Attributes:
        kernel: its facts, at running addresses.
        tables: its master page table, which no process's end takes away.
    """

    kernel: Kernel
    tables: Tables


class Space(Struct, frozen=True, kw_only=True):
    """An address space in which something is mapped where kernels are.

    Attributes:
        machine: whose it is.
        tables: a vCPU's; a process's, perhaps.
        runs: what they map there.
    """

    machine: Machine
    tables: Tables
    runs: tuple[MappedRun, ...]

    @property
    def rank(self) -> tuple[bool, int]:
        """What is higher, the likelier a kernel is there: one has constant data, and is large."""
        return bool(_constant(self)), sum(run.size for run in self.runs)

    @property
    def window(self) -> ImageWindow:
        """The same memory, whatever becomes of the tables."""
        return ImageWindow(self.tables.ram, self.runs)


Registers = Mapping[str, int]
"""Of a vCPU, by the stub's names."""


def find_spaces(ram: Ram, machine: Machine, vcpus: Sequence[Registers]) -> list[Space]:
    """Look where a kernel is mapped; the guest must stand still, for a millisecond.

    Args:
        ram: the guest's memory.
        machine: what it is.
        vcpus: their registers; those of one that runs a process are as good as the kernel's.
            Where none has page tables, memory is searched for VMCOREINFO.
    """
    return list(_spaces(ram, machine, vcpus))


def read_kernel(
    spaces: Sequence[Space],
    *,
    cache: KernelCache | None = None,
    files: SymbolFiles = no_files,
) -> FoundKernel:
    """Read the Linux kernel that is mapped in one of some spaces; the guest may run.

    Args:
        spaces: from ``find_spaces``.
        cache: of kernels seen before.
        files: asked for symbols where the kernel has none of its own.

    Raises:
        TargetError: there is none, or it has no intact symbols.
    """
    error = TargetError(
        "no kernel is mapped where kernels are: the guest is still in firmware, or not Linux"
    )
    for space in spaces:
        try:
            build = _build(space, cache, files)
            return _found(space, build)
        except TargetError as e:
            error = e
    raise error


def _spaces(ram: Ram, machine: Machine, vcpus: Sequence[Registers]) -> Iterator[Space]:
    # Kernel-mode vCPUs first. VMCOREINFO only when no page table is known: after a reset, the
    # memory still has that of the kernel before.
    paging = machine.paging
    tried = set[tuple[int, ...]]()
    for vcpu in sorted(vcpus, key=lambda found: found.get(paging.pc, 0) < _KERNEL_HALF):
        tables = paging.tables(ram, vcpu)
        roots = tuple(each.root for each in tables)
        if roots and roots not in tried and len(tried) < _MAX_CPUS:
            tried.add(roots)
            yield from _spaces_of(machine, tables)
    for info in _scan(ram) if not tried else ():
        yield from _spaces_of(machine, paging.noted(ram, info))


def _spaces_of(machine: Machine, tables: Sequence[Tables]) -> list[Space]:
    # Some map next to nothing of the kernel, or are none.
    spaces = [space for each in tables for space in _mapped(machine, each)]
    return sorted(spaces, key=attrgetter("rank"), reverse=True)[:_MAX_IMAGES]


def _mapped(machine: Machine, tables: Tables) -> Sequence[Space]:
    try:
        images = machine.paging.images(tables)
    except MemoryFault:
        return ()
    return [Space(machine=machine, tables=tables, runs=runs) for runs in images]


def _scan(ram: Ram) -> Iterator[VmcoreInfo]:
    # Only where memory can be looked at in place: through a stub this would take minutes.
    left = _MAX_SCAN
    for start, size in ram.runs:
        for at in range(start, start + min(size, left), _SCAN_STEP):
            view = ram.view(at, min(_SCAN_STEP + _PAGE, start + size - at))
            if view is not None:
                yield from vmcoreinfo.find(view.tobytes())
        left -= min(size, left)


def _build(space: Space, cache: KernelCache | None, files: SymbolFiles) -> Build:
    text = next((run.virt for run in space.runs if run.is_executable), None)
    if cache is not None and text is not None:
        known = cache.match(space.window, text)
        if known is not None:
            return known
    build = extract(space.window, _regions(space), files)
    # Those of a file are not proven by the guest's memory: each time anew.
    if cache is not None and build.table.sources:
        cache.store(build)
    return build


def _regions(space: Space) -> Iterator[Region]:
    # Read-only data first, the largest piece first. Then whatever is mapped in one piece, for
    # kernels that protect nothing, or not yet.
    for groups in (_joined(_constant(space)), _joined(list(space.runs))):
        left = _MAX_IMAGE
        for group in sorted(groups, key=_size, reverse=True):
            left -= _size(group)
            if left >= 0 and (region := _region(space, group)) is not None:
                yield region


def _constant(space: Space) -> list[MappedRun]:
    return [run for run in space.runs if not run.is_writable and not run.is_executable]


def _joined(runs: list[MappedRun]) -> list[list[MappedRun]]:
    groups: list[list[MappedRun]] = []
    for run in runs:
        if groups and groups[-1][-1].stop == run.virt:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _size(group: list[MappedRun]) -> int:
    return group[-1].stop - group[0].virt


def _region(space: Space, group: list[MappedRun]) -> Region | None:
    # A copy: what is checked now must not change before it is used.
    ram = space.tables.ram
    try:
        data = b"".join(_bytes(ram, run) for run in group)
    except MemoryFault:
        return None
    return Region(addr=group[0].virt, data=data)


def _bytes(ram: Ram, run: MappedRun) -> bytes:
    view = ram.view(run.phys, run.size)
    return ram.read(run.phys, run.size) if view is None else view.tobytes()


def _found(space: Space, build: Build) -> FoundKernel:
    types = build.types
    tables = _master(space, build)
    groups = (_region(space, group) for group in _joined(_constant(space)))
    constant = (region for region in groups if region is not None)
    build = with_data_symbols(build, tables, space.machine.text, constant)
    modules = read_modules(tables, build.address(b"modules"), types)
    slide = _slide(space.machine, tables, build)
    kernel = kernel_of(build, types, arch=space.machine.name, slide=slide, modules=modules)
    added = read_module_types(tables, build.address(b"btf_modules"), build.btf, types)
    return FoundKernel(kernel=replace(kernel, module_types=added), tables=tables)


def _master(space: Space, build: Build) -> Tables:
    # The kernel's own table, if it maps the text where this one does. A process's is memory of
    # something else when it has ended.
    window, text = space.window, build.address(b"_stext")
    candidates = list(_master_addresses(space, build))
    for virt in candidates:
        with suppress(MemoryFault):
            master = space.tables.rooted(window.physical(virt))
            if text is not None and master.physical(text) == window.physical(text):
                return master
    if space.machine.paging.master_user and not candidates:
        raise TargetError(f"{build.release}: where it has its own page table cannot be told")
    return space.tables


def _master_addresses(space: Space, build: Build) -> Iterator[int]:
    paging = space.machine.paging
    known = build.address(paging.master.encode())
    if known is not None:
        yield known
        return
    user = build.extent(paging.master_user.encode())
    if user is None:
        return
    addr, size = user
    code = space.window.read(addr, min(size, _PAGE))
    for place in space.machine.text.references(code, addr):
        with suppress(MemoryFault):
            virt = int.from_bytes(space.window.read(place, 8), "little")
            if virt >= _KERNEL_HALF and virt % _PAGE == 0:
                yield virt


def _slide(machine: Machine, tables: Tables, build: Build) -> int:
    paging = machine.paging
    start, stop = paging.window(tables)
    link = paging.link(tables, version_of(build.release))
    text = build.text or link
    info = _vmcoreinfo(tables, build)
    noted = info.slide if info is not None else None
    if noted is not None and noted % _PAGE == 0 and start <= text - noted < stop:
        return noted
    return (text - link) & -paging.link_step


def _vmcoreinfo(tables: Tables, build: Build) -> VmcoreInfo | None:
    at = build.address(b"vmcoreinfo_data")
    if at is None:
        return None
    try:
        found = map(vmcoreinfo.parse, vmcoreinfo.texts_at(tables.read, at))
    except MemoryFault:
        return None
    return next((info for info in found if info.symbols), None)
