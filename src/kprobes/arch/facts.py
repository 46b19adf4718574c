"""What an architecture is to the rest of the project: one value of facts and functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kprobes.arch.listed import Listed, Reach, Read, Study, Syntax
from kprobes.model.exits import Exits
from kprobes.model.plan import Displaced, Ways
from kprobes.model.text import TextPart, TextTables
from kprobes.model.upcall import Detour, Questions
from kprobes.units import Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFacts:
    """How machine code for probes is made.

    Attributes:
        triple, features: LLVM's names for the target.
        machine: ELF's number for it.
        convention: LLVM calling convention that preserves what is live at a function's entry.
        parameters: pt_regs names of the registers that a probe's code receives as parameters.
        saved: pt_regs names of what the frame entry pushes, lowest address first.
        relocations: ELF relocation type to (size, whether relative).
        counter: IR expression that reads the cycle counter.
        flags: IR expression that reads the flags register.
        irqs_flag: the bit of it that is set while interrupts are on.
        exchange: assembly of an unlocked compare-and-exchange of a per-CPU word, its place put
            in by ``format`` (an offset, or a register in brackets), and its constraints.
        per_cpu_or, per_cpu_and, per_cpu_add: assembly that changes a 32-bit per-CPU word by $0,
            its place put in likewise.
        per_cpu_count: assembly that adds $0 to a u64 per-CPU counter, likewise.
        locked_increment: assembly that adds one to the u64 at address $0 from any CPU.
        address: IR expression of the 64 bits that linking gives a symbol, put in by ``format``.
        intrinsics: IR declarations that the expressions need.
    """

    triple: str
    features: str
    machine: int
    convention: str
    parameters: tuple[str, ...]
    saved: tuple[str, ...]
    relocations: Mapping[int, tuple[int, bool]]
    counter: str
    flags: str
    irqs_flag: int
    exchange: tuple[str, str]
    per_cpu_or: str
    per_cpu_and: str
    per_cpu_add: str
    per_cpu_count: str
    locked_increment: str
    address: str
    intrinsics: str


class Restored(StrEnum):
    """What of the flags register is given back behind a body that was called."""

    ALL = "all"
    """Everything: what the body calls may have changed any."""
    ARITHMETIC = "arithmetic"
    """What instructions compute: the body calls nothing of the guest's."""


class MakeEntry(Protocol):
    """What an ftrace site calls."""

    def __call__(
        self, place: Addr, body: Addr, chain: Addr | None, /, *, flags: Restored = Restored.ALL
    ) -> bytes:
        """See ``SiteFacts.entry``."""
        ...


class MakeDetour(Protocol):
    """Where a patch leads."""

    def __call__(
        self, place: Addr, body: Addr, displaced: Displaced, /, *, flags: Restored = Restored.ALL
    ) -> bytes:
        """See ``PatchFacts.detour``."""
        ...


class MakeTrampoline(Protocol):
    """Where a function returns to."""

    def __call__(self, place: Addr, body: Addr, /, *, flags: Restored = Restored.ALL) -> bytes:
        """See ``ReturnFacts.trampoline``."""
        ...


class MakeBranchDetour(Protocol):
    """Where a patched conditional jump leads."""

    def __call__(
        self,
        place: Addr,
        probes_body: Addr | None,
        tail_body: Addr,
        displaced: Displaced,
        /,
        *,
        flags: Restored = Restored.ALL,
    ) -> bytes:
        """See ``ReturnFacts.branch_detour``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """How a function's ftrace site looks and is patched.

    Attributes:
        size: bytes of the site.
        nops: what an idle site may hold.
        offsets: where after a function's start its site may be.
        branch: (place, destination) to the bytes that call a probe from a site.
        target: (place, bytes) to where a site calls, or None when it is no call.
        entry: see ``frame_entry`` of the architecture.
    """

    size: int
    nops: tuple[bytes, ...]
    offsets: tuple[int, ...]
    branch: Callable[[Addr, Addr], bytes]
    target: Callable[[Addr, bytes], Addr | None]
    entry: MakeEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Where one argument is when its function is entered.

    Attributes:
        registers: its words, lowest first; none for an argument on the stack.
        stack: else its distance from the stack pointer.
        is_address: whether that place has not the argument but the address of the caller's copy.
    """

    registers: tuple[str, ...] = ()
    stack: int | None = None
    is_address: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingFacts:
    """How code is shown and explained.

    Attributes:
        lines: (bytes, address, syntax) to its instructions.
        study: a function's name, parts and what is known of the text, to its understanding.
        follow: (memory, entry, addresses) to all code there that the entry leads to.
        reaches: which instructions of it touch a window of memory.
        jump_target: (place, bytes) to where a jump of a probe's size leads, or None.
    """

    lines: Callable[[bytes, int, Syntax], tuple[Listed, ...]]
    study: Callable[[str, Sequence[TextPart], TextTables], Study]
    follow: Callable[[Read, int, range], tuple[tuple[Addr, bytes], ...]]
    reaches: Callable[[tuple[tuple[Addr, bytes], ...], range], Mapping[Addr, Reach]]
    jump_target: Callable[[Addr, bytes], Addr | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchFacts:
    """How instructions that are no ftrace site are probed.

    Attributes:
        examine: (name, parts, tables of the text) of a function to a judge of its addresses.
        exits: (name, parts, tables of the text) of a function to all ways out of it.
        first: (bytes of a function) to the offset of its first instruction that can be probed.
        jump: (place, destination) to the bytes of a jump.
        breakpoint: bytes that raise a breakpoint's exception.
        detour: (place, body, displaced) to code that saves all registers, calls the body,
            restores them, runs what is displaced and goes on behind it.
        constants: registers whose value at such a hit is known, by name.
        landing: what code begins with that is reached through a pointer.
        trap: symbol of the kernel's handler of the breakpoint's exception.
        trap_action: what the kernel's chain calls that exception.
        trap_ip: offset of the instruction pointer in pt_regs.
    """

    examine: Callable[[str, Sequence[TextPart], TextTables], Callable[[Addr], Ways]]
    exits: Callable[[str, Sequence[TextPart], TextTables], Exits]
    first: Callable[[bytes], int]
    jump: Callable[[Addr, Addr], bytes]
    breakpoint: bytes
    detour: MakeDetour
    constants: Mapping[str, int]
    landing: bytes
    trap: str
    trap_action: int
    trap_ip: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnFacts:
    """How functions return, and how that is taken over.

    Attributes:
        value: the register, by its pt_regs name, that has what a function returned.
        registers: that have a returned struct, the lowest word first; a larger one is in memory,
            where ``value`` says.
        behind: bytes that the stack pointer is above the return address's place when it has
            returned.
        trampoline: (place, body) to code that stands where a return address was: it calls the body,
            which puts that back, and returns there with all registers as the function left them.
        mark: what every trampoline begins with, and nothing else of ours that is returned to.
        branch_detour: (place, body, body where the branch is taken, displaced) to a detour of a
            conditional jump, or of several instructions of which it is the first.
    """

    value: str
    registers: tuple[str, ...]
    behind: int
    trampoline: MakeTrampoline
    mark: bytes
    branch_detour: MakeBranchDetour


@dataclass(frozen=True, slots=True, kw_only=True)
class UpcallFacts:
    """How a hit waits for Python.

    Attributes:
        saved: pt_regs names of what the gate pushes, lowest address first; above them are the
            upcall's number and where to go on.
        gate: (place, function) to the code that all upcalls go through.
        at_call: (place, probes' code, questions, return address, chain) to what an ftrace site
            calls.
        at_instruction: (place, probes' code, questions, displaced) to where another patch leads.
        at_landing: (place, body, questions, shown) to a trampoline that asks before it returns: as
            if that were a return instruction at ``shown``.
        page_table: IR expression that reads the page table's register.
        pause: assembly that eases waiting.
    """

    saved: tuple[str, ...]
    gate: Callable[[Addr, Addr], bytes]
    at_call: Callable[[Addr, Addr | None, Questions, Addr, Addr | None], Detour]
    at_instruction: Callable[[Addr, Addr | None, Questions, Displaced], Detour]
    at_landing: Callable[[Addr, Addr, Questions, Addr], Detour]
    page_table: str
    pause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture.

    Attributes:
        name: in ``Kernel.arch``.
        registers: every name that ``%NAME`` accepts.
        arguments: registers of a function's first arguments, in order.
        passed: sizes of a function's parameters to where their arguments are.
        hit_shift: what a handler before an instruction sees as ``ip``, less the probe's address.
        show: (values of all registers, place of the instruction pointer) to the kernel's own text.
        constants: registers whose value at an ftrace site is known, by name.
        code: how probes are compiled.
        site: how ftrace sites are patched.
        listing: how code is shown.
        upcall: how hits wait for Python.
        patch: how other instructions are.
        returns: how functions return.
        task_size: addresses below are user space's.
        thread_size: bytes of a kernel stack.
    """

    name: str
    registers: tuple[str, ...]
    arguments: tuple[str, ...]
    passed: Callable[[Sequence[int]], Sequence[Passed]]
    hit_shift: int
    show: Callable[[Mapping[str, int], str], str]
    constants: Mapping[str, int]
    code: CodeFacts
    site: SiteFacts
    listing: ListingFacts
    upcall: UpcallFacts
    patch: PatchFacts
    returns: ReturnFacts
    task_size: int
    thread_size: int
