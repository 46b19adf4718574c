"""The kprobes that a guest's own kernel has, as they stand in its memory.

    struct hlist_head kprobe_table[1 << 6];                       // kernel/kprobes.c
    struct kprobe { struct hlist_node hlist; struct list_head list; ...; kprobe_opcode_t *addr;
                    ...; pre_handler; ...; kprobe_opcode_t opcode; struct arch_specific_insn ainsn;
                    u32 flags; };                                 // linux/kprobes.h
    struct optimized_kprobe { struct kprobe kp; ...; struct arch_optimized_insn optinsn; };
    struct arch_optimized_insn { kprobe_opcode_t copied_insn[4], *insn; size_t size; };

Where several probes are at one address, an aggregate with ``aggr_pre_handler`` stands for them,
and they are in its list; one that may be optimised has such an aggregate even if it is alone.
The guest may run, and may be hostile: what does not read is left out, lists end somewhere.

Who uses a guest's own ftrace: its list of ftrace_ops, and which functions each of them traces.

    struct ftrace_ops { ftrace_func_t func; struct ftrace_ops *next; unsigned long flags; ...;
                        struct ftrace_ops_hash *func_hash; ...;
                        unsigned long trampoline, trampoline_size; };    // linux/ftrace.h
    struct ftrace_ops_hash { struct ftrace_hash *notrace_hash, *filter_hash; ... };
    struct ftrace_hash { unsigned long size_bits; struct hlist_head *buckets; ulong count; ... };
    struct ftrace_func_entry { struct hlist_node hlist; unsigned long ip; ... };

The guest may run, and may be hostile: what does not read is left out, lists end somewhere.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from kprobes.arch.arch import PatchOps
from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.image.tables import PROBE_BUCKETS
from kprobes.model.kernel import Forbidden, Kernel, Symbols, Types, name_of
from kprobes.model.plan import Patch
from kprobes.ports import Memory
from kprobes.units import U64, Addr

_GONE, _DISABLED, _OPTIMIZED, _FTRACE = 1, 2, 4, 8
_MAX_CHILDREN = 1 << 12
_MAX_PROBES = 1 << 16
_MAX_NAME = 64
_MAX_NAMES = 3
_MEMBERS = (
    "kprobe.hlist",
    "kprobe.list",
    "kprobe.addr",
    "kprobe.pre_handler",
    "kprobe.opcode",
    "kprobe.ainsn",
    "kprobe.flags",
)
_EVENTS = (
    "trace_kprobe.rp.kp",
    "trace_kprobe.tp.event",
    "trace_probe_event.call",
    "trace_event_call.name",
)
"""Where the kernel has kprobe events."""
_OPTIMISED = ("optimized_kprobe.optinsn", "optimized_kprobe.optinsn.insn")
"""Where the architecture optimises probes."""
_MAX_OPCODE = 4
_ALLOWED = "kprobes_allow_optimization"
"""A bool: /proc/sys/debug/kprobes-optimization."""


class GuestProbe(Struct, frozen=True, kw_only=True):
    """One address that the guest's own kprobes have.

    Attributes:
        opcode: the bytes that a breakpoint replaces.
        handlers: names of what runs at a hit, in order: a kprobe event, else a function.
        is_ftrace: whether the guest's ftrace calls it, and no breakpoint.
        is_disabled: whether nothing is armed.
        slot: where a copy of the instruction is, or None.
        detour: that a jump leads to where it is, or can be, optimised; else None.
        copied: the bytes after the first that such a jump replaces, where it is there.
        is_optimised: whether the kernel has put the jump there, or is about to.
        may_be: whether it may do so at any time.
    """

    addr: Addr
    opcode: bytes
    handlers: tuple[str, ...]
    is_ftrace: bool
    is_disabled: bool
    slot: Addr | None
    detour: Addr | None
    copied: bytes
    is_optimised: bool = False
    may_be: bool = False


class GuestProbes:
    """The guest's kprobes, read again when one has come or gone."""

    def __init__(self, memory: Memory, kernel: Kernel) -> None:
        """Read them from a guest that may run."""
        self._memory = memory
        self._kernel = kernel
        self._table = kernel.symbols.find("kprobe_table")
        self._heads = bytes(8 * PROBE_BUCKETS)
        self._found: tuple[GuestProbe, ...] = ()

    def read(self) -> tuple[GuestProbe, ...]:
        """Return them as they are now; the same tuple as long as its table begins alike."""
        if self._table is None:
            return ()
        # A new one is the first of its bucket: hlist_add_head_rcu().
        heads = self._memory.read(self._table.addr, len(self._heads))
        if heads != self._heads:
            self._heads, self._found = heads, read_guest_probes(self._memory, self._kernel)
        return self._found

    def missing(self) -> str:
        """Return in words what tells of kprobes that are there and was not found, or ""."""
        why = missing_probes(self._kernel)
        if not why or (self._table is not None and not any(self._heads)):
            return ""
        return f"what the guest's own kprobes have changed ({why}) was"


def patches_of(probe: GuestProbe, info: PatchOps) -> Iterator[Patch]:
    """Yield what a kprobe's kernel may have written to the text for it, the longest first."""
    jump, old = _jump(probe, info), probe.opcode + probe.copied
    if jump and len(jump) == len(old):
        yield Patch(addr=probe.addr, old=old, new=jump)
        # While it is made or taken away: text_poke_bp().
        half = info.breakpoint + jump[len(info.breakpoint) :]
        yield Patch(addr=probe.addr, old=old, new=half)
    if len(probe.opcode) == len(info.breakpoint):
        yield Patch(addr=probe.addr, old=probe.opcode, new=info.breakpoint)


def taken(
    probes: Iterable[GuestProbe], symbols: Symbols, memory: Memory, info: PatchOps
) -> tuple[Forbidden, ...]:
    """Return the text that the guest's own kprobes have, or may have at any time, and why.

    Args:
        probes: of the guest.
        symbols: of its kernel.
        memory: its text as it is now.
        info: of its architecture.
    """
    found = [_taken(p, symbols, memory, info) for p in probes if not p.is_ftrace]
    return tuple(sorted(found, key=lambda each: each.start))


def _taken(probe: GuestProbe, symbols: Symbols, memory: Memory, info: PatchOps) -> Forbidden:
    who = f"at {name_of(symbols, probe.addr)} ({', '.join(probe.handlers[:_MAX_NAMES])})"
    jump, start = _jump(probe, info), probe.addr
    tail = jump[len(info.breakpoint) :]
    is_there = bool(tail) and _holds(memory, start + len(info.breakpoint), tail)
    if jump and (probe.is_optimised or is_there):
        why = f"it is under the guest's own optimised kprobe {who}"
    elif jump and probe.may_be:
        why = f"the guest's kernel may optimise its own kprobe {who}, which then covers it"
    else:
        jump, why = b"", f"the guest's own kprobe is there {who}"
    return Forbidden(start=start, stop=Addr(start + len(jump or info.breakpoint)), why=why)


def _jump(probe: GuestProbe, info: PatchOps) -> bytes:
    try:
        return b"" if probe.detour is None else info.jump(probe.addr, probe.detour)
    except ValueError:
        # The guest says so, and no jump reaches it.
        return b""


def _holds(memory: Memory, addr: int, code: bytes) -> bool:
    try:
        return memory.read(addr, len(code)) == code
    except MemoryFault:
        return False


def read_guest_probes(memory: Memory, kernel: Kernel) -> tuple[GuestProbe, ...]:
    """Return the guest's kprobes; none where it has no kprobes or its types do not tell."""
    table, at = kernel.symbols.find("kprobe_table"), _layout(kernel.types)
    if table is None or kernel.types is None or not at:
        return ()
    size = kernel.types.member_size("kprobe", "opcode")
    reader = _Reader(memory, kernel, at, opcode=min(size, _MAX_OPCODE))
    found = (reader.probe(each) for each in reader.table(table.addr))
    return tuple(probe for probe in found if probe is not None)


def missing_probes(kernel: Kernel) -> str:
    """Return why a kernel's own kprobes are not known, "" when they are or it has none."""
    if kernel.symbols.find("register_kprobe") is None:
        return ""
    if kernel.symbols.find("kprobe_table") is None:
        return "its table of them (kprobe_table) was not found"
    if not _layout(kernel.types):
        return "it has no types (BTF) that say how they look"
    return ""


def _layout(types: Types | None) -> dict[str, int]:
    if types is None:
        return {}
    try:
        at = _offsets(types, _MEMBERS)
    except (UnknownTypeError, FormatError):
        return {}
    for more in (_EVENTS, _OPTIMISED):
        with suppress(UnknownTypeError, FormatError):
            at |= _offsets(types, more)
    return at


def _offsets(types: Types, names: Iterable[str]) -> dict[str, int]:
    return {name: types.offset(*name.split(".", 1)) for name in names}


class _Reader:
    def __init__(
        self, memory: Memory, kernel: Kernel, at: Mapping[str, int], *, opcode: int
    ) -> None:
        self._memory = memory
        self._opcode = opcode
        self._symbols = kernel.symbols
        self._at = at
        aggregate = kernel.symbols.find("aggr_pre_handler")
        self._aggregate = aggregate.addr if aggregate else 0
        dispatcher = kernel.symbols.find("kprobe_dispatcher")
        self._dispatcher = dispatcher.addr if dispatcher else 0
        allowed = kernel.symbols.find(_ALLOWED)
        # What is not known may be.
        self._is_allowed = allowed is None or self._is_set(allowed.addr)

    def table(self, addr: int) -> Iterator[int]:
        seen: set[int] = set()
        for bucket in range(PROBE_BUCKETS):
            node = self._word(addr + 8 * bucket)
            while node and node not in seen and len(seen) < _MAX_PROBES:
                seen.add(node)
                yield node - self._at["kprobe.hlist"]
                node = self._word(node)

    def probe(self, kprobe: int) -> GuestProbe | None:
        at = self._at
        try:
            flags = self._number(kprobe + at["kprobe.flags"], 4)
            opcode = self._memory.read(kprobe + at["kprobe.opcode"], self._opcode)
        except MemoryFault:
            return None
        if flags & _GONE:
            return None
        detour = self._detour(kprobe)
        return GuestProbe(
            addr=Addr(self._word(kprobe + at["kprobe.addr"])),
            opcode=opcode,
            handlers=tuple(self._handlers(kprobe)),
            is_ftrace=bool(flags & _FTRACE),
            is_disabled=bool(flags & _DISABLED),
            slot=Addr(self._word(kprobe + at["kprobe.ainsn"])) or None,
            detour=detour,
            copied=self._copied(kprobe) if detour is not None else b"",
            is_optimised=detour is not None and bool(flags & _OPTIMIZED),
            may_be=detour is not None and self._is_allowed,
        )

    def _handlers(self, kprobe: int) -> Iterator[str]:
        handler = self._word(kprobe + self._at["kprobe.pre_handler"])
        if handler != self._aggregate or not handler:
            yield self._name(kprobe, handler)
            return
        head = kprobe + self._at["kprobe.list"]
        node, seen = self._word(head), {head}
        while node and node not in seen and len(seen) < _MAX_CHILDREN:
            seen.add(node)
            child = node - self._at["kprobe.list"]
            yield self._name(child, self._word(child + self._at["kprobe.pre_handler"]))
            node = self._word(node)

    def _name(self, kprobe: int, handler: int) -> str:
        if handler and handler == self._dispatcher and _EVENTS[0] in self._at:
            event = self._event(kprobe)
            if event:
                return f"event {event}"
        symbol = self._symbols.at(handler) if handler else None
        return symbol.name if symbol is not None else f"{handler:#x}"

    def _event(self, kprobe: int) -> str:
        at = self._at
        event = self._word(kprobe - at["trace_kprobe.rp.kp"] + at["trace_kprobe.tp.event"])
        call = event + at["trace_probe_event.call"]
        return self._text(self._word(call + at["trace_event_call.name"])) if event else ""

    def _detour(self, kprobe: int) -> Addr | None:
        # Only an aggregate is an optimized_kprobe.
        handler = self._word(kprobe + self._at["kprobe.pre_handler"])
        if _OPTIMISED[0] not in self._at or not handler or handler != self._aggregate:
            return None
        return Addr(self._word(kprobe + self._at["optimized_kprobe.optinsn.insn"])) or None

    def _copied(self, kprobe: int) -> bytes:
        try:
            return self._memory.read(kprobe + self._at["optimized_kprobe.optinsn"], 4)
        except MemoryFault:
            return b""

    def _is_set(self, addr: int) -> bool:
        try:
            return self._memory.read(addr, 1) != b"\0"
        except MemoryFault:
            return True

    def _word(self, addr: int) -> int:
        try:
            return self._number(addr & U64, 8)
        except MemoryFault:
            return 0

    def _number(self, addr: int, size: int) -> int:
        return int.from_bytes(self._memory.read(addr, size), "little")

    def _text(self, addr: int) -> str:
        try:
            data = self._memory.read(addr, _MAX_NAME)
        except MemoryFault:
            return ""
        text = data.split(b"\0")[0].decode(errors="backslashreplace")
        return text if text.isprintable() else repr(text)


_MAX_TRACERS = 1 << 10
_MAX_BITS = 20
_MAX_ENTRIES = 1 << 20
_MAX_TRAMPOLINE = 1 << 14
# FTRACE_OPS_FL_SAVE_REGS; same bit from 5.10 to 7.x.
_SAVE_REGS = 1 << 2
_OPS_MEMBERS = (
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


class Tracer(Struct, frozen=True, kw_only=True):
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
        # The first in the list, and what stands after the last.
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
        return {name: kernel.types.offset(*name.split(".", 1)) for name in _OPS_MEMBERS}
    except (UnknownTypeError, FormatError):
        return {}
