"""Who uses a guest's own ftrace: its list of ftrace_ops, and which functions each of them traces.

    struct ftrace_ops { ftrace_func_t func; struct ftrace_ops *next; unsigned long flags; ...;
                        struct ftrace_ops_hash *func_hash; ...;
                        unsigned long trampoline, trampoline_size; };    // linux/ftrace.h
    struct ftrace_ops_hash { struct ftrace_hash *notrace_hash, *filter_hash; ... };
    struct ftrace_hash { unsigned long size_bits; struct hlist_head *buckets; ulong count; ... };
    struct ftrace_func_entry { struct hlist_node hlist; unsigned long ip; ... };

The guest may run, and may be hostile: what does not read is left out, lists end somewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.model.kernel import Kernel
from kprobes.ports import Memory
from kprobes.units import U64, Addr

_MAX_TRACERS = 1 << 10
_MAX_BITS = 20
_MAX_ENTRIES = 1 << 20
_MAX_TRAMPOLINE = 1 << 14
# FTRACE_OPS_FL_SAVE_REGS; same bit from 5.10 to 7.x.
_SAVE_REGS = 1 << 2
_MEMBERS = (
    "ftrace_ops.func",
    "ftrace_ops.next",
    "ftrace_ops.flags",
    "ftrace_ops.func_hash",
    "ftrace_ops.trampoline",
    "ftrace_ops.trampoline_size",
    "ftrace_ops_hash.notrace_hash",
    "ftrace_ops_hash.filter_hash",
    "ftrace_hash.size_bits",
    "ftrace_hash.buckets",
    "ftrace_hash.count",
    "ftrace_func_entry.ip",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracer:
    """One user of the guest's ftrace.

    Attributes:
        ops: its ftrace_ops.
        name: of that, if a symbol names it; else of its handler.
        handler: the function that it has called.
        handler_name: its symbol.
        trampoline: code made for it alone; empty when it has none.
        saves_registers: whether its handler wants all of them.
    """

    ops: Addr
    name: str
    handler: Addr
    handler_name: str
    trampoline: range
    saves_registers: bool


class Tracers:
    """The users of a guest's ftrace.

    Attributes:
        all: in the order of the kernel's list; empty where its types do not tell.
    """

    def __init__(self, memory: Memory, kernel: Kernel) -> None:
        self._memory = memory
        self._symbols = kernel.symbols
        self._at = offsets(kernel)
        self._entries_of: dict[int, frozenset[int]] = {}
        self.all: tuple[Tracer, ...] = tuple(self._read())

    @property
    def are_there(self) -> bool:
        """Whether anybody traces, also where it is not known who."""
        head, end = self._ends()
        return bool(self.all) or head not in (0, end)

    @property
    def are_changing(self) -> bool:
        """Whether the guest is just about to change who traces what."""
        lock = self._symbols.find("ftrace_lock")
        # struct mutex begins with its owner, whose lowest bits are flags.
        return lock is not None and self._word(lock.addr) & ~7 != 0

    def wanted(self, sites: Sequence[int]) -> list[tuple[int, bool] | None]:
        """Return how many trace each site, and whether one of them wants all registers.

        None where that is not known.
        """
        if not self._at:
            return [None] * len(sites)
        return [self._users(site) for site in sites]

    def of(self, site: int) -> tuple[Tracer, ...]:
        """Return those that trace the function of a site."""
        return tuple(tracer for tracer in self.all if self._traces(tracer, site))

    def with_trampoline(self, addr: int) -> Tracer | None:
        """Return the one whose own trampoline an address lies in, or None."""
        return next((tracer for tracer in self.all if addr in tracer.trampoline), None)

    def _users(self, site: int) -> tuple[int, bool]:
        users = self.of(site)
        return len(users), any(each.saves_registers for each in users)

    def _ends(self) -> tuple[int, int]:
        # The first in the list, and what stands behind the last.
        head, end = (self._symbols.find(n) for n in ("ftrace_ops_list", "ftrace_list_end"))
        return self._word(head.addr) if head is not None else 0, end.addr if end is not None else 0

    def _read(self) -> list[Tracer]:
        found: dict[int, Tracer] = {}
        ops, end = self._ends() if self._at else (0, 0)
        while ops not in (0, end) and ops not in found and len(found) < _MAX_TRACERS:
            found[ops] = self._tracer(ops)
            ops = self._word(ops + self._at["ftrace_ops.next"])
        return list(found.values())

    def _tracer(self, ops: int) -> Tracer:
        at = self._at
        handler = self._word(ops + at["ftrace_ops.func"])
        start = self._word(ops + at["ftrace_ops.trampoline"])
        size = self._word(ops + at["ftrace_ops.trampoline_size"])
        has_own = start and 0 < size <= _MAX_TRAMPOLINE
        handler_name = self._name(handler)
        own = self._symbols.at(ops)
        return Tracer(
            ops=Addr(ops),
            name=own.name if own is not None and own.addr == ops else handler_name,
            handler=Addr(handler),
            handler_name=handler_name,
            trampoline=range(start, start + size) if has_own else range(0),
            saves_registers=bool(self._word(ops + at["ftrace_ops.flags"]) & _SAVE_REGS),
        )

    def _traces(self, tracer: Tracer, site: int) -> bool:
        at = self._at
        both = self._word(tracer.ops + at["ftrace_ops.func_hash"])
        chosen = self._word(both + at["ftrace_ops_hash.filter_hash"])
        spared = self._word(both + at["ftrace_ops_hash.notrace_hash"])
        is_chosen = not self._count(chosen) or site in self._entries(chosen)
        return is_chosen and site not in self._entries(spared)

    def _count(self, hash_: int) -> int:
        return self._word(hash_ + self._at["ftrace_hash.count"]) if hash_ else 0

    def _entries(self, hash_: int) -> frozenset[int]:
        if hash_ not in self._entries_of:
            self._entries_of[hash_] = frozenset(self._read_entries(hash_))
        return self._entries_of[hash_]

    def _read_entries(self, hash_: int) -> Iterator[int]:
        at = self._at
        left = min(self._count(hash_), _MAX_ENTRIES)
        bits = self._word(hash_ + at["ftrace_hash.size_bits"]) if left else 0
        buckets = self._word(hash_ + at["ftrace_hash.buckets"]) if left else 0
        for number in range(1 << bits if bits <= _MAX_BITS else 0):
            node = self._word(buckets + 8 * number)
            while node and left:
                left -= 1
                yield self._word(node + at["ftrace_func_entry.ip"])
                node = self._word(node)
            if not left:
                return

    def _name(self, addr: int) -> str:
        symbol = self._symbols.at(addr) if addr else None
        return symbol.name if symbol is not None else f"{addr:#x}"

    def _word(self, addr: int) -> int:
        try:
            return int.from_bytes(self._memory.read(addr & U64, 8), "little")
        except MemoryFault:
            return 0


def offsets(kernel: Kernel) -> Mapping[str, int]:
    """Return where the members are that tell of tracers, or nothing where types do not tell."""
    if kernel.types is None or kernel.symbols.find("ftrace_ops_list") is None:
        return {}
    try:
        return {name: kernel.types.offset(*name.split(".", 1)) for name in _MEMBERS}
    except (UnknownTypeError, FormatError):
        return {}
