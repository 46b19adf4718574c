"""Verdicts on x86-64 instructions: whether one may carry a probe, and what its slot does with it.

The order of the checks is that of the kernel's check_kprobe_address_safe(), can_probe() and
arch_copy_kprobe(); where the answers differ from its own, docs/internals/patching.md says why.
Refused is what its prepare_emulation() and insn_masking_exception() refuse
(arch/x86/kernel/kprobes/core.c), and what would be wrong out of line without its noticing.

Several instructions that one five-byte jump may replace are a run, as for can_optimize() and
copy_optimized_instructions() (arch/x86/kernel/kprobes/opt.c), but exact where those refuse a whole
function. What no table tells stays with the caller: saved instruction pointers of sleeping or
interrupted tasks inside the run.
"""

import itertools
from collections.abc import Mapping
from enum import StrEnum

from iced_x86 import Code, FlowControl, Mnemonic, OpKind, Register
from iced_x86 import Instruction as Decoded
from msgspec import Struct

from kprobes.arch.insn import Flow, forbidden_place, probed_place, reserved_place
from kprobes.arch.x86_64 import slot
from kprobes.arch.x86_64.cfi import is_check
from kprobes.arch.x86_64.decode import decode_one
from kprobes.arch.x86_64.insn import Function, Instruction
from kprobes.arch.x86_64.slot import is_rip_relative, slots
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextTables
from kprobes.units import Addr

_SOFTWARE = "it raises an exception on purpose, and the kernel knows what it means by its address"
_LEAVES = "it leaves the kernel, or enters it, with another stack"
_GUEST = "it hands the CPU to a hypervisor or to a guest, which see its address"
_TRANSACTION = "a breakpoint ends the transaction that it belongs to"
_SS = "it changes the stack segment and holds exceptions off until the next instruction"
_FAR = "it is a far branch, which changes the code segment"
_ENDBR = "indirect branches land on endbr64, which must stay: probe the instruction after it"
_GS = "the kernel's per-CPU data is out of reach on one side of it"

_BY_MNEMONIC: Mapping[int, str] = {
    Mnemonic.INT3: "it is an int3, which fills a gap or is somebody else's breakpoint",
    Mnemonic.INT: _SOFTWARE,
    Mnemonic.INT1: _SOFTWARE,
    Mnemonic.UD0: _SOFTWARE,
    Mnemonic.UD1: _SOFTWARE,
    Mnemonic.UD2: _SOFTWARE,
    Mnemonic.IRET: _LEAVES,
    Mnemonic.IRETD: _LEAVES,
    Mnemonic.IRETQ: _LEAVES,
    Mnemonic.SYSCALL: _LEAVES,
    Mnemonic.SYSENTER: _LEAVES,
    Mnemonic.SYSRET: _LEAVES,
    Mnemonic.SYSRETQ: _LEAVES,
    Mnemonic.SYSEXIT: _LEAVES,
    Mnemonic.SYSEXITQ: _LEAVES,
    Mnemonic.RSM: _LEAVES,
    Mnemonic.UIRET: _LEAVES,
    Mnemonic.VMCALL: _GUEST,
    Mnemonic.VMLAUNCH: _GUEST,
    Mnemonic.VMRESUME: _GUEST,
    Mnemonic.VMXOFF: _GUEST,
    Mnemonic.VMRUN: _GUEST,
    Mnemonic.ENCLS: _GUEST,
    Mnemonic.ENCLU: _GUEST,
    Mnemonic.ENCLV: _GUEST,
    Mnemonic.SKINIT: _GUEST,
    Mnemonic.TDCALL: _GUEST,
    Mnemonic.SEAMCALL: _GUEST,
    Mnemonic.SEAMRET: _GUEST,
    Mnemonic.GETSEC: _GUEST,
    Mnemonic.XBEGIN: _TRANSACTION,
    Mnemonic.XEND: _TRANSACTION,
    Mnemonic.XABORT: _TRANSACTION,
    Mnemonic.LSS: _SS,
    Mnemonic.ENDBR64: _ENDBR,
    Mnemonic.ENDBR32: _ENDBR,
    Mnemonic.SWAPGS: _GS,
}

_NEAR = frozenset({Code.CALL_RM64, Code.JMP_RM64})
_INDIRECT_CONTROL = frozenset({FlowControl.INDIRECT_CALL, FlowControl.INDIRECT_BRANCH})
_INDIRECT = frozenset({Flow.INDIRECT_CALL, Flow.INDIRECT_JUMP})
_BRANCHES = frozenset({Flow.JUMP, Flow.BRANCH, Flow.CALL}) | _INDIRECT
_OPERAND_SIZE = 0x66
# A REX prefix (40 to 4f) that another prefix follows is ignored (Intel SDM volume 2, 2.2.1).
_PREFIXES = frozenset(bytes.fromhex("262e363e64656667f0f2f3")) | frozenset(range(0x40, 0x50))


def refusal(instruction: Instruction) -> str | None:
    """Return why no slot may run an instruction, or None when one may."""
    if instruction.flow is Flow.UNKNOWN:
        return "its bytes are not an instruction"
    if instruction.mnemonic in _BY_MNEMONIC:
        return _BY_MNEMONIC[instruction.mnemonic]
    decoded = decode_one(instruction.code, instruction.addr)
    return _by_prefix(instruction) or _by_operands(decoded)


def changes_ss(instruction: Instruction) -> bool:
    """Return whether the CPU holds exceptions off after an instruction: mov ss and the like."""
    return refusal(instruction) == _SS


def _by_prefix(instruction: Instruction) -> str | None:
    prefixes = itertools.takewhile(_PREFIXES.__contains__, instruction.code)
    if instruction.flow in _BRANCHES and _OPERAND_SIZE in prefixes:
        return "a branch with an operand-size prefix differs between makes of CPUs"
    return None


def _by_operands(decoded: Decoded) -> str | None:
    if decoded.op0_kind == OpKind.REGISTER and decoded.op0_register == Register.SS:
        return _SS
    if decoded.flow_control in _INDIRECT_CONTROL and decoded.code not in _NEAR:
        return _FAR
    if decoded.code == Code.CALL_RM64 and decoded.op0_register == Register.RSP:
        return "it calls where the stack pointer points, which its own return address moves"
    if decoded.memory_base == Register.EIP:
        return "its address is relative to a 32-bit instruction pointer"
    return None


_SITE = 5
"""Bytes of a call, jump or nop that the kernel puts into its text."""
_WAITS = frozenset({Mnemonic.HLT, Mnemonic.MWAIT, Mnemonic.MWAITX})
# What a kernel may lean on right after sti: interrupts stay off until it has begun.
_LEANS_ON_STI = _WAITS | {
    Mnemonic.VMRUN,
    Mnemonic.VMLAUNCH,
    Mnemonic.VMRESUME,
    Mnemonic.IRETQ,
    Mnemonic.SYSRETQ,
    Mnemonic.SYSEXIT,
    Mnemonic.SYSEXITQ,
}


class SlotAction(StrEnum):
    """What a slot does with an instruction."""

    COPY = "copy"
    RELOCATE = "relocate"
    EMULATE = "emulate"
    REFUSE = "refuse"


class SlotVerdict(Struct, frozen=True, kw_only=True):
    """The verdict on an address.

    Attributes:
        why: the reason, for a user.
        instruction: that begins there, or None when none is known to.
    """

    verdict: SlotAction
    why: str
    instruction: Instruction | None = None

    @property
    def is_refused(self) -> bool:
        """Whether no slot may run what is there."""
        return self.verdict is SlotAction.REFUSE


_NO_TABLES = TextTables()


def insn_verdict(function: Function, addr: int, tables: TextTables = _NO_TABLES) -> SlotVerdict:
    """Judge the instruction at an address.

    Args:
        function: that the address is in.
        addr: any.
        tables: what is known of the kernel's text.
    """
    why = _no_boundary(function, addr)
    if why:
        return SlotVerdict(verdict=SlotAction.REFUSE, why=why)
    instruction = function.instructions[addr]
    why = (
        forbidden(function, addr, tables)
        or probed_place(addr, tables)
        or _reserved(instruction, tables)
        or refusal(instruction)
        or _beside(function, instruction)
    )
    if why:
        return SlotVerdict(verdict=SlotAction.REFUSE, why=why, instruction=instruction)
    verdict, why = _how(instruction)
    return SlotVerdict(verdict=verdict, why=why, instruction=instruction)


def forbidden(function: Function, addr: int, tables: TextTables = _NO_TABLES) -> str | None:
    """Return why a place may carry no probe, whatever instruction is there, or None.

    Args:
        function: that the place is in.
        addr: the place.
        tables: what is known of the kernel's text.
    """
    return forbidden_place(function.name, function.parts, addr, tables)


def _no_boundary(function: Function, addr: int) -> str | None:
    if function.part_of(addr) is None:
        return f"{addr:#x} is not in {function.name}"
    inside = function.covering(addr)
    if inside is None or inside.addr == addr:
        return function.doubt(addr)
    size, start = len(inside.code), function.place(inside.addr)
    why = f"{function.place(addr)} is inside the {size}-byte instruction at {start}"
    return function.doubt(addr) or why


def _reserved(instruction: Instruction, tables: TextTables) -> str | None:
    # A site's bytes may hold several instructions now: a static call's ret and its int3s.
    around = range(instruction.addr - _SITE + 1, instruction.next)
    if not tables.ftrace.isdisjoint(around):
        return "the kernel's function tracer changes it: the ftrace strategy probes it"
    if not tables.static_calls.isdisjoint(around):
        return "it is a static call, which the kernel points elsewhere while it runs"
    return reserved_place(instruction.addr, instruction.next, tables)


def _beside(function: Function, instruction: Instruction) -> str | None:
    before = function.before(instruction.addr)
    after = function.instructions.get(instruction.next)
    if before is not None and changes_ss(before):
        return "the instruction before it changes the stack segment: both must run as one"
    if before is not None and before.mnemonic == Mnemonic.STI and _leans(instruction):
        return "sti before it holds interrupts off until it has begun: a trap between loses them"
    if instruction.mnemonic == Mnemonic.STI and (after is None or _leans(after)):
        return "what is after it relies on interrupts being held off until it has begun"
    if is_check(instruction, after) or (before is not None and is_check(before, instruction)):
        return "it belongs to a CFI check, whose failure is told by reading these bytes"
    return None


def _leans(instruction: Instruction) -> bool:
    return instruction.mnemonic in _LEANS_ON_STI


def _how(instruction: Instruction) -> tuple[SlotAction, str]:
    if instruction.mnemonic == Mnemonic.CALL:
        return SlotAction.EMULATE, "pushes the original return address, then jumps as it would call"
    if instruction.flow is Flow.BRANCH and instruction.mnemonic in _COUNTED:
        return SlotAction.EMULATE, "its own test, stretched by a jump: it reaches 127 bytes only"
    if instruction.target is not None:
        return SlotAction.RELOCATE, "branches to the same target from the slot"
    if is_rip_relative(instruction):
        return SlotAction.RELOCATE, "its rip-relative displacement is made anew for the slot"
    if instruction.mnemonic in _FLAGS:
        return SlotAction.COPY, "runs in the slot with the true flags: nothing is single-stepped"
    if not instruction.flow.falls_through:
        return SlotAction.COPY, "runs in the slot and leaves it by itself"
    return SlotAction.COPY, "means the same at every address"


_COUNTED = frozenset(
    {
        Mnemonic.LOOP,
        Mnemonic.LOOPE,
        Mnemonic.LOOPNE,
        Mnemonic.JCXZ,
        Mnemonic.JECXZ,
        Mnemonic.JRCXZ,
    }
)
_FLAGS = frozenset(
    {
        Mnemonic.PUSHF,
        Mnemonic.PUSHFQ,
        Mnemonic.POPF,
        Mnemonic.POPFQ,
        Mnemonic.CLI,
        Mnemonic.STI,
    }
)


_CALLS = frozenset({Flow.CALL, Flow.INDIRECT_CALL})


class Run(Struct, frozen=True, kw_only=True):
    """Adjacent instructions that one jump may replace.

    Attributes:
        instructions: that are displaced.
        stop: the first address after the bytes that the jump may cover: int3 after a return
            included.
    """

    instructions: tuple[Instruction, ...]
    stop: Addr

    @property
    def addr(self) -> Addr:
        """Where it begins."""
        return self.instructions[0].addr

    def detour(self, at: Addr) -> bytes:
        """Return code that runs the displaced instructions at ``at``, and goes on after them.

        Raises:
            RefusedError: too far from what an instruction names.
        """
        return slots(self.instructions, at)


def jump_run(function: Function, addr: int, tables: TextTables = _NO_TABLES) -> Run:
    """Return the shortest run from an address that a five-byte jump may replace.

    Args:
        function: whole, with its ``.cold`` parts.
        addr: the run's first instruction.
        tables: what is known of the kernel's text.

    Raises:
        RefusedError: there is none, with the reason.
    """
    displaced, stop = list[Instruction](), Addr(addr)
    while stop - addr < slot.SIZE:
        found = function.instructions.get(stop)
        if displaced and not displaced[-1].flow.falls_through:
            stop = _past_gap(function, found, stop)
            continue
        _check(function, stop, tables)
        assert found is not None
        if displaced and displaced[-1].flow in _CALLS:
            raise RefusedError(
                f"the call at {function.place(displaced[-1].addr)} returns into the five bytes"
            )
        displaced.append(found)
        stop = found.next
    run = Run(instructions=tuple(displaced), stop=stop)
    _check_inside(function, run, tables)
    return run


def has_jump_table(function: Function, tables: TextTables) -> bool:
    """Return whether an indirect jump of a function may lead into the function itself.

    Hand-written code computes targets from addresses inside itself.
    """
    if not any(i.flow is Flow.INDIRECT_JUMP for i in function.instructions.values()):
        return False
    mentions = (i.mention for i in function.instructions.values())
    return tables.has_jump_tables or any(a is not None and function.part_of(a) for a in mentions)


def _check(function: Function, addr: Addr, tables: TextTables) -> None:
    slot_verdict = insn_verdict(function, addr, tables)
    if slot_verdict.is_refused:
        raise RefusedError(f"{function.place(addr)}: {slot_verdict.why}")


def _past_gap(function: Function, found: Instruction | None, at: Addr) -> Addr:
    # Only int3: nops at a function's end may belong to the next one, and be patched.
    if found is None or not found.is_filler or found.code != b"\xcc":
        raise RefusedError(f"{function.place(at)} is after the end of what one jump may cover")
    return found.next


def _check_inside(function: Function, run: Run, tables: TextTables) -> None:
    inside = range(run.addr + 1, run.stop)
    reached = function.targets.intersection(inside)
    if reached:
        raise RefusedError(f"something leads to {function.place(min(reached))}, inside the bytes")
    if len(run.instructions) == 1:
        # Nothing but a branch into the middle of an instruction could come in between.
        return
    if function.doubts:
        raise RefusedError(f"branches of {function.name}: {next(iter(function.doubts.values()))}")
    if has_jump_table(function, tables):
        raise RefusedError(f"{function.name} has an indirect jump that may lead into the bytes")
