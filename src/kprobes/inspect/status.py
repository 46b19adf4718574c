"""Armed sites of a guest and their owners, and which functions can be probed by name.

Ftrace sites are read as they are, beside our journals. Of jumps and breakpoints, which are
anywhere, journals tell, and what tracers note in the guest.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from enum import StrEnum

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.arch.arch import FtraceInfo
from kprobes.errors import MemoryFault, TargetError
from kprobes.guest.armed import FLAGS, ArmedPatch
from kprobes.guest.journal import Entry
from kprobes.image.system_calls import SystemCall, read_system_call
from kprobes.model.definition import ITERATOR
from kprobes.model.kernel import SYSTEM_CALLS, Kernel, Prototype, Symbol
from kprobes.plan.ftrace import DISABLED, known_sites
from kprobes.ports import Memory
from kprobes.units import Addr

_GAP = 1 << 16
"""Sites closer than this are read together: few reads, and a bounded size of each."""
_FLAGS = 8
"""Offset of dyn_ftrace.flags."""
_ENABLED = 1 << 31
"""FTRACE_FL_ENABLED: the guest's ftrace has put a call there. Same bit from 5.10 to 7.x."""


class Owner(StrEnum):
    """Who patched a site."""

    JOURNAL = "journal"
    """A tracer of this machine, whose journal has these very bytes."""
    TRACER = "tracer"
    """A kprobes tracer of another machine, or one whose journal is lost: in a snapshot, say."""
    GUEST = "guest"
    """The guest's own ftrace: a tracer, kprobe event or BPF program in it."""
    UNKNOWN = "unknown"
    """Bytes that are not a call at all."""


class ArmedSite(Struct, frozen=True, kw_only=True):
    """One site that does not hold its nop.

    Attributes:
        where: of the site, as symbol and offset, or the bare address.
        code: what it holds.
        event: what our journal says it is for, else "".
        entry: the journal, for Owner.JOURNAL only.
    """

    addr: Addr
    where: str
    code: bytes
    owner: Owner
    event: str = ""
    entry: Entry | None = None


class Status(Struct, frozen=True, kw_only=True):
    """A guest's ftrace sites: how many there are; and what is armed, any other site included."""

    release: str
    sites: int
    armed: tuple[ArmedSite, ...]


def read_status(
    memory: Memory,
    kernel: Kernel,
    info: FtraceInfo,
    entries: Iterable[Entry],
    noted: Iterable[ArmedPatch] = (),
) -> Status:
    """Compare every ftrace site of a guest with what it holds when idle.

    Args:
        memory: of the guest, which may run: it is only read.
        kernel: that runs there.
        info: of its architecture's sites.
        entries: journals of this guest.
        noted: patches of tracers that have no journal here.

    Raises:
        TargetError: its list of them is broken.
    """
    sites = known_sites(memory, kernel)
    addrs, codes = read_codes(memory, sites.addrs, info.size)
    is_armed = ~_is_idle(codes, info.nops)
    theirs = [(patch, None) for patch in noted]
    ours = [*theirs, *((patch, entry) for entry in entries for patch in entry.patches)]
    known = {(patch.addr, patch.new): (patch, entry) for patch, entry in ours}
    armed: list[ArmedSite] = []
    for number, row in zip(addrs[is_armed].tolist(), codes[is_armed], strict=True):
        addr, code = Addr(number), row.tobytes()
        patch, entry = known.get((addr, code), (None, None))
        is_call = info.target(addr, code) is not None
        owner = _known_owner(patch, entry) or _owner(memory, sites.find(addr), is_call=is_call)
        event = patch.what if patch else ""
        where = _where(kernel, addr)
        armed.append(
            ArmedSite(addr=addr, where=where, code=code, owner=owner, event=event, entry=entry)
        )
    armed += _elsewhere(memory, kernel, ours, {site.addr for site in armed})
    return Status(release=kernel.release, sites=len(sites.addrs), armed=tuple(armed))


def _known_owner(patch: ArmedPatch | None, entry: Entry | None) -> Owner | None:
    if patch is None:
        return None
    return Owner.TRACER if entry is None else Owner.JOURNAL


def _elsewhere(
    memory: Memory,
    kernel: Kernel,
    ours: Iterable[tuple[ArmedPatch, Entry | None]],
    found: Container[Addr],
) -> Iterator[ArmedSite]:
    # Jumps and breakpoints, which no list of the kernel's has.
    for patch, entry in ours:
        if patch.what == FLAGS or patch.addr in found or patch.new == patch.old:
            continue
        with suppress(MemoryFault):
            if memory.read(patch.addr, len(patch.new)) == patch.new:
                yield ArmedSite(
                    addr=patch.addr,
                    where=_where(kernel, patch.addr),
                    code=patch.new,
                    owner=Owner.JOURNAL if entry else Owner.TRACER,
                    event=patch.what,
                    entry=entry,
                )


def read_codes(
    memory: Memory, addrs: NDArray[np.uint64], size: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Read the bytes of many places, neighbours together.

    Args:
        memory: of the guest.
        addrs: uint64 (n,), ascending.
        size: bytes of each.

    Returns:
        Copies: the addresses that could be read, (m,), and their bytes, (m, size). A module's go
        when it is unloaded.
    """
    found: list[NDArray[np.uint64]] = [addrs[:0]]
    codes: list[NDArray[np.uint8]] = [np.zeros((0, size), np.uint8)]
    far = np.flatnonzero(np.diff(addrs) > np.uint64(_GAP)) + 1
    for group in np.split(addrs, far):
        try:
            code = _read_group(memory, group, size)
        except MemoryFault:
            continue
        found.append(group)
        codes.append(code)
    return np.concatenate(found), np.concatenate(codes)


def _read_group(memory: Memory, addrs: NDArray[np.uint64], size: int) -> NDArray[np.uint8]:
    if not len(addrs):
        return np.zeros((0, size), np.uint8)
    start, stop = int(addrs[0]), int(addrs[-1]) + size
    data = np.frombuffer(memory.read(start, stop - start), np.uint8)
    offsets = (addrs - np.uint64(start)).astype(np.int64)
    return data[offsets[:, np.newaxis] + np.arange(size)]


def _is_idle(codes: NDArray[np.uint8], nops: Iterable[bytes]) -> NDArray[np.bool_]:
    is_idle = np.zeros(len(codes), np.bool_)
    for nop in nops:
        is_idle |= (codes == np.frombuffer(nop, np.uint8)).all(axis=1)
    return is_idle


def _owner(memory: Memory, record: Addr | None, *, is_call: bool) -> Owner:
    if not is_call or record is None:
        return Owner.UNKNOWN
    flags = int.from_bytes(memory.read(record + _FLAGS, 8), "little")
    return Owner.GUEST if flags & _ENABLED and not flags & DISABLED else Owner.TRACER


def _where(kernel: Kernel, addr: Addr) -> str:
    symbol = kernel.symbols.at(addr)
    return f"{addr:#x}" if symbol is None else f"{symbol.name}+{addr - symbol.addr:#x}"


class Function(Struct, frozen=True, kw_only=True):
    """A function that a definition may name.

    Attributes:
        symbol: where it is.
        prototype: its signature, or None when the kernel's types have none, or nobody asked.
    """

    symbol: Symbol
    prototype: Prototype | None


def probeable(
    memory: Memory, kernel: Kernel, info: FtraceInfo, *, pattern: str, is_typed: bool = True
) -> list[Function]:
    """Return the functions that match a shell pattern and can be probed, by name.

    Where the kernel has no ftrace sites: all that match.

    Args:
        memory: of the guest.
        kernel: that runs there.
        info: of its architecture's sites.
        pattern: a name or a shell pattern.
        is_typed: whether with prototypes, which take the longest.

    Raises:
        TargetError: none is left; says how many match that cannot be probed.
    """
    sites = frozenset(known_sites(memory, kernel).addrs.tolist())
    every = kernel.symbols.glob(pattern)
    found = {s.name: s for s in every if s.is_text}
    # A name of two symbols says too little; all that have it match.
    counts = Counter(s.name for s in every)
    chosen = [
        found[name]
        for name in sorted(found)
        if counts[name] == 1
        and (not sites or any(found[name].addr + off in sites for off in info.offsets))
    ]
    if not chosen:
        raise TargetError(_none(kernel, pattern, found))
    return [
        Function(symbol=symbol, prototype=_prototype(kernel, symbol) if is_typed else None)
        for symbol in chosen
    ]


def tracepoints(kernel: Kernel, *, pattern: str) -> list[Function]:
    """Return the tracepoints that match a shell pattern and can be probed, by name.

    Args:
        kernel: that has them.
        pattern: a name or a shell pattern.

    Returns:
        Each with its name as that of a function, and what it gives as parameters of that.

    Raises:
        TargetError: none is left.
    """
    found = [s for s in kernel.symbols.glob(f"{ITERATOR}{pattern}") if not s.module]
    if not found:
        raise TargetError(f"no tracepoint matches {pattern!r} in {kernel.release}")
    return sorted((_tracepoint(kernel, each) for each in found), key=lambda each: each.symbol.name)


def system_calls(memory: Memory, kernel: Kernel, *, pattern: str) -> list[SystemCall]:
    """Return the system calls whose names match a shell pattern, by name.

    Args:
        memory: of the guest, which may run: it is only read.
        kernel: that runs there.
        pattern: a name or a shell pattern.

    Raises:
        TargetError: none is left.
    """
    names = {
        symbol.name.removeprefix(start)
        for start in SYSTEM_CALLS
        for symbol in kernel.symbols.glob(f"{start}{pattern}")
    }
    if not names:
        raise TargetError(f"no system call matches {pattern!r} in {kernel.release}")
    return [read_system_call(memory, kernel, name) for name in sorted(names)]


def _tracepoint(kernel: Kernel, iterator: Symbol) -> Function:
    symbol = replace(iterator, name=iterator.name.removeprefix(ITERATOR))
    prototype = _prototype(kernel, iterator)
    if prototype is not None:
        # The first is whoever listens.
        prototype = replace(prototype, parameters=prototype.parameters[1:], returns="void")
    return Function(symbol=symbol, prototype=prototype)


def _prototype(kernel: Kernel, symbol: Symbol) -> Prototype | None:
    types = kernel.types_for(symbol.module)
    return types.function(symbol.name) if types else None


def _none(kernel: Kernel, pattern: str, found: dict[str, Symbol]) -> str:
    text = f"no function that can be probed matches {pattern!r} in {kernel.release}"
    if not found:
        return text
    return f"{text}: {len(found)} match, but have no ftrace site or share their name with others"
