"""An architecture as the rest of the project sees it: one value of facts and functions.

What an architecture makes of a body of compiled code: the forms of its functions for that.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

from msgspec import Struct

from kprobes.arch.entry import EntryInfo
from kprobes.arch.insn import Analysis, Disassembled, MemoryAccess, Read, Syntax
from kprobes.arch.machine import Machine
from kprobes.model.abi import Field
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Displaced, Exits, PatchOptions
from kprobes.model.upcall import Detour, SiteUpcalls
from kprobes.units import U64, Addr

PREAMBLE_SIZE = 16
"""The most bytes before a function that its callers look at, or go to."""

_Then_contra = TypeVar("_Then_contra", contravariant=True)


class Restored(StrEnum):
    """What of the flags register is given back after a body that was called."""

    ALL = "all"
    """Everything: what the body calls may have changed any."""
    ARITHMETIC = "arithmetic"
    """What instructions compute: the body calls nothing of the guest's."""


class MakeEntry(Protocol):
    """What an ftrace site calls."""

    def __call__(
        self,
        place: Addr,
        body: Addr,
        /,
        *,
        flags: Restored = Restored.ALL,
        reads: Collection[str] | None = None,
        skips: bool = False,
    ) -> bytes:
        """Return code for ``place`` that calls a body with the registers saved, and returns.

        Args:
            place: where it will be.
            body: what it calls.
            flags: what of them the body may have changed.
            reads: of CallAbi.saved what the body reads; None for any.
            skips: whether, where the body returns 1, the function returns to its caller at once,
                with what is in the place of ``ReturnOps.value``.
        """
        ...


class MakeDetour(Protocol):
    """Where a patch leads."""

    def __call__(
        self,
        place: Addr,
        body: Addr,
        displaced: Displaced,
        /,
        *,
        flags: Restored = Restored.ALL,
        skips: bool = False,
    ) -> bytes:
        """See ``PatchOps.detour``, and for ``skips`` ``MakeEntry``."""
        ...


class MakeUpcall(Protocol[_Then_contra]):
    """What hands a hit to Python."""

    def __call__(
        self,
        place: Addr,
        probes: Addr | None,
        upcalls: SiteUpcalls,
        then: _Then_contra,
        /,
        *,
        skips: bool = False,
    ) -> Detour:
        """See ``UpcallOps``, and for ``skips`` ``MakeEntry``."""
        ...


class MakeTrampoline(Protocol):
    """Where a function returns to."""

    def __call__(self, place: Addr, body: Addr, /, *, flags: Restored = Restored.ALL) -> bytes:
        """See ``ReturnOps.trampoline``."""
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
        """See ``ReturnOps.branch_detour``."""
        ...


class Segment(Struct, frozen=True, kw_only=True):
    """Per-CPU memory that single instructions reach, so that no interrupt can come in between.

    All assembly has the place put in by ``format``: an offset, or a register in brackets.

    Attributes:
        space: LLVM's address space of it.
        exchange: an unlocked compare-and-exchange of a u64, and its constraints.
        or_, and_, add: change a u32 by $0.
        count: adds $0 to a u64.
        change: constraints of these four.
    """

    space: int
    exchange: tuple[str, str]
    or_: str
    and_: str
    add: str
    count: str
    change: str


class Base(Struct, frozen=True, kw_only=True):
    """Per-CPU memory at an address that a register has: the task can move before it is used.

    Attributes:
        expression: IR expression that reads it.
    """

    expression: str


class CallAbi(Struct, frozen=True, kw_only=True):
    """How a probe's code is called, and where it finds the registers of the probed code.

    Attributes:
        convention: LLVM calling convention that preserves what is live at a function's entry.
        parameters: pt_regs names of the registers that a probe's code receives as parameters. If
            there are none it always needs the saving entry code.
        saved: pt_regs names of what that code saves, lowest address first.
        stack: IR expression of the stack pointer, as a pointer, when a probe's code is entered.
        pushed: bytes that its call has put there; after them is what is saved.
        above: bytes between that and the probed code's stack.
        link: which of the saved has a call's return address; None where that is on the stack.
        pc: pt_regs name of the instruction pointer.
        flags: which of the saved tells whether interrupts were on, or None.
        computed: pt_regs names to IR expressions of what to add to the bits that are saved.
        aliases: other names of registers to those of pt_regs.
        alignment: bytes that the stack pointer is aligned to.
        padding: what is between pieces of code.
    """

    convention: str
    parameters: tuple[str, ...]
    saved: tuple[str, ...]
    stack: str
    pushed: int
    above: int
    link: str | None
    pc: str
    flags: str | None
    computed: Mapping[str, str]
    aliases: Mapping[str, str]
    alignment: int
    padding: bytes


class CodeInfo(Struct, frozen=True, kw_only=True):
    """How machine code for probes is made.

    Attributes:
        triple, cpu, features, model: LLVM's names for the target and its code model.
        call: how a probe's code is called.
        relocations: ELF relocation type to where in the code the number goes.
        counter: IR expression that reads the cycle counter.
        pause: IR instruction that eases waiting.
        current: IR expression of the running task, in which the preempt count is then; None where
            both are per-CPU words.
        is_resched_apart: whether the u32 after the preempt count is 1 while no preemption is
            wanted; else the count's top bit tells.
        flags: IR expression that reads the register that tells whether interrupts are on.
        set_flags: IR instruction that writes it, a value put in by ``format``.
        irqs_flag: the bit of it that tells so.
        irqs_set: whether it is set while they are on.
        per_cpu: how the running CPU's memory is reached.
        increment: assembly that adds one to the u64 at address $0 from any CPU, and its
            constraints; None where LLVM's own is good.
        add_own: assembly that adds $1 to the u64 at address $0, which only this CPU changes, and
            its constraints; None where LLVM's own is good.
        address: IR expression of the 64 bits that linking gives a symbol, put in by ``format``.
        veneer: (function) to code that a call goes to instead where that is out of its reach, or
            None where calls reach all of a kernel.
        intrinsics: IR declarations that the expressions need.
    """

    triple: str
    cpu: str
    features: str
    model: str
    call: CallAbi
    relocations: Mapping[int, Field]
    counter: str
    pause: str
    current: str | None
    is_resched_apart: bool
    flags: str
    set_flags: str
    irqs_flag: int
    irqs_set: bool
    per_cpu: Segment | Base
    increment: tuple[str, str] | None
    add_own: tuple[str, str] | None
    address: str
    veneer: Callable[[Addr], bytes] | None
    intrinsics: str


class FtraceInfo(Struct, frozen=True, kw_only=True):
    """How a function's ftrace site looks and is patched.

    Attributes:
        size: bytes of the site.
        nops: what an idle site may hold.
        preamble: what comes right before it.
        probed_preamble: what is there where the guest's own probe has taken that instruction over.
        idle, compiled: in words, what boot makes of site and preamble; what compilers put there.
        offsets: where after a function's start its site may be.
        reports_entry: whether a probe of a function's entry reports the function's start; else it
            reports the site.
        branch: (place, destination) to the bytes that call a probe from a site.
        target: (place, bytes) to where a site calls, or None when it is not a call.
        entry: what a site calls.
    """

    size: int
    nops: tuple[bytes, ...]
    preamble: bytes
    probed_preamble: bytes
    idle: str
    compiled: str
    offsets: tuple[int, ...]
    reports_entry: bool
    branch: Callable[[Addr, Addr], bytes]
    target: Callable[[Addr, bytes], Addr | None]
    entry: MakeEntry


class Passed(Struct, frozen=True, kw_only=True):
    """Where one argument is when its function is entered.

    Attributes:
        registers: its words, lowest first; none for an argument on the stack.
        stack: else its distance from the stack pointer.
        is_address: whether that place has not the argument but the address of the caller's copy.
    """

    registers: tuple[str, ...] = ()
    stack: int | None = None
    is_address: bool = False


class DisasmOps(Struct, frozen=True, kw_only=True):
    """How code is shown and explained.

    Attributes:
        lines: (bytes, address, syntax) to its instructions.
        analyse: a function's name, parts and what is known of the text, to its understanding.
        follow: (memory, entry, addresses) to all code there that the entry leads to.
        reaches: (entry, code, addresses) to the instructions of it that touch such memory.
        jump_target: (place, bytes) to where a jump of a probe's size leads, or None.
        entry: how functions begin.
    """

    lines: Callable[[bytes, int, Syntax], tuple[Disassembled, ...]]
    analyse: Callable[[str, Sequence[TextPart], TextTables], Analysis]
    follow: Callable[[Read, int, range], tuple[tuple[Addr, bytes], ...]]
    reaches: Callable[[int, tuple[tuple[Addr, bytes], ...], range], Mapping[Addr, MemoryAccess]]
    jump_target: Callable[[Addr, bytes], Addr | None]
    entry: EntryInfo


class TrapInfo(Struct, frozen=True, kw_only=True):
    """How a breakpoint's exception comes to us.

    Attributes:
        symbol: the kernel's handler of it.
        action: what the kernel's chain calls it.
        ip: offset of the instruction pointer in pt_regs.
        callers: the function that calls those of the chain is one of these.
        preamble: (name, parts) of one to what must be right before a function that it calls
            through a pointer, PREAMBLE_SIZE bytes; None where it looks at none.
    """

    symbol: str
    action: int
    ip: int
    callers: tuple[str, ...]
    preamble: Callable[[str, Sequence[TextPart]], bytes | None]


class PatchOps(Struct, frozen=True, kw_only=True):
    """How instructions that are not an ftrace site are probed.

    Attributes:
        examine: (name, parts, tables of the text) of a function to a judge of its addresses.
        exits: (name, parts, tables of the text) of a function to all ways out of it.
        first: (bytes of a function) to the offset of its first instruction that can be probed.
        jump: (place, destination) to the bytes of a jump.
        breakpoint: bytes that raise a breakpoint's exception.
        filler: the byte after either, in the rest of what is displaced: it runs elsewhere, so the
            guest's kernel must have no kprobe of its own there, and find the next instruction.
        trap: how our breakpoints are caught, or None: there are none of ours then.
        detour: (place, body, displaced) to code that saves all registers, calls the body,
            restores them, runs what is displaced and goes on after it.
        constants: registers whose value at such a hit is known, by name.
        landing_pad: what code begins with that is reached through a pointer.
        ret: that returns from a function.
    """

    examine: Callable[[str, Sequence[TextPart], TextTables], Callable[[Addr], PatchOptions]]
    exits: Callable[[str, Sequence[TextPart], TextTables], Exits]
    first: Callable[[bytes], int]
    jump: Callable[[Addr, Addr], bytes]
    breakpoint: bytes
    filler: bytes
    trap: TrapInfo | None
    detour: MakeDetour
    constants: Mapping[str, int]
    landing_pad: bytes
    ret: bytes


class ReturnOps(Struct, frozen=True, kw_only=True):
    """How functions return, and how that is taken over.

    Attributes:
        value: the register, by its pt_regs name, that has what a function returned.
        registers: that have a returned struct, the lowest word first; a larger one is in memory,
            where ``value`` says.
        return_address_size: bytes of the return address on the stack: 0 where a register has it.
        plain: IR expression of a return address without what protects it, put in by ``format``;
            None where nothing does.
        comes_back: whether the return addresses of calls in progress can be put back; else they
            have to be waited for.
        address_mask: the bits of a return address on a stack that nothing protects.
        trampoline: (place, body) to code that stands where a return address was: it calls the body,
            which puts that back, and returns there with all registers as the function left them.
        mark: what every trampoline begins with, and nothing else of ours that is returned to.
        branch_detour: (place, body, body where the branch is taken, displaced) to a detour of a
            conditional jump, or of several instructions of which it is the first.
    """

    value: str
    registers: tuple[str, ...]
    return_address_size: int
    plain: str | None
    comes_back: bool
    address_mask: int
    trampoline: MakeTrampoline
    mark: bytes
    branch_detour: MakeBranchDetour

    def stripped(self, address: int) -> int:
        """Return a return address of the kernel without what protects it on a stack."""
        return address | (U64 & ~self.address_mask)


class UpcallOps(Struct, frozen=True, kw_only=True):
    """How a hit waits for Python.

    Attributes:
        saved: pt_regs names of what the entry stub pushes, lowest address first; above them are the
            upcall's number and where to go on.
        entry_stub: (place, function) to the code that all upcalls go through.
        at_call: (place, probes' code, questions, return address) to what an ftrace site calls.
        at_instruction: (place, probes' code, questions, displaced) to where another patch leads.
        at_trampoline: (place, body, questions, shown) to a trampoline that asks before it returns:
            as if that were a return instruction at ``shown``.
        page_table: IR expression that reads the page table's register.
        pops: whether the entry stub goes on by what is left below the stack pointer that is to be:
            flags and address, and where they are in the flags' place. Else the stack pointer is
            left in the number's place, or 0 when all goes on as it was, and the address in its own.
    """

    saved: tuple[str, ...]
    entry_stub: Callable[[Addr, Addr], bytes]
    at_call: MakeUpcall[Addr]
    at_instruction: MakeUpcall[Displaced]
    at_trampoline: Callable[[Addr, Addr, SiteUpcalls, Addr], Detour]
    page_table: str
    pops: bool


class Arch(Struct, frozen=True, kw_only=True):
    """One architecture.

    Attributes:
        name: in ``Kernel.arch``.
        registers: every name that ``%NAME`` accepts.
        arguments: registers of a function's first arguments, in order.
        passed: sizes of a function's parameters to where their arguments are.
        system_call: offsets in struct pt_regs, to which the function of a system call gets a
            pointer, of the call's arguments.
        unwound: registers, by name, from which the kernel's unwinder walks a stack.
        hit_shift: what a handler before an instruction sees as ``ip``, less the probe's address.
        show: (values of all registers, place of the instruction pointer) to the kernel's own text.
        constants: registers whose value at an ftrace site is known, by name.
        reach: how many bytes a branch of a site goes, backwards and forwards.
        code: how probes are compiled.
        code_for: (all vCPUs' registers) to how they are for that guest. Of those that
            ``code_registers`` names, as a stub does, any may be missing.
        code_registers: that it looks at besides what a stub shows all at once.
        site: how ftrace sites are patched.
        listing: how code is shown.
        upcall: how hits wait for Python.
        patch: how other instructions are.
        returns: how functions return.
        machine: how its guests are reached.
        thread_size: bytes of a kernel stack.
    """

    name: str
    registers: tuple[str, ...]
    arguments: tuple[str, ...]
    passed: Callable[[Sequence[int]], Sequence[Passed]]
    system_call: tuple[int, ...]
    unwound: tuple[str, ...]
    hit_shift: int
    show: Callable[[Mapping[str, int], str], str]
    constants: Mapping[str, int]
    reach: int
    code: CodeInfo
    code_for: Callable[[Sequence[Mapping[str, int]]], CodeInfo]
    code_registers: tuple[str, ...]
    site: FtraceInfo
    listing: DisasmOps
    upcall: UpcallOps
    patch: PatchOps
    returns: ReturnOps
    machine: Machine
    thread_size: int
