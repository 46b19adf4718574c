"""Verdicts on aarch64 instructions: whether one may carry a probe, and what its slot does with it.

The order of the checks is that of the kernel's check_kprobe_address_safe() and
arm_kprobe_decode_insn() (arch/arm64/kernel/probes/decode-insn.c). What its
aarch64_insn_is_steppable() refuses is refused here, but for what a single step would do wrong and a
detour does not: signatures are checked in a detour with the stack pointer and x30 that they were
made with. Between an exclusive load and its store (Arm ARM, B2.17 "Synchronization and semaphores")
a probe makes the store fail for ever. The kernel's is_probed_address_atomic() looks back through 32
words, whatever they are; here the ways from a load to a store are followed. One branch covers
exactly one instruction.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from kprobes.arch.aarch64.decode import Function, Instruction, decode_function, decode_one
from kprobes.arch.aarch64.insn import (
    LINK,
    NOP,
    SIZE,
    SP_OR_ZR,
    Kind,
    first_register,
    is_authenticated,
)
from kprobes.arch.insn import (
    Analysis,
    Flow,
    InsnVerdict,
    forbidden_place,
    probed_place,
    reserved_place,
)
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Displaced, PatchOptions
from kprobes.units import Addr

_LONGEST = 32
"""Words of the kernel's MAX_ATOMIC_CONTEXT_SIZE."""
_MONITOR_ENDS = frozenset({Kind.STORE_EXCLUSIVE, Kind.CLREX, Kind.LOAD_EXCLUSIVE})


def between_exclusives(function: Function, addr: int) -> bool:
    """Return whether an instruction is on a way from an exclusive load to an exclusive store."""
    return any(addr in way for way in _exclusive_runs(function))


def _exclusive_runs(function: Function) -> Iterator[set[int]]:
    for row in np.flatnonzero(function.kinds == Kind.LOAD_EXCLUSIVE).tolist():
        yield _between(function, int(function.addrs[row]))


def _between(function: Function, load: int) -> set[int]:
    # Forwards from the load; then backwards from stores, through what was found.
    after: dict[int, list[int]] = {}
    waiting, ends = [(load, 0)], set[int]()
    while waiting:
        addr, steps = waiting.pop(0)
        if addr in after or steps > _LONGEST:
            continue
        after[addr] = list(_next(function, addr, is_load=addr == load))
        if _kind(function, addr) is Kind.STORE_EXCLUSIVE:
            ends.add(addr)
        waiting += [(each, steps + 1) for each in after[addr]]
    on_way, is_new = set(ends), True
    while is_new:
        found = {addr for addr, nexts in after.items() if not on_way.isdisjoint(nexts)}
        is_new = not found <= on_way
        on_way |= found
    return on_way - ends - {load}


def _next(function: Function, addr: int, *, is_load: bool) -> Iterator[int]:
    i = function.at(addr)
    if i is None or (i.kind in _MONITOR_ENDS and not is_load):
        return
    if i.flow in (Flow.JUMP, Flow.BRANCH) and i.target is not None:
        yield i.target
    if i.flow in (Flow.NEXT, Flow.BRANCH):
        yield addr + SIZE


def _kind(function: Function, addr: int) -> Kind | None:
    i = function.at(addr)
    return None if i is None else i.kind


_DAIF = 0b1_011_0100_0010_001
"""o0, op1, CRn, CRm, op2 of MRS: the interrupt mask."""
_SOMEBODYS = frozenset({0x4, 0x5, 0x6, 0x7, 0x400})
"""KPROBES_BRK_IMM, UPROBES', KPROBES_BRK_SS_IMM, KRETPROBES', KGDB's: asm/brk-imm.h."""
_HINTS = {0b0000_000, 0b0000_111, 0b0001_000, 0b0001_010, 0b0001_100, 0b0001_110}
"""CRm:op2 of what is as harmless as nop: xpaclri, pacia1716 to autib1716."""
_SIGNING = range(0b0011_000, 0b0100_000)
"""paciaz to autibsp."""

_LANDING = "indirect branches land on it, so it must stay: probe the instruction after it"
_STATE = "it changes the state of the CPU, which the kernel lets no probe run elsewhere"
_EXCLUSIVE = "it belongs to an exclusive sequence, which anything between makes fail for ever"
_HINT = "it is a hint to the CPU that the kernel lets no probe run elsewhere"

_BY_KIND: Mapping[Kind, str] = {
    Kind.UNALLOCATED: "its bytes are not an instruction",
    Kind.UDF: "its bytes are not an instruction, and fill a gap or stop a runaway CPU",
    Kind.HLT: "it stops the CPU for a debugger",
    Kind.CALL_UP: "it raises an exception for firmware, a hypervisor or the kernel itself",
    Kind.ERET: "it leaves the kernel, or enters it, with another stack",
    Kind.MSR: _STATE,
    Kind.MSR_IMMEDIATE: _STATE,
    Kind.WAIT: "it waits for an event or interrupt, which a probe on it may use up",
    Kind.BTI: _LANDING,
    Kind.LOAD_EXCLUSIVE: _EXCLUSIVE,
    Kind.STORE_EXCLUSIVE: _EXCLUSIVE,
    Kind.VECTOR_LITERAL: "it loads a vector register relative to its own address",
}


def refusal(instruction: Instruction) -> str | None:
    """Return why no slot may run an instruction, or None when one may."""
    word = instruction.word
    match instruction.kind:
        case Kind.BRK:
            return _brk(word >> 5 & 0xFFFF)
        case Kind.HINT:
            return None if _is_harmless(word >> 5 & 0x7F) else _HINT
        case Kind.MRS if word >> 5 & 0x7FFF == _DAIF:
            return "it reads the interrupt mask, which the kernel lets no probe do elsewhere"
        case Kind.BLR:
            return _call(word)
        case Kind.LDR_LITERAL | Kind.LDRSW_LITERAL if word & 31 == SP_OR_ZR:
            return "it loads relative to its own address and keeps nothing"
        case kind:
            return _BY_KIND.get(kind)


def hides_another(instruction: Instruction) -> bool:
    """Return whether a breakpoint stands where another instruction was."""
    return instruction.kind is Kind.BRK and instruction.word >> 5 & 0xFFFF in _SOMEBODYS


def _brk(number: int) -> str:
    if number in _SOMEBODYS:
        return "it is somebody else's breakpoint, and hides another instruction"
    return "it raises an exception on purpose, and the kernel knows what it means by its address"


def _is_harmless(hint: int) -> bool:
    return hint in _HINTS or hint in _SIGNING


def _call(word: int) -> str | None:
    used = {first_register(word)}
    if is_authenticated(word):
        used.add(word & 31)
    if LINK in used:
        return "it calls where x30 points, which its own return address overwrites"
    return None


_POINTER = 8
_MOV_X9_LR = 0xAA1E03E9
_NO_TABLES = TextTables()


def insn_verdict(function: Function, addr: int, tables: TextTables = _NO_TABLES) -> InsnVerdict:
    """Judge the instruction at an address.

    Args:
        function: that the address is in.
        addr: any.
        tables: what is known of the kernel's text.
    """
    why = _no_instruction(function, addr, tables)
    if why:
        return InsnVerdict(verdict="refuse", why=why)
    instruction = function.at(addr)
    assert instruction is not None
    why = (
        forbidden_place(function.name, function.parts, addr, tables)
        or probed_place(addr, tables)
        or _reserved(instruction, tables)
        or refusal(instruction)
        or _around(function, instruction, tables)
    )
    return InsnVerdict(verdict="refuse", why=why) if why else _how(instruction)


def _no_instruction(function: Function, addr: int, tables: TextTables) -> str | None:
    if function.part_of(addr) is None:
        return f"{addr:#x} is not in {function.name}"
    start = addr - addr % SIZE
    if addr != start:
        return (
            f"{function.place(addr)} is inside the {SIZE}-byte instruction at "
            f"{function.place(start)}"
        )
    if function.row(addr) is None:
        return f"{function.place(addr)} is after the last whole instruction"
    if addr - addr % _POINTER in tables.pointers:
        return "it is a pointer of the kernel's function tracer to what the next function calls"
    if addr in function.data:
        return "it is a constant that the function reads, no instruction"
    if addr in function.fillers:
        return "it is after the function's last instruction: nothing leads there"
    return None


def _reserved(instruction: Instruction, tables: TextTables) -> str | None:
    if _is_traced(instruction, tables):
        return "the kernel's function tracer changes it: the ftrace strategy probes it"
    return reserved_place(instruction.addr, instruction.next, tables)


def _is_traced(instruction: Instruction, tables: TextTables) -> bool:
    # dyn_ftrace.ip is that of the call; the word before it is nop, or mov x9, x30 since boot.
    if instruction.addr in tables.ftrace:
        return True
    return instruction.next in tables.ftrace and instruction.word in (NOP, _MOV_X9_LR)


def _around(function: Function, instruction: Instruction, tables: TextTables) -> str | None:
    is_entry = instruction.addr == function.parts[0].addr
    if is_entry and instruction.kind is Kind.PACIASP and tables.has_landing_pads:
        return "calls through pointers land on it, so it must stay: probe what is after it"
    if between_exclusives(function, instruction.addr):
        return "it is between an exclusive load and its store, which a probe makes fail for ever"
    return None


def _how(instruction: Instruction) -> InsnVerdict:
    match instruction.kind:
        case Kind.BL | Kind.BLR:
            return _verdict(
                "emulate", "sets x30 as the original would, then jumps as it would call"
            )
        case Kind.B | Kind.B_COND | Kind.CBZ | Kind.TBZ:
            return _verdict("relocate", "branches to the same target from the slot")
        case Kind.ADR | Kind.ADRP:
            return _verdict("relocate", "computes the same address from the slot")
        case Kind.LDR_LITERAL | Kind.LDRSW_LITERAL:
            return _verdict(
                "emulate", "puts the address into its own register, and loads from there"
            )
        case Kind.PRFM_LITERAL:
            return _verdict("emulate", "only hints at a later access: the slot leaves it out")
        case _ if instruction.flow is not Flow.NEXT:
            return _verdict("copy", "runs in the slot and leaves it by itself")
        case _:
            return _verdict("copy", "means the same at every address")


def _verdict(verdict: str, why: str) -> InsnVerdict:
    return InsnVerdict(verdict=verdict, why=why)


NO_BREAKPOINT = "one branch covers any instruction here: breakpoints are not used"


def examine(
    name: str, parts: Sequence[TextPart], tables: TextTables
) -> Callable[[Addr], PatchOptions]:
    """Return a function from an address to how what is there may be patched.

    Args:
        name: of the symbol.
        parts: its range, then its ``.cold`` ones.
        tables: what is known of the kernel's text.
    """
    function = decode_function(name, parts, tables)

    def options(addr: Addr) -> PatchOptions:
        verdict = insn_verdict(function, addr, tables)
        is_boundary = _is_instruction(function, addr)
        if verdict.is_refused:
            return PatchOptions(breakpoint=verdict.why, jump=verdict.why, is_boundary=is_boundary)
        instruction = function.at(addr)
        assert instruction is not None
        return PatchOptions(breakpoint=NO_BREAKPOINT, jump=displaced(instruction), is_boundary=True)

    return options


def analyse(name: str, parts: Sequence[TextPart], tables: TextTables) -> Analysis:
    """Decode a function, for verdicts on its instructions.

    Args:
        name: of its symbol.
        parts: its range, then its ``.cold`` ones.
        tables: what is known of the kernel's text.
    """
    function = decode_function(name, parts, tables)
    sizes = {addr: SIZE for addr in function.addrs.tolist() if _is_instruction(function, addr)}
    return Analysis(sizes=sizes, insn_verdict=lambda addr: insn_verdict(function, addr, tables))


def first(code: bytes) -> int:
    """Return the offset of a function's first instruction that can be probed.

    Calls through pointers land on bti, which must stay.
    """
    return SIZE if decode_one(code, 0).kind is Kind.BTI else 0


def displaced(instruction: Instruction) -> Displaced:
    """Return what a branch in the place of an instruction displaces."""
    return Displaced(addr=instruction.addr, code=instruction.code, count=1, stop=instruction.next)


def _is_instruction(function: Function, addr: int) -> bool:
    is_word = function.row(addr) is not None
    return is_word and addr not in function.data and addr not in function.fillers
