"""May an instruction carry a probe, and how does its slot come about: a verdict with a reason.

The order of the questions is that of the kernel's check_kprobe_address_safe() and
arm_kprobe_decode_insn() (arch/arm64/kernel/probes/decode-insn.c).
"""

from kprobes.arch.aarch64.exclusives import between_exclusives
from kprobes.arch.aarch64.function import Flow, Function, Instruction
from kprobes.arch.aarch64.refusals import refusal
from kprobes.arch.aarch64.words import NOP, SIZE, Kind
from kprobes.arch.forbidden import forbidden_place, in_alternative, probed_place
from kprobes.arch.listed import Opinion
from kprobes.model.text import TextTables

_POINTER = 8
_MOV_X9_LR = 0xAA1E03E9
_NO_TABLES = TextTables()


def judge(function: Function, addr: int, tables: TextTables = _NO_TABLES) -> Opinion:
    """Judge the instruction at an address.

    Args:
        function: that the address is in.
        addr: any.
        tables: what is known of the kernel's text.
    """
    why = _no_instruction(function, addr, tables)
    if why:
        return Opinion(verdict="refuse", why=why)
    instruction = function.at(addr)
    assert instruction is not None
    why = (
        forbidden_place(function.name, function.parts, addr, tables)
        or probed_place(addr, tables)
        or _reserved(instruction, tables)
        or refusal(instruction)
        or _around(function, instruction, tables)
    )
    return Opinion(verdict="refuse", why=why) if why else _how(instruction)


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
        return f"{function.place(addr)} is behind the last whole instruction"
    if addr - addr % _POINTER in tables.pointers:
        return "it is a pointer of the kernel's function tracer to what the next function calls"
    if addr in function.data:
        return "it is a constant that the function reads, no instruction"
    if addr in function.fillers:
        return "it is behind the function's last instruction: nothing leads there"
    return None


def _reserved(instruction: Instruction, tables: TextTables) -> str | None:
    if _is_traced(instruction, tables):
        return "the kernel's function tracer changes it: the ftrace strategy probes it"
    if instruction.addr in tables.jump_labels:
        return "it is a jump label, which the kernel flips between nop and jump"
    if instruction.addr in tables.exceptions:
        return "the exception table repairs its faults, and knows it by its address"
    if in_alternative(instruction.addr, instruction.next, tables):
        return "it is an alternative, which boot rewrites"
    return None


def _is_traced(instruction: Instruction, tables: TextTables) -> bool:
    # dyn_ftrace.ip is that of the call; the word before it is nop, or mov x9, x30 since boot.
    if instruction.addr in tables.ftrace:
        return True
    return instruction.next in tables.ftrace and instruction.word in (NOP, _MOV_X9_LR)


def _around(function: Function, instruction: Instruction, tables: TextTables) -> str | None:
    is_entry = instruction.addr == function.parts[0].addr
    if is_entry and instruction.kind is Kind.PACIASP and tables.has_landings:
        return "calls through pointers land on it, so it must stay: probe what is behind it"
    if between_exclusives(function, instruction.addr):
        return "it is between an exclusive load and its store, which a probe makes fail for ever"
    return None


def _how(instruction: Instruction) -> Opinion:
    match instruction.kind:
        case Kind.BL | Kind.BLR:
            return _opinion(
                "emulate", "sets x30 as the original would, then jumps as it would call"
            )
        case Kind.B | Kind.B_COND | Kind.CBZ | Kind.TBZ:
            return _opinion("relocate", "branches to the same target from the slot")
        case Kind.ADR | Kind.ADRP:
            return _opinion("relocate", "computes the same address from the slot")
        case Kind.LDR_LITERAL | Kind.LDRSW_LITERAL:
            return _opinion(
                "emulate", "puts the address into its own register, and loads from there"
            )
        case Kind.PRFM_LITERAL:
            return _opinion("emulate", "only hints at a later access: the slot leaves it out")
        case _ if instruction.flow is not Flow.NEXT:
            return _opinion("copy", "runs in the slot and leaves it by itself")
        case _:
            return _opinion("copy", "means the same at every address")


def _opinion(verdict: str, why: str) -> Opinion:
    return Opinion(verdict=verdict, why=why)
