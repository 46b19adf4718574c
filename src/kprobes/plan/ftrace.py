"""The ftrace strategy: which functions have a site, and what stands there now.

A guest's ftrace keeps a record per site, in pages (kernel/trace/ftrace.c, include/linux/ftrace.h):

    struct ftrace_page { struct ftrace_page *next; struct dyn_ftrace *records; int index; ... };
    struct dyn_ftrace { unsigned long ip; unsigned long flags; struct dyn_arch_ftrace arch; };
"""

import struct
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.arch.arch import FtraceInfo
from kprobes.arch.registry import machine
from kprobes.errors import MemoryFault, RefusedError, TargetError
from kprobes.model.kernel import Kernel, Symbol
from kprobes.model.plan import Site, Strategy
from kprobes.ports import Memory
from kprobes.units import Addr

DISABLED = 1 << 25
"""FTRACE_FL_DISABLED: the guest's ftrace leaves the site alone. Same bit from 5.10 to 7.x."""

_LEADS_ELSEWHERE = 1 << 26
"""FTRACE_FL_IPMODIFY: one of the site's tracers may go on elsewhere, as a live patch does. Same bit
from 5.10 to 7.x."""
_MAX_PAGES = 10_000
_MAX_RECORDS = 1_000_000
_RECORD_SIZE = 16
_PAGE = 4096
_TRACER = "ftrace_location_range", "ftrace_location"
"""Functions that only kernels with CONFIG_DYNAMIC_FTRACE have."""


class Sites(Struct, frozen=True, kw_only=True, eq=False):
    """Every ftrace site of a running kernel, sorted by address.

    Attributes:
        addrs: uint64 (n,), where the sites are.
        records: uint64 (n,), where their dyn_ftrace records are.
    """

    addrs: NDArray[np.uint64]
    records: NDArray[np.uint64]

    def find(self, addr: int) -> Addr | None:
        """Return the record of the site at exactly this address, or None."""
        # Of one address this takes a fifth of searchsorted's time.
        addrs = self.addrs.data
        at = bisect_left(addrs, addr)
        return Addr(self.records.data[at]) if at < len(addrs) and addrs[at] == addr else None


def read_sites(memory: Memory, kernel: Kernel) -> Sites:
    """Read the guest's own list of ftrace sites; none where its kernel has no dynamic ftrace.

    Raises:
        RefusedError: there are some, but their list was not found.
        TargetError: its list is broken.
    """
    start = kernel.symbols.find("ftrace_pages_start")
    if start is None:
        return _without_list(kernel)
    addrs: list[NDArray[np.uint64]] = []
    records: list[NDArray[np.uint64]] = []
    page, total = _u64(memory, start.addr), 0
    for _ in range(_MAX_PAGES):
        if page == 0:
            return _sorted(addrs, records)
        header = memory.read(page, 20)
        base, count = int.from_bytes(header[8:16], "little"), int.from_bytes(header[16:], "little")
        total += count
        if total > _MAX_RECORDS:
            break
        found = np.frombuffer(memory.read(base, count * _RECORD_SIZE), np.uint64)[::2]
        addrs.append(found)
        records.append(np.uint64(base) + np.arange(count, dtype=np.uint64) * _RECORD_SIZE)
        page = int.from_bytes(header[:8], "little")
    raise TargetError("the guest's list of ftrace sites has no end; its memory is corrupted")


def known_sites(memory: Memory, kernel: Kernel) -> Sites:
    """Read the guest's own list of ftrace sites; none where the kernel has none, or hides them.

    Only for who looks: where sites are not known no probe is safe.
    """
    try:
        return read_sites(memory, kernel)
    except RefusedError:
        return _sorted([], [])


def sites_in_image(image: Memory, kernel: Kernel) -> Sites:
    """Read the sites that a kernel's file lists for its boot; they have no records.

    Raises:
        RefusedError: there are some, but their list was not found.
        TargetError: its list is broken.
    """
    start, stop = (
        kernel.symbols.find(name) for name in ("__start_mcount_loc", "__stop_mcount_loc")
    )
    if start is None or stop is None:
        return _without_list(kernel)
    count = (stop.addr - start.addr) // 8
    if not 0 <= count <= _MAX_RECORDS:
        raise TargetError("the kernel's list of ftrace sites has no end; the file is damaged")
    addrs = np.frombuffer(image.read(start.addr, 8 * count), np.uint64)
    # Zero: of a weak function that another one replaced (since 6.15, and in stable kernels).
    lasting = addrs[(addrs != 0) & ~_is_init(addrs, kernel)]
    known = machine(kernel.arch).text
    lasting = np.array(known.listed_sites(image.read, lasting.tolist()), np.uint64)
    return _sorted([lasting], [np.zeros(len(lasting), np.uint64)])


def has_tracer(kernel: Kernel) -> bool:
    """Whether a kernel has ftrace sites, be they known or not."""
    return any(kernel.symbols.find(name) is not None for name in _TRACER)


def _without_list(kernel: Kernel) -> Sites:
    if not has_tracer(kernel):
        return _sorted([], [])
    raise RefusedError(
        "this kernel has ftrace sites, but its list of them was not found (no CONFIG_KALLSYMS_ALL?)"
        ": which instructions its function tracer changes is not known"
    )


def _is_init(addrs: NDArray[np.uint64], kernel: Kernel) -> NDArray[np.bool_]:
    # Their memory is freed after the boot.
    start, stop = (kernel.symbols.find(name) for name in ("_sinittext", "_einittext"))
    if start is None or stop is None:
        return np.zeros(len(addrs), np.bool_)
    return (addrs >= np.uint64(start.addr)) & (addrs < np.uint64(stop.addr))


def site_of(start: Addr, sites: Sites, info: FtraceInfo) -> Addr | None:
    """Return the address of the site of the function that starts there, or None."""
    for offset in info.offsets:
        if sites.find(start + offset) is not None:
            return Addr(start + offset)
    return None


def locate(function: Symbol, sites: Sites, info: FtraceInfo) -> Addr | None:
    """Return the address of a probe at a function's ftrace site, or None when it has none."""
    found = site_of(function.addr, sites, info)
    return function.addr if found is not None and info.reports_entry else found


def have_sites(functions: Sequence[Symbol], sites: Sites, info: FtraceInfo) -> list[bool]:
    """Return for each of many functions whether ``locate`` finds a site."""
    starts = np.array([function.addr for function in functions], np.uint64)
    found = [_numbers(starts + np.uint64(offset), sites) >= 0 for offset in info.offsets]
    return np.logical_or.reduce(found).tolist()


def _numbers(addrs: NDArray[np.uint64], sites: Sites) -> NDArray[np.intp]:
    # The number of the site at exactly each address, shape (n,); -1 where there is none.
    numbers = np.searchsorted(sites.addrs, addrs)
    is_site = numbers < len(sites.addrs)
    is_site[is_site] = sites.addrs[numbers[is_site]] == addrs[is_site]
    return np.where(is_site, numbers, -1)


def inspect(addr: Addr, memory: Memory, sites: Sites, info: FtraceInfo) -> Site:
    """Look at what an idle site holds now; in a file it holds nothing yet.

    Raises:
        RefusedError: something else than a nop is there.
    """
    record = sites.find(addr)
    if record is None:
        raise RefusedError(f"{addr:#x} is not an ftrace site")
    if record == 0:
        return Site(strategy=Strategy.FTRACE, addr=addr, old=b"")
    ip, flags = struct.unpack("<QQ", memory.read(record, _RECORD_SIZE))
    if ip != addr:
        raise RefusedError(
            f"the ftrace record of {addr:#x} is not there any more: its module was unloaded"
        )
    size = len(info.preamble)
    found = memory.read(Addr(addr - size), size + info.size)
    preamble, old = found[:size], found[size:]
    if preamble not in (info.preamble, info.probed_preamble):
        raise RefusedError(f"{addr:#x} comes after {preamble.hex()}: no site of this kind is there")
    if old not in info.nops:
        raise RefusedError(
            f"the site at {addr:#x} holds {old.hex()}, neither a nop nor a call of the guest's "
            "ftrace: another tracer has it, or it is being changed right now"
        )
    return Site(
        strategy=Strategy.FTRACE,
        addr=addr,
        old=old,
        record=record,
        flags=flags,
    )


def idle_sites(
    addrs: Sequence[Addr], memory: Memory, sites: Sites, info: FtraceInfo
) -> dict[Addr, Site]:
    """Return those of many addresses where ``inspect`` finds an idle site: all looked at together.

    Args:
        addrs: of sites, or of others, which are left out. So is what crosses a page.
        memory: is read in whole pages.
        sites: of the kernel.
        info: of its architecture.
    """
    wanted = np.array(addrs, np.uint64)
    numbers = _numbers(wanted, sites)
    wanted, records = wanted[numbers >= 0], sites.records[numbers[numbers >= 0]]
    size = len(info.preamble)
    code = _rows(memory, wanted - np.uint64(size), size + info.size)
    entries = _rows(memory, records, _RECORD_SIZE).view(np.uint64)
    preambles = info.preamble, info.probed_preamble
    is_whole = _is_any(code[:, :size], preambles) & (entries[:, 0] == wanted) & (records != 0)
    found: dict[Addr, Site] = {}
    for nop in info.nops:
        is_idle = is_whole & _is_any(code[:, size:], (nop,))
        columns = (wanted[is_idle], records[is_idle], entries[is_idle, 1])
        for addr, record, flags in zip(*(column.tolist() for column in columns), strict=True):
            found[addr] = Site(
                strategy=Strategy.FTRACE, addr=addr, old=nop, record=record, flags=flags
            )
    return found


def _is_any(rows: NDArray[np.uint8], values: Sequence[bytes]) -> NDArray[np.bool_]:
    # Which rows are one of some values, shape (n,).
    equal = [(rows == np.frombuffer(value, np.uint8)).all(axis=1) for value in values]
    return np.logical_or.reduce(equal)


def _rows(memory: Memory, addrs: NDArray[np.uint64], width: int) -> NDArray[np.uint8]:
    # Some bytes at each address, shape (n, width), a copy. Zeros, which are no site and no record,
    # where they lie on two pages or cannot be read.
    numbers, page_of = np.unique(addrs // np.uint64(_PAGE), return_inverse=True)
    pages = b"".join(_page(memory, number) for number in numbers.tolist())
    at = (addrs % np.uint64(_PAGE)).astype(np.intp)
    is_inside = at + width <= _PAGE
    starts = page_of * _PAGE + np.where(is_inside, at, 0)
    rows = np.frombuffer(pages, np.uint8)[starts[:, np.newaxis] + np.arange(width)]
    rows[~is_inside] = 0
    return rows


def _page(memory: Memory, number: int) -> bytes:
    try:
        return memory.read(number * _PAGE, _PAGE)
    except MemoryFault:
        return bytes(_PAGE)


def tracepoint_site(addr: Addr, shown: Addr, info: FtraceInfo) -> Site:
    """Return the site of a function of ours that a tracepoint calls.

    Args:
        addr: of the tracepoint's struct.
        shown: what its probes have as their address: of a function that is entered likewise.
        info: of the architecture's sites.
    """
    return Site(
        strategy=Strategy.FTRACE, addr=addr, old=info.nops[0], shown=shown, is_tracepoint=True
    )


def is_in_use(addr: Addr, memory: Memory, sites: Sites, info: FtraceInfo) -> bool:
    """Whether a site of a running kernel holds a call of the guest's own ftrace.

    It writes that call again, or a nop, when its tracers change, and gives up for good where it
    does not find its own bytes.
    """
    is_live = bool(sites.find(addr))
    return is_live and info.target(addr, memory.read(addr, info.size)) is not None


def leads_elsewhere(addr: Addr, memory: Memory, sites: Sites) -> bool:
    """Whether the guest's own ftrace may lead a call of a function elsewhere, at its site."""
    record = sites.find(addr)
    return bool(record) and bool(_u64(memory, record + 8) & _LEADS_ELSEWHERE)


def _sorted(addrs: list[NDArray[np.uint64]], records: list[NDArray[np.uint64]]) -> Sites:
    if not addrs:
        return Sites(addrs=np.zeros(0, np.uint64), records=np.zeros(0, np.uint64))
    joined, found = np.concatenate(addrs), np.concatenate(records)
    order = np.argsort(joined, kind="stable")
    return Sites(addrs=joined[order], records=found[order])


def _u64(memory: Memory, addr: int) -> int:
    return int.from_bytes(memory.read(addr, 8), "little")
