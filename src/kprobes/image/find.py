"""Guest RAM to the kernel that runs in it: no file, no agent, no symbol needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kprobes.arch.x86_64.kernel_map import LINK, MASTER_TABLE, WINDOW
from kprobes.arch.x86_64.paging import PTI_USER, PageTables, Run
from kprobes.errors import MemoryFault, TargetError
from kprobes.formats import vmcoreinfo
from kprobes.formats.vmcoreinfo import VmcoreInfo
from kprobes.image.build import Build, Region, extract, kernel_of
from kprobes.image.cache import KernelCache
from kprobes.image.module_types import read_module_types
from kprobes.image.modules import read_modules
from kprobes.image.types import parse_types
from kprobes.image.window import ImageWindow
from kprobes.model.kernel import Kernel
from kprobes.ports import Ram
from kprobes.units import MIB

_KERNEL_HALF = 1 << 63
_MAX_CPUS = 16
_MAX_IMAGE = 512 * MIB
_SCAN_STEP = 16 * MIB
_MAX_SCAN = 8192 * MIB
_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundKernel:
    """A running kernel.

    Attributes:
        kernel: its facts, at running addresses.
        tables: its master page table, which no process's end takes away.
    """

    kernel: Kernel
    tables: PageTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """An address space in which something is mapped where kernels are.

    Attributes:
        tables: a vCPU's; a process's, perhaps.
        runs: what they map there.
    """

    tables: PageTables
    runs: tuple[Run, ...]

    @property
    def size(self) -> int:
        """Bytes that are mapped."""
        return sum(run.size for run in self.runs)

    @property
    def window(self) -> ImageWindow:
        """The same memory, whatever becomes of the tables."""
        return ImageWindow(self.tables.ram, self.runs)


def find_kernel(
    ram: Ram,
    cr3s: Sequence[int],
    hint_rips: Sequence[int],
    *,
    cache: KernelCache | None = None,
) -> FoundKernel:
    """Find the Linux kernel that runs in a guest: ``find_spaces`` and ``read_kernel`` in one."""
    return read_kernel(find_spaces(ram, cr3s, hint_rips), cache=cache)


def find_spaces(ram: Ram, cr3s: Sequence[int], hint_rips: Sequence[int]) -> list[Space]:
    """Look where a kernel is mapped; the guest must stand still, for a millisecond.

    Args:
        ram: the guest's memory.
        cr3s: of its vCPUs; a process's is as good as the kernel's. Without any, memory is
            searched for VMCOREINFO.
        hint_rips: of the same vCPUs: one in the kernel makes its CR3 the likelier.
    """
    return list(_spaces(ram, cr3s, hint_rips))


def read_kernel(spaces: Sequence[Space], *, cache: KernelCache | None = None) -> FoundKernel:
    """Read the Linux kernel that is mapped in one of some spaces; the guest may run.

    Args:
        spaces: from ``find_spaces``.
        cache: of kernels seen before.

    Raises:
        TargetError: there is none, or it has no intact symbols.
    """
    error = TargetError(
        f"no kernel is mapped at {WINDOW[0]:#x}: the guest is still in firmware, or not Linux"
    )
    for space in spaces:
        try:
            build = _build(space, cache)
            return _found(space, build)
        except TargetError as e:
            error = e
    raise error


def _spaces(ram: Ram, cr3s: Sequence[int], rips: Sequence[int]) -> Iterator[Space]:
    # Kernel-mode vCPUs first. VMCOREINFO only when no CR3 is known: after a reset, the memory
    # still has that of the kernel before.
    in_user = {cr3: rip < _KERNEL_HALF for cr3, rip in zip(cr3s, rips, strict=False)}
    unique = sorted(dict.fromkeys(cr3s), key=lambda cr3: in_user.get(cr3, True))
    for cr3 in unique[:_MAX_CPUS]:
        yield from _spaces_of(ram, cr3)
    for info in _scan(ram) if not any(cr3s) else ():
        root = _master_of(info)
        if root is not None:
            yield from _spaces_of(ram, root)


def _spaces_of(ram: Ram, cr3: int) -> list[Space]:
    # Under page-table isolation a user-mode CR3 maps next to nothing of the kernel; whether
    # there is isolation, and how many levels, shows in what is mapped. The largest first.
    roots = dict.fromkeys((cr3, cr3 & ~PTI_USER))
    tables = [PageTables(ram, root, levels=levels) for root in roots for levels in (4, 5)]
    spaces = [space for each in tables if (space := _space(each)) is not None]
    return sorted(spaces, key=lambda space: space.size, reverse=True)


def _space(tables: PageTables) -> Space | None:
    try:
        runs = tables.mapped_runs(*WINDOW)
    except MemoryFault:
        return None
    return Space(tables=tables, runs=runs) if runs else None


def _scan(ram: Ram) -> Iterator[VmcoreInfo]:
    # Only where memory can be looked at in place: through a stub this would take minutes.
    left = _MAX_SCAN
    for start, size in ram.runs:
        for at in range(start, start + min(size, left), _SCAN_STEP):
            view = ram.view(at, min(_SCAN_STEP + _PAGE, start + size - at))
            if view is not None:
                yield from vmcoreinfo.find(view.tobytes())
        left -= min(size, left)


def _master_of(info: VmcoreInfo) -> int | None:
    virt, base = info.symbols.get("swapper_pg_dir"), info.numbers.get("phys_base")
    if virt is None or base is None or virt < WINDOW[0]:
        return None
    return max(virt - WINDOW[0] + base, 0)


def _build(space: Space, cache: KernelCache | None) -> Build:
    text = next((run.virt for run in space.runs if run.is_executable), None)
    if cache is not None and text is not None:
        known = cache.match(space.window, text)
        if known is not None:
            return known
    build = extract(space.window, _regions(space))
    if cache is not None:
        cache.store(build)
    return build


def _regions(space: Space) -> Iterator[Region]:
    # Read-only data first, the largest piece first. Then whatever is mapped in one piece, for
    # kernels that protect nothing, or not yet.
    constant = [run for run in space.runs if not run.is_writable and not run.is_executable]
    for groups in (_joined(constant), _joined(list(space.runs))):
        left = _MAX_IMAGE
        for group in sorted(groups, key=_size, reverse=True):
            left -= _size(group)
            if left >= 0 and (region := _region(space, group)) is not None:
                yield region


def _joined(runs: list[Run]) -> list[list[Run]]:
    groups: list[list[Run]] = []
    for run in runs:
        if groups and groups[-1][-1].stop == run.virt:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _size(group: list[Run]) -> int:
    return group[-1].stop - group[0].virt


def _region(space: Space, group: list[Run]) -> Region | None:
    # A copy: what is checked now must not change before it is used.
    ram = space.tables.ram
    try:
        data = b"".join(_bytes(ram, run) for run in group)
    except MemoryFault:
        return None
    return Region(addr=group[0].virt, data=data)


def _bytes(ram: Ram, run: Run) -> bytes:
    view = ram.view(run.phys, run.size)
    return ram.read(run.phys, run.size) if view is None else view.tobytes()


def _found(space: Space, build: Build) -> FoundKernel:
    types = parse_types(build.btf) if build.btf else None
    tables = _master(space, build)
    modules = read_modules(tables, build.address(b"modules"), types)
    slide = _slide(tables, build)
    kernel = kernel_of(build, types, arch="x86_64", slide=slide, modules=modules)
    added = read_module_types(tables, build.address(b"btf_modules"), build.btf, types)
    return FoundKernel(kernel=replace(kernel, module_types=added), tables=tables)


def _master(space: Space, build: Build) -> PageTables:
    # The kernel's own table, if it maps the text where this one does.
    virt, text = build.address(MASTER_TABLE.encode()), build.address(b"_stext")
    if virt is None or text is None:
        return space.tables
    ram, levels, window = space.tables.ram, space.tables.levels, space.window
    try:
        master = PageTables(ram, window.physical(virt), levels=levels)
        is_same = master.physical(text) == window.physical(text)
    except MemoryFault:
        return space.tables
    return master if is_same else space.tables


def _slide(tables: PageTables, build: Build) -> int:
    text = build.text or LINK
    info = _vmcoreinfo(tables, build)
    told = info.slide if info is not None else None
    if told is not None and told % _PAGE == 0 and WINDOW[0] <= text - told < WINDOW[1]:
        return told
    return text - LINK


def _vmcoreinfo(tables: PageTables, build: Build) -> VmcoreInfo | None:
    at = build.address(b"vmcoreinfo_data")
    if at is None:
        return None
    try:
        text = tables.read(int.from_bytes(tables.read(at, 8), "little"), _PAGE)
    except MemoryFault:
        return None
    return next(vmcoreinfo.find(text), None)
