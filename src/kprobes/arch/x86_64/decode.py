"""A function's bytes to its instructions: boundaries, branches, fillers, where proof ends.

Decoding is a sweep from the first byte, as the kernel's own can_probe() does it
(arch/x86/kernel/kprobes/core.c). Every byte is looked at once, whatever the bytes are.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from iced_x86 import Decoder, FlowControl, Mnemonic, OpKind
from iced_x86 import Instruction as Decoded
from msgspec.structs import replace

from kprobes.arch.insn import Flow
from kprobes.arch.x86_64.insn import PREFIX_SIZE, Function, Instruction, added
from kprobes.model.kernel import TextPart, TextTables
from kprobes.units import U64, Addr

# XEN_EMULATE_PREFIX and KVM's: ud2 and three letters (arch/x86/include/asm/emulate_prefix.h).
_EMULATE = (bytes.fromhex("0f0b78656e"), bytes.fromhex("0f0b6b766d"))

_FLOWS: Mapping[int, Flow] = {
    FlowControl.NEXT: Flow.NEXT,
    FlowControl.UNCONDITIONAL_BRANCH: Flow.JUMP,
    FlowControl.INDIRECT_BRANCH: Flow.INDIRECT_JUMP,
    FlowControl.CONDITIONAL_BRANCH: Flow.BRANCH,
    FlowControl.RETURN: Flow.RETURN,
    FlowControl.CALL: Flow.CALL,
    FlowControl.INDIRECT_CALL: Flow.INDIRECT_CALL,
    FlowControl.INTERRUPT: Flow.TRAP,
    FlowControl.XBEGIN_XABORT_XEND: Flow.TRANSACTION,
    FlowControl.EXCEPTION: Flow.TRAP,
}
_WIDE = frozenset({OpKind.IMMEDIATE64, OpKind.IMMEDIATE32TO64})
_NEAR = frozenset({OpKind.NEAR_BRANCH16, OpKind.NEAR_BRANCH32, OpKind.NEAR_BRANCH64})
_NOWHERE = TextTables()


def decode_function(
    name: str, parts: Sequence[TextPart], tables: TextTables = _NOWHERE
) -> Function:
    """Decode a function.

    Args:
        name: of its symbol.
        parts: its range, then its ``.cold`` ones.
        tables: where branches come from and lead to, besides what its bytes say.
    """
    pieces = [list(_sweep(part, tables)) for part in parts]
    found = [instruction for piece in pieces for instruction in piece]
    targets = _targets(found, parts, tables)
    pieces = [_fillers(piece, targets) for piece in pieces]
    doubts = dict(
        doubt for piece in pieces for doubt in itertools.islice(_doubts(piece, targets), 1)
    )
    return Function(
        name=name,
        parts=tuple(parts),
        instructions={i.addr: i for piece in pieces for i in piece},
        targets=targets,
        doubts=doubts,
    )


def decode_annex(annex: TextPart) -> Mapping[int, Instruction]:
    """Decode code elsewhere that functions run as part of themselves, up to where it ends.

    What is after its last instruction is something else, of which some may be cut off.
    """
    found = dict[int, Instruction]()
    for i in _sweep(annex, _NOWHERE):
        found[i.addr] = i
        if not i.flow.falls_through:
            break
    return found


def decode_one(code: bytes, addr: int) -> Decoded:
    """Return the first instruction of some bytes as iced sees it."""
    return Decoder(64, code, ip=addr).decode()


def _sweep(part: TextPart, tables: TextTables) -> Iterator[Instruction]:
    decoder = Decoder(64, part.code, ip=part.addr)
    at = 0
    while at < len(part.code):
        # A forced emulation prefix and what it is for are one instruction, as for the kernel.
        prefix = PREFIX_SIZE if part.code.startswith(_EMULATE, at) else 0
        decoder.position, decoder.ip = at + prefix, part.addr + at + prefix
        decoded = decoder.decode()
        size = prefix + (1 if decoded.is_invalid else decoded.len)
        code = part.code[at : at + size]
        addr = Addr(part.addr + at)
        if prefix:
            yield Instruction(addr=addr, code=code, mnemonic=Mnemonic.UD2, flow=Flow.TRAP)
        else:
            yield _instruction(decoded, addr, code, tables)
        at += size


def _instruction(decoded: Decoded, addr: Addr, code: bytes, tables: TextTables) -> Instruction:
    target = Addr(decoded.near_branch_target) if decoded.op0_kind in _NEAR else None
    flow = Flow.UNKNOWN if decoded.is_invalid else _FLOWS[decoded.flow_control]
    if flow is Flow.CALL and target is None:
        # syscall, vmcall and their like, which come back to the next instruction.
        flow = Flow.NEXT
    return Instruction(
        addr=addr,
        code=code,
        mnemonic=decoded.mnemonic,
        flow=flow if target is None else _through(flow, target, tables),
        target=target,
        mention=_mention(decoded),
        stack=added(decoded),
    )


def _through(flow: Flow, target: int, tables: TextTables) -> Flow:
    # A retpoline goes wherever its register says, a return thunk returns.
    if flow is Flow.JUMP and target in tables.returns:
        return Flow.RETURN
    if target not in tables.indirect:
        return flow
    return {Flow.JUMP: Flow.INDIRECT_JUMP, Flow.CALL: Flow.INDIRECT_CALL}.get(flow, flow)


def _mention(decoded: Decoded) -> Addr | None:
    if decoded.mnemonic == Mnemonic.LEA and decoded.is_ip_rel_memory_operand:
        return Addr(decoded.ip_rel_memory_address)
    if decoded.op_count == 2 and decoded.op1_kind in _WIDE:
        return Addr(decoded.immediate(1) & U64)
    if decoded.mnemonic == Mnemonic.PUSH and decoded.op0_kind in _WIDE:
        return Addr(decoded.immediate(0) & U64)
    return None


def _targets(
    found: Sequence[Instruction], parts: Sequence[TextPart], tables: TextTables
) -> frozenset[int]:
    led_to = {i.target for i in found} | {i.mention for i in found}
    led_to.update(_led_back(found, tables))
    inside = [range(part.addr, part.stop) for part in parts]
    own = {addr for addr in led_to if addr is not None and any(addr in r for r in inside)}
    return frozenset(own.union(*(tables.table_targets.intersection(r) for r in inside)))


def _led_back(found: Iterable[Instruction], tables: TextTables) -> Iterator[Addr]:
    # Repairs of faults, and the tests of static_cpu_has(), come back by jumps of their own.
    for i in found if tables.annexes else ():
        for addr in (i.target, tables.exceptions.get(i.addr)):
            if addr is not None and addr in tables.annexes:
                inside = decode_annex(tables.annexes[addr]).values()
                yield from (each.target for each in inside if each.target is not None)


def _fillers(piece: list[Instruction], targets: frozenset[int]) -> list[Instruction]:
    # Trailing padding, and padding after what never goes on, unless something leads there.
    stop = len(piece)
    while stop and piece[stop - 1].is_padding and piece[stop - 1].addr not in targets:
        stop -= 1
    filled: list[Instruction] = []
    for i, each in enumerate(piece):
        is_cut_off = bool(filled) and (filled[-1].is_filler or not filled[-1].flow.falls_through)
        is_filler = each.is_padding and each.addr not in targets and (is_cut_off or i >= stop > 0)
        filled.append(replace(each, is_filler=True) if is_filler else each)
    return filled


def _doubts(piece: list[Instruction], targets: frozenset[int]) -> Iterator[tuple[int, str]]:
    for i in piece:
        why = _doubt(i, targets)
        if why:
            yield i.addr, f"no instruction from {i.addr:#x} on is proven: {why}"


def _doubt(i: Instruction, targets: frozenset[int]) -> str:
    if i.flow is Flow.UNKNOWN:
        return "the bytes there are none"
    if i.mnemonic == Mnemonic.INT3 and not i.is_filler:
        return "an int3 there may hide another instruction"
    if not targets.isdisjoint(range(i.addr + 1, i.next)):
        return "something leads into the middle of the bytes there"
    return ""
