"""Instructions that no slot may run, whatever is around them, each with the reason.

What the kernel's own prepare_emulation() and insn_masking_exception() refuse is here
(arch/x86/kernel/kprobes/core.c), and what would be wrong out of line without its noticing.
"""

import itertools
from collections.abc import Mapping

from iced_x86 import Code, FlowControl, Mnemonic, OpKind, Register
from iced_x86 import Instruction as Decoded

from kprobes.arch.x86_64.decode import decode_one
from kprobes.arch.x86_64.function import Flow, Instruction

_SOFTWARE = "it raises an exception on purpose, and the kernel knows what it means by its address"
_LEAVES = "it leaves the kernel, or enters it, with another stack"
_GUEST = "it hands the CPU to a hypervisor or to a guest, which see its address"
_TRANSACTION = "a breakpoint ends the transaction that it belongs to"
_SS = "it changes the stack segment and holds exceptions off until the next instruction"
_FAR = "it is a far branch, which changes the code segment"
_ENDBR = "indirect branches land on endbr64, which must stay: probe the instruction behind it"
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
_PREFIXES = frozenset(bytes.fromhex("262e363e64656667f0f2f3"))


def refusal(instruction: Instruction) -> str | None:
    """Return why no slot may run an instruction, or None when one may."""
    if instruction.flow is Flow.UNKNOWN:
        return "its bytes are no instruction"
    if instruction.mnemonic in _BY_MNEMONIC:
        return _BY_MNEMONIC[instruction.mnemonic]
    decoded = decode_one(instruction.code, instruction.addr)
    return _by_prefix(instruction) or _by_operands(decoded)


def changes_ss(instruction: Instruction) -> bool:
    """Return whether the CPU holds exceptions off behind an instruction: mov ss and the like."""
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
