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
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.image.table import PROBE_BUCKETS
from kprobes.model.kernel import Kernel
from kprobes.model.types import Types
from kprobes.ports import Memory
from kprobes.units import U64, Addr

_GONE, _DISABLED, _OPTIMIZED, _FTRACE = 1, 2, 4, 8
_MAX_CHILDREN = 1 << 12
_MAX_PROBES = 1 << 16
_MAX_NAME = 64
_MEMBERS = (
    "kprobe.hlist",
    "kprobe.list",
    "kprobe.addr",
    "kprobe.pre_handler",
    "kprobe.opcode",
    "kprobe.ainsn",
    "kprobe.flags",
    "trace_kprobe.rp.kp",
    "trace_kprobe.tp.event",
    "trace_probe_event.call",
    "trace_event_call.name",
)
_OPTIMISED = ("optimized_kprobe.optinsn", "optimized_kprobe.optinsn.insn")
"""Where the architecture optimises probes."""
_MAX_OPCODE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestProbe:
    """One address that the guest's own kprobes have.

    Attributes:
        opcode: the bytes that a breakpoint replaces.
        handlers: names of what runs at a hit, in order: a kprobe event, else a function.
        is_ftrace: whether the guest's ftrace calls it, and no breakpoint.
        is_disabled: whether nothing is armed.
        slot: where a copy of the instruction is, or None.
        detour: that an optimised one's jump leads to; else None.
        copied: the bytes behind the first that an optimised one's jump replaces.
    """

    addr: Addr
    opcode: bytes
    handlers: tuple[str, ...]
    is_ftrace: bool
    is_disabled: bool
    slot: Addr | None
    detour: Addr | None
    copied: bytes


def read_guest_probes(memory: Memory, kernel: Kernel) -> tuple[GuestProbe, ...]:
    """Return the guest's kprobes; none where it has no kprobes or its types do not tell."""
    table = kernel.symbols.find("kprobe_table")
    if table is None or kernel.types is None:
        return ()
    try:
        at = _offsets(kernel.types, _MEMBERS)
        size = kernel.types.member_size("kprobe", "opcode")
    except (UnknownTypeError, FormatError):
        return ()
    with suppress(UnknownTypeError, FormatError):
        at |= _offsets(kernel.types, _OPTIMISED)
    reader = _Reader(memory, kernel, at, opcode=min(size, _MAX_OPCODE))
    found = (reader.probe(each) for each in reader.table(table.addr))
    return tuple(probe for probe in found if probe is not None)


def missing_probes(kernel: Kernel) -> str:
    """Return why a kernel's own kprobes are not known, "" when they are or it has none."""
    if kernel.symbols.find("register_kprobe") is None:
        return ""
    if kernel.symbols.find("kprobe_table") is None:
        return "its table of them (kprobe_table) was not found"
    if kernel.types is None:
        return "it has no types (BTF) that say how they look"
    return ""


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
        is_optimised = bool(flags & _OPTIMIZED) and _OPTIMISED[0] in at
        return GuestProbe(
            addr=Addr(self._word(kprobe + at["kprobe.addr"])),
            opcode=opcode,
            handlers=tuple(self._handlers(kprobe)),
            is_ftrace=bool(flags & _FTRACE),
            is_disabled=bool(flags & _DISABLED),
            slot=Addr(self._word(kprobe + at["kprobe.ainsn"])) or None,
            detour=self._detour(kprobe) if is_optimised else None,
            copied=self._copied(kprobe) if is_optimised else b"",
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
        if handler and handler == self._dispatcher:
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
        return Addr(self._word(kprobe + self._at["optimized_kprobe.optinsn.insn"])) or None

    def _copied(self, kprobe: int) -> bytes:
        try:
            return self._memory.read(kprobe + self._at["optimized_kprobe.optinsn"], 4)
        except MemoryFault:
            return b""

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
