"""Who uses a guest's own ftrace: its list of ftrace_ops, and which functions each of them traces.

    struct ftrace_ops { ftrace_func_t func; struct ftrace_ops *next; ...;
                        struct ftrace_ops_hash *func_hash; ...;
                        unsigned long trampoline, trampoline_size; };    // linux/ftrace.h
    struct ftrace_ops_hash { struct ftrace_hash *notrace_hash, *filter_hash; ... };
    struct ftrace_hash { unsigned long size_bits; struct hlist_head *buckets; ulong count; ... };
    struct ftrace_func_entry { struct hlist_node hlist; unsigned long ip; ... };

The guest may run, and may be hostile: what does not read is left out, lists end somewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.model.kernel import Kernel
from kprobes.ports import Memory
from kprobes.units import U64, Addr

_MAX_TRACERS = 1 << 10
_MAX_BITS = 20
_MAX_CHAIN = 1 << 16
_MAX_TRAMPOLINE = 1 << 14
# hash_64() in linux/hash.h.
_GOLDEN_RATIO_64 = 0x61C8_8646_80B5_83EB
_MEMBERS = (
    "ftrace_ops.func",
    "ftrace_ops.next",
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
    """

    ops: Addr
    name: str
    handler: Addr
    handler_name: str
    trampoline: range


class Tracers:
    """The users of a guest's ftrace.

    Attributes:
        all: in the order of the kernel's list; empty where its types do not tell.
    """

    def __init__(self, memory: Memory, kernel: Kernel) -> None:
        self._memory = memory
        self._symbols = kernel.symbols
        self._at = _offsets(kernel)
        self.all: tuple[Tracer, ...] = tuple(self._read())

    def of(self, site: int) -> tuple[Tracer, ...]:
        """Return those that trace the function of a site."""
        return tuple(tracer for tracer in self.all if self._traces(tracer, site))

    def with_trampoline(self, addr: int) -> Tracer | None:
        """Return the one whose own trampoline an address lies in, or None."""
        return next((tracer for tracer in self.all if addr in tracer.trampoline), None)

    def _read(self) -> list[Tracer]:
        head, end = (self._symbols.find(n) for n in ("ftrace_ops_list", "ftrace_list_end"))
        found: dict[int, Tracer] = {}
        ops = self._word(head.addr) if head is not None and self._at else 0
        while ops and ops not in found and len(found) < _MAX_TRACERS:
            if end is not None and ops == end.addr:
                break
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
        )

    def _traces(self, tracer: Tracer, site: int) -> bool:
        at = self._at
        both = self._word(tracer.ops + at["ftrace_ops.func_hash"])
        chosen = self._word(both + at["ftrace_ops_hash.filter_hash"])
        spared = self._word(both + at["ftrace_ops_hash.notrace_hash"])
        is_chosen = not self._count(chosen) or self._has(chosen, site)
        return is_chosen and not self._has(spared, site)

    def _count(self, hash_: int) -> int:
        return self._word(hash_ + self._at["ftrace_hash.count"]) if hash_ else 0

    def _has(self, hash_: int, site: int) -> bool:
        at = self._at
        if not self._count(hash_):
            return False
        bits = self._word(hash_ + at["ftrace_hash.size_bits"])
        key = (site * _GOLDEN_RATIO_64 & U64) >> (64 - bits) if 0 < bits <= _MAX_BITS else 0
        node = self._word(self._word(hash_ + at["ftrace_hash.buckets"]) + 8 * key)
        for _ in range(_MAX_CHAIN):
            if not node:
                return False
            if self._word(node + at["ftrace_func_entry.ip"]) == site:
                return True
            node = self._word(node)
        return False

    def _name(self, addr: int) -> str:
        symbol = self._symbols.at(addr) if addr else None
        return symbol.name if symbol is not None else f"{addr:#x}"

    def _word(self, addr: int) -> int:
        try:
            return int.from_bytes(self._memory.read(addr & U64, 8), "little")
        except MemoryFault:
            return 0


def _offsets(kernel: Kernel) -> Mapping[str, int]:
    if kernel.types is None or kernel.symbols.find("ftrace_ops_list") is None:
        return {}
    try:
        return {name: kernel.types.offset(*name.split(".", 1)) for name in _MEMBERS}
    except (UnknownTypeError, FormatError):
        return {}
