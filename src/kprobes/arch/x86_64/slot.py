"""An instruction to code that does the same elsewhere, and then goes on after the original.

A slot is entered with all registers and flags as the instruction would find them, and leaves
them as the instruction would. It needs no stack of its own, no register and no second trap.

    anything              its bytes, rip-relative displacements made anew
    jmp, jcc              the same with a 32-bit displacement, to the original target
    loop, jrcxz           loop L; jmp short M; L: jmp target; M:
    call target           push ORIGINAL return address; jmp target
    call reg, call mem    push ORIGINAL return address; jmp reg, jmp mem
    ret, jmp reg          its bytes, and an int3 against speculation past them

Encodings: Intel SDM volume 2.

The x86-64 ftrace site: five bytes at a function's start, and the code that they call.

Encodings: Intel SDM volume 2, CALL and JMP.
"""

from collections.abc import Callable, Collection, Mapping

from iced_x86 import Code, Decoder, Encoder, FlowControl, Register
from iced_x86 import Instruction as Decoded

from kprobes.arch.arch import Restored
from kprobes.arch.x86_64.decode import decode_one
from kprobes.arch.x86_64.insn import Instruction
from kprobes.errors import RefusedError
from kprobes.units import U64, Addr

SIZE = 5
NOPS = (bytes.fromhex("0f1f440000"), bytes.fromhex("6666666690"))
"""The kernel's five-byte nops: since 5.13, and before."""

CALL, JMP = 0xE8, 0xE9
ENDBR64 = bytes.fromhex("f30f1efa")

SAVED = ("r15", "r14", "r13", "r12", "r11", "r10", "bp", "bx", "ax", "flags")
"""What ``entry`` pushes, lowest address first."""

# pushfq; push rax, rbx, rbp, r10, r11, r12, r13, r14, r15
PUSH_SAVED = bytes.fromhex("9c 50 53 55 4152 4153 4154 4155 4156 4157")
# The code called leaves r12-r15, rbx and rbp alone and preserves r10: only r11, rax and the
# flags must come back.  add rsp, 32; pop r11; add rsp, 24; pop rax; popfq
_POP = bytes.fromhex("4883c420 415b 4883c418 58 9d")
# popfq costs an emulated guest more than all the rest. mov r11, [rsp+32]; mov eax, [rsp+72];
# xchg al, ah; and al, 8; add al, 0x78, which overflows as the saved flags did; sahf, for the
# other five; mov rax, [rsp+64]; lea rsp, [rsp+80]
_POP_ARITHMETIC = bytes.fromhex("4c8b5c2420 8b442448 86c4 2408 0478 9e 488b442440 488d642450")
_RET = b"\xc3"
# Where the body's result is 1 the call is skipped: its caller goes on, with what the body has left
# in rax's place. What a function must leave alone the body has left alone.
#   test eax, eax; jz over the rest; mov rax, [rsp+64]; lea rsp, [rsp+88]; ret; int3
_SKIP = bytes.fromhex("85c0 740c 488b442440 488d642458 c3 cc")


def branch(opcode: int, place: Addr, target: Addr) -> bytes:
    """Return a five-byte call or jump from ``place`` to ``target``.

    Raises:
        ValueError: the target is out of a 32-bit displacement's reach.
    """
    displacement = target - (place + SIZE)
    if not -(1 << 31) <= displacement < 1 << 31:
        raise ValueError(f"{target:#x} cannot be reached from {place:#x}")
    return bytes([opcode]) + displacement.to_bytes(4, "little", signed=True)


def call(place: Addr, target: Addr) -> bytes:
    """Return the bytes that call ``target`` from a site."""
    return branch(CALL, place, target)


def call_target(place: Addr, code: bytes) -> Addr | None:
    """Return where a site calls, or None when it does not hold a call."""
    return _target(CALL, place, code)


def jump_target(place: Addr, code: bytes) -> Addr | None:
    """Return where a five-byte jump leads, or None when it is none."""
    return _target(JMP, place, code)


def saving_call(
    place: Addr, body: Addr, flags: Restored = Restored.ALL, *, skips: bool = False
) -> bytes:
    """Return code for ``place`` that pushes SAVED, calls ``body`` and restores all of them.

    Args:
        place: where it will be; above SAVED is a word, and then the return address of the call.
        body: what it calls.
        flags: what of them the body may have changed.
        skips: whether the function returns to its caller at once where the body returns 1.
    """
    pop = _POP if flags is Restored.ALL else _POP_ARITHMETIC
    call = branch(CALL, Addr(place + len(PUSH_SAVED)), body)
    return PUSH_SAVED + call + (_SKIP if skips else b"") + pop


def entry(
    place: Addr,
    body: Addr,
    /,
    *,
    flags: Restored = Restored.ALL,
    reads: Collection[str] | None = None,
    skips: bool = False,
) -> bytes:
    """Return code for ``place`` that saves the registers a body cannot get as parameters.

    It pushes SAVED, calls ``body``, restores, and returns to the site; where it ``skips`` and the
    body returns 1, to the function's caller.
    """
    # A body that reads none of them is called without this code.
    del reads
    return saving_call(place, body, flags, skips=skips) + _RET


def _target(opcode: int, place: Addr, code: bytes) -> Addr | None:
    if len(code) != SIZE or code[0] != opcode:
        return None
    return Addr(place + SIZE + int.from_bytes(code[1:], "little", signed=True) & (1 << 64) - 1)


MAX_SIZE = 32
"""Bytes that a slot needs at most."""

_INT3 = b"\xcc"
_JMP_SHORT = 0xEB
_PUSH = 0x68
_STORE_HIGH = bytes.fromhex("c7442404")
"""mov dword [rsp+4], imm32: a push sign-extends its 32 bits."""
_S32 = range(-(1 << 31), 1 << 31)
_ENDS = frozenset(
    {
        FlowControl.UNCONDITIONAL_BRANCH,
        FlowControl.INDIRECT_BRANCH,
        FlowControl.RETURN,
        FlowControl.CALL,
        FlowControl.INDIRECT_CALL,
    }
)


def slot(instruction: Instruction, at: Addr) -> bytes:
    """Return code for a slot that runs one instruction and goes on after the original.

    Args:
        instruction: one that ``insn_verdict`` did not refuse.
        at: where the slot is.

    Raises:
        RefusedError: the slot is too far from what the instruction names.
    """
    return slots((instruction,), at)


def slots(instructions: tuple[Instruction, ...], at: Addr) -> bytes:
    """Return code that runs several adjacent instructions and goes on after the last.

    Raises:
        RefusedError: as ``slot``.
    """
    code = b""
    for instruction in instructions:
        code += body(instruction, Addr(at + len(code)))
    last = instructions[-1]
    if not comes_back(last):
        return code + _INT3
    return code + _branch(JMP, Addr(at + len(code)), last.next)


def comes_back(instruction: Instruction) -> bool:
    """Return whether a slot goes on after an instruction; a callee returns there by itself."""
    return control(decode_one(instruction.code, instruction.addr)) not in _ENDS


def is_rip_relative(instruction: Instruction) -> bool:
    """Return whether a memory operand counts from the instruction's own address."""
    return decode_one(instruction.code, instruction.addr).is_ip_rel_memory_operand


def body(instruction: Instruction, at: Addr) -> bytes:
    """Return code for ``at`` that runs one instruction; what comes next is to stand after it.

    Raises:
        RefusedError: as ``slot``.
    """
    decoded = decode_one(instruction.code, instruction.addr)
    made = _BODIES.get(control(decoded), _copy)
    try:
        return made(instruction, decoded, at)
    except ValueError as e:
        # iced says so of a displacement that does not fit.
        raise _too_far(instruction, at) from e


def branch_over(instruction: Instruction, at: Addr, over: int) -> bytes:
    """Return code for ``at`` that jumps over so many bytes where a conditional jump is taken."""
    decoded = decode_one(instruction.code, instruction.addr)
    if not decoded.is_jcc_short_or_near:
        return instruction.code[:-1] + bytes([over])
    decoded.as_near_branch()
    decoded.near_branch64 = at + len(encode(decoded, at)) + over
    return encode(decoded, at)


def _copy(instruction: Instruction, decoded: Decoded, at: Addr) -> bytes:
    if not decoded.is_ip_rel_memory_operand:
        return instruction.code
    # Modulo 2^64, as per-CPU offsets near zero are reached around the end. The segment's base
    # is added after that, and stays.
    displacement = (decoded.ip_rel_memory_address - at - len(instruction.code)) & U64
    displacement -= (displacement >> 63) << 64
    if displacement not in _S32:
        raise _too_far(instruction, at)
    place = _displacement_at(instruction)
    new = displacement.to_bytes(4, "little", signed=True)
    return instruction.code[:place] + new + instruction.code[place + 4 :]


def _displacement_at(instruction: Instruction) -> int:
    decoder = Decoder(64, instruction.code, ip=instruction.addr)
    return decoder.get_constant_offsets(decoder.decode()).displacement_offset


def _jump(instruction: Instruction, decoded: Decoded, at: Addr) -> bytes:
    del instruction
    return _branch(JMP, at, Addr(decoded.near_branch_target))


def _conditional(instruction: Instruction, decoded: Decoded, at: Addr) -> bytes:
    target = Addr(decoded.near_branch_target)
    if not decoded.is_jcc_short_or_near:
        return _counted(instruction, target, at)
    decoded.as_near_branch()
    return encode(decoded, at)


def _counted(instruction: Instruction, target: Addr, at: Addr) -> bytes:
    # These have 8-bit displacements only: the last byte is made to skip a short jump.
    over = bytes([2, _JMP_SHORT, SIZE])
    code = instruction.code[:-1] + over
    return code + _branch(JMP, Addr(at + len(code)), target)


def _call(instruction: Instruction, decoded: Decoded, at: Addr) -> bytes:
    pushed = push(instruction.next)
    return pushed + _branch(JMP, Addr(at + len(pushed)), Addr(decoded.near_branch_target))


def _indirect_call(instruction: Instruction, decoded: Decoded, at: Addr) -> bytes:
    pushed = push(instruction.next)
    return pushed + through(decoded, Addr(at + len(pushed)), to_stack=False, is_pushed=True)


def through(decoded: Decoded, at: Addr, *, to_stack: bool, is_pushed: bool) -> bytes:
    """Return an instruction for ``at`` that jumps as an indirect branch, or pushes where to.

    Args:
        decoded: the branch.
        at: where the instruction will be.
        to_stack: whether it pushes.
        is_pushed: whether a word was pushed before.
    """
    decoded.code = Code.PUSH_RM64 if to_stack else Code.JMP_RM64
    if is_pushed and decoded.memory_base == Register.RSP:
        decoded.memory_displacement = (decoded.memory_displacement + 8) & U64
        decoded.memory_displ_size = 8
    return encode(decoded, at)


def control(decoded: Decoded) -> int:
    """Return iced's number of how an instruction goes on."""
    # To iced, syscall, vmmcall and their like are calls, too.
    found = decoded.flow_control
    if found == FlowControl.CALL and decoded.code != Code.CALL_REL32_64:
        return FlowControl.NEXT
    return found


def push(value: int) -> bytes:
    """Return code that pushes a 64-bit number and changes nothing else."""
    low, high = value & 0xFFFF_FFFF, value >> 32
    code = bytes([_PUSH]) + low.to_bytes(4, "little")
    if high == (0xFFFF_FFFF if low >> 31 else 0):
        return code
    return code + _STORE_HIGH + high.to_bytes(4, "little")


def _branch(opcode: int, at: Addr, target: Addr) -> bytes:
    try:
        return branch(opcode, at, target)
    except ValueError as e:
        raise RefusedError(f"a slot at {at:#x} is too far from {target:#x}") from e


def encode(decoded: Decoded, at: int) -> bytes:
    """Return an instruction's bytes for ``at``, its displacements made anew."""
    encoder = Encoder(64)
    encoder.encode(decoded, at)
    return encoder.take_buffer()


def _too_far(instruction: Instruction, at: int) -> RefusedError:
    return RefusedError(
        f"a slot at {at:#x} is too far from what the instruction at {instruction.addr:#x} names"
    )


_BODIES: Mapping[int, Callable[[Instruction, Decoded, Addr], bytes]] = {
    FlowControl.UNCONDITIONAL_BRANCH: _jump,
    FlowControl.CONDITIONAL_BRANCH: _conditional,
    FlowControl.CALL: _call,
    FlowControl.INDIRECT_CALL: _indirect_call,
}
