"""The guest's callback for breakpoints: a hit at one of ours goes on in its detour.

FunctionCall through the guest's chain for exceptions (kernel/notifier.c, asm/kdebug.h):

    int catch(struct notifier_block *block, unsigned long action, void *data);
    struct notifier_block { catch; next; int priority; };    // ours has a table behind it
    struct die_args { struct pt_regs *regs; ... };

The table is a hash with open addresses: pairs of u64, a breakpoint's address and its detour's; zero
where nothing is. A CPU may come with a breakpoint that was there when it ran into it and is gone
now: as kprobe_int3_handler() does, it is sent back to what is there instead.
"""

from collections.abc import Mapping

from kprobes.arch.arch import Arch
from kprobes.codegen.object import read_template
from kprobes.units import U64, Addr

BLOCK_SIZE = 64
BLOCK_TABLE, BLOCK_MASK = 24, 32
"""Offsets in our block: of the table's address, and of its number of entries less one."""
EMPTY_TABLE = bytes(16)
"""Leads nobody anywhere; its mask is 0."""
PRIORITY = 0x7FFF_FFFF
"""No other callback may take a breakpoint of ours for its own, or for a crash."""

_ENTRY = 16
_MULTIPLIER = 0x9E37_79B9_7F4A_7C15
_SHIFT = 40

_MODULE = """
define dso_local i32 @catch(ptr %block, i64 %action, ptr %data) noredzone nounwind {{
  %is_breakpoint = icmp eq i64 %action, {action}
  br i1 %is_breakpoint, label %breakpoint, label %strange
breakpoint:
  %regs = load ptr, ptr %data
  %place = getelementptr i8, ptr %regs, i64 {ip}
  %behind = load i64, ptr %place
  %addr = sub i64 %behind, {size}
  %is_kernel = icmp slt i64 %addr, 0
  br i1 %is_kernel, label %kernel, label %strange
kernel:
  %table_place = getelementptr i8, ptr %block, i64 {table}
  %table = load ptr, ptr %table_place
  %mask_place = getelementptr i8, ptr %block, i64 {mask}
  %mask = load i64, ptr %mask_place
  %product = mul i64 %addr, {multiplier}
  %hash = lshr i64 %product, {shift}
  br label %look
look:
  %at = phi i64 [ %hash, %kernel ], [ %next, %other ]
  %index = and i64 %at, %mask
  %offset = shl i64 %index, 4
  %entry = getelementptr i8, ptr %table, i64 %offset
  %key = load i64, ptr %entry
  %is_ours = icmp eq i64 %key, %addr
  br i1 %is_ours, label %ours, label %other
other:
  %next = add i64 %index, 1
  %is_empty = icmp eq i64 %key, 0
  br i1 %is_empty, label %unknown, label %look
ours:
  %detour_place = getelementptr i8, ptr %entry, i64 8
  %detour = load i64, ptr %detour_place
  store i64 %detour, ptr %place
  ret i32 {stop}
unknown:
  %code = inttoptr i64 %addr to ptr
  %now = load i{bits}, ptr %code, align 1
  %is_there = icmp eq i{bits} %now, {breakpoint}
  br i1 %is_there, label %strange, label %gone
gone:
  store i64 %addr, ptr %place
  ret i32 {stop}
strange:
  ret i32 0
}}
"""
_NOTIFY_STOP = 0x8001


def compile_notifier(arch: Arch) -> bytes:
    """Return the callback's code; it runs at any address."""
    from kprobes.codegen import llvm

    patch, trap = arch.patch, arch.patch.trap
    if trap is None:
        raise ValueError(f"{arch.name} has no breakpoints of ours")
    source = _MODULE.format(
        action=trap.action,
        ip=trap.ip,
        size=len(patch.breakpoint),
        bits=8 * len(patch.breakpoint),
        breakpoint=int.from_bytes(patch.breakpoint, "little"),
        table=BLOCK_TABLE,
        mask=BLOCK_MASK,
        multiplier=_MULTIPLIER - (1 << 64),
        shift=_SHIFT,
        stop=_NOTIFY_STOP,
    )
    data = llvm.compile_object(source, arch.code)
    return patch.landing + read_template(data, arch.code).link(Addr(0), {})


def hash_table(detours: Mapping[Addr, Addr]) -> bytes:
    """Return the table that leads breakpoints to their detours; never more than half full."""
    count = 1 << (2 * len(detours)).bit_length()
    table = bytearray(_ENTRY * count)
    for addr, detour in detours.items():
        at = first_look(addr, count - 1)
        while any(table[_ENTRY * at : _ENTRY * at + 8]):
            at = at + 1 & count - 1
        pair = addr.to_bytes(8, "little") + detour.to_bytes(8, "little")
        table[_ENTRY * at : _ENTRY * (at + 1)] = pair
    return bytes(table)


def first_look(addr: int, mask: int) -> int:
    """Return the entry of a table at which the search for an address begins."""
    return (addr * _MULTIPLIER & U64) >> _SHIFT & mask


def table_mask(table: bytes) -> int:
    """Return the number of a table's entries less one."""
    return len(table) // _ENTRY - 1
