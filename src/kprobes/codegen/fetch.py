"""Fetch emitter: every kind of operand into its field of the record.

Operands become numbers and addresses; memory is read through the guest's fault-safe readers, and
strings go into the bytes after a record's fixed part.
"""

from collections.abc import Callable
from typing import assert_never

from kprobes.codegen import per_cpu
from kprobes.codegen.context import Context, Returned
from kprobes.codegen.ir import Value, const
from kprobes.model.abi import MAX_DEPTH, MAX_DYNAMIC, MAX_STRING
from kprobes.model.definition import STACKTRACE
from kprobes.model.plan import INSTANCE_COUNTER, INSTANCE_VALUES
from kprobes.model.resolved import (
    CONTEXT_NMI,
    CommValue,
    ComputedValue,
    Constant,
    EntryCounter,
    EntryValue,
    ExitAddress,
    Field,
    FieldFetch,
    Load,
    Operand,
    PerCpuAddress,
    ProcessId,
    RecordLayout,
    RegisterValue,
    Resolved,
    ReturnedValue,
    StackTraceValue,
    StackValue,
    Storage,
    TaskAddress,
    TextValue,
    can_fault,
    parts_of,
)

_NotPlain = CommValue | TextValue | StackTraceValue
_AtReturn = ReturnedValue | ExitAddress | EntryCounter | EntryValue | _NotPlain
_WORD = 8
_PAGE = 4096
_GUARD = 4096
"""User space ends a page before its half of the addresses does."""


def value_of(context: Context, operand: Operand, fault: str) -> Value:
    """Return an operand's 64 bits.

    Args:
        context: what is being written.
        operand: of any kind that is one number.
        fault: where to go when memory cannot be read.
    """
    f = context.out
    match operand:
        case Constant(value=number):
            return const(number)
        case RegisterValue(name=name):
            return context.registers[name]
        case StackValue(slot=slot):
            return _stack_slot(context, slot)
        case TaskAddress():
            return per_cpu.task(context)
        case ProcessId():
            return f.load(f.op("add", per_cpu.task(context), context.abi.task.tgid), "i32")
        case PerCpuAddress() | ComputedValue() | Load():
            return _derived(context, operand, fault)
        case _:
            return _at_return(context, operand)


def _derived(context: Context, operand: PerCpuAddress | ComputedValue | Load, fault: str) -> Value:
    f = context.out
    match operand:
        case Load():
            return _loaded(context, operand, fault)
        case PerCpuAddress(base=base, cpu_offset=cpu_offset):
            inner = value_of(context, base, fault)
            return f.op("add", inner, _offset(context, cpu_offset))
        case ComputedValue(operation=operation):
            left, right = (value_of(context, each, fault) for each in parts_of(operand))
            if operation.is_comparison:
                return f.resize(f.compare(operation, left, right), "i64")
            return f.op(operation, left, right)


def _offset(context: Context, place: int | None) -> Value:
    # Of the running CPU's copy of per-CPU symbols: in a word of its own, or that is the base.
    return per_cpu.base(context) if place is None else per_cpu.load(context, place)


def _at_return(context: Context, operand: _AtReturn) -> Value:
    f, returned = context.out, context.returned
    if returned is None:
        raise TypeError(f"{operand} is not a plain value at a function's entry")
    match operand:
        case ReturnedValue():
            return context.registers[context.arch.returns.value]
        case ExitAddress():
            return returned.exit
        case EntryCounter():
            return f.load(f.op("add", _instance(returned), INSTANCE_COUNTER))
        case EntryValue(base=base):
            place = INSTANCE_VALUES + _WORD * returned.kept.index(base)
            return f.load(f.op("add", _instance(returned), place))
        case CommValue() | TextValue() | StackTraceValue():
            raise TypeError(f"{operand} is not a plain value")
        case _:
            assert_never(operand)


def _instance(returned: Returned) -> Value:
    if returned.instance is None:
        raise TypeError("nothing of the entry is kept")
    return returned.instance


def address_of(context: Context, load: Load, fault: str) -> Value:
    """Return where a Load's memory is.

    Args:
        context: what is being written.
        load: whose memory it is.
        fault: where to go when a pointer to it cannot be read.
    """
    return context.out.op("add", value_of(context, load.base, fault), load.offset)


def copy_bytes(context: Context, load: Load, where: tuple[Value, Value], size: int) -> Value:
    """Copy ``size`` bytes of the kind of memory that a Load is of.

    Args:
        context: what is being written.
        load: whose memory it is.
        where: to and from.
        size: bytes.

    Returns:
        0, or anything else when some of it could not be read.
    """
    return _read(context, load, ("copy_kernel", "copy_user"), (*where, const(size)))


def copy_string(context: Context, load: Load, where: tuple[Value, Value, Value]) -> Value:
    """Copy a string up to its NUL.

    Args:
        context: what is being written.
        load: whose memory it is.
        where: to, from, and the most bytes.

    Returns:
        Its length with the NUL; 0, or a negative number, when it could not be read.
    """
    return _read(context, load, ("string_kernel", "string_user"), where)


def _loaded(context: Context, load: Load, fault: str) -> Value:
    f = context.out
    source, scratch = address_of(context, load, fault), context.registers["scratch"]
    go_on = f.label("read")
    failed = copy_bytes(context, load, (scratch, source), _WORD)
    f.branch(f.compare("ne", failed, 0), fault, go_on, is_likely=False)
    f.place(go_on)
    return f.load(scratch)


def _stack_slot(context: Context, slot: int) -> Value:
    # regs_get_kernel_stack_nth: what can be read of the block of a thread's stack's size, or 0.
    # Interrupt and exception stacks are smaller, or not aligned to it: only the page that the
    # stack pointer is in is known to be there.
    f = context.out
    if slot == 0:
        return f.load(context.stack)
    near, far, read, done = (f.label(hint) for hint in ("near", "far", "read", "slot"))
    place = f.op("add", context.stack, _WORD * slot)
    away = f.op("xor", place, context.stack)
    f.branch(f.compare("ult", away, _PAGE), near, far, is_likely=True)
    f.place(near)
    direct = f.load(place)
    f.jump(done)
    f.place(far)
    f.branch(f.compare("ult", away, context.abi.thread_size), read, done)
    f.place(read)
    scratch = context.registers["scratch"]
    failed = f.call("copy_kernel", (scratch, place, const(_WORD)))
    found = f.select(f.compare("eq", failed, 0), f.load(scratch), const(0))
    f.jump(done)
    f.place(done)
    return f.phi({near: direct, far: const(0), read: found})


def _read(
    context: Context,
    load: Load,
    readers: tuple[str, str],
    operands: tuple[Value, Value, Value],
) -> Value:
    # Where user and kernel addresses do not overlap, the kernel reads a low address as user
    # memory whatever the definition says (CONFIG_ARCH_HAS_NON_OVERLAPPING_ADDRESS_SPACE).
    f = context.out
    kernel, user = readers
    if load.is_user:
        return f.call(user, operands)
    low, other, high, join = (f.label(hint) for hint in ("low", "other", "high", "join"))
    f.branch(f.compare("ult", operands[1], context.abi.task_size), low, other)
    f.place(low)
    by_user = f.call(user, operands)
    f.jump(join)
    f.place(other)
    # Addresses that no CPU can have lie between. The kernel refuses them by the CPU's address
    # bits, which are too many where it runs four levels of page tables on a CPU with five: 5.10
    # reads, and then WARNs about the general protection fault.
    is_high = f.compare("ugt", operands[1], ~(context.abi.task_size + _GUARD))
    f.branch(is_high, high, join, is_likely=True)
    f.place(high)
    by_kernel = f.call(kernel, operands)
    f.jump(join)
    f.place(join)
    return f.phi({low: by_user, high: by_kernel, other: const(-1)})


# After the fixed part of a record its stacks, then its strings, each in the order of the fields:
#
#     0          field.offset         layout.size                end            limit
#     +----------+------------------+-+--------------------------+--------------+
#     | header   | offset:16, len:16| | u64 ... "name\0" "sh\0"  | room         |
#     +----------+------------------+-+--------------------------+--------------+
#
# record._trim() gives back what is left of the room, where it can.
_LOCATION = 4
_NOWHERE = 1 << 63
"""An address that no CPU can have."""


def store(context: Context, item: FieldFetch, address: Value, room: tuple[Value, int]) -> Value:
    """Write one string, or an array of them, and where they are.

    Args:
        context: what is being written.
        item: a STRING field and what it fetches.
        address: of the record.
        room: where the record's bytes end so far, and where they must end, from its start.

    Returns:
        Where the record's bytes end now.
    """
    if not isinstance(item.operand, Load):
        raise TypeError("a string is fetched from memory")
    if item.field.count is None:
        place = context.out.op("add", address, item.field.offset)
        return _one(context, item.operand, (address, place), room)
    return _array(context, item, address, room)


def _one(
    context: Context, load: Load, where: tuple[Value, Value], room: tuple[Value, int]
) -> Value:
    fault = context.out.label("fault")
    source = address_of(context, load, fault)
    size = _copy(context, load, (where[0], source, fault), room)
    return _locate(context, where[1], room[0], size)


def _array(context: Context, item: FieldFetch, address: Value, room: tuple[Value, int]) -> Value:
    # The operand is the first string; its base is the first of the pointers.
    f, load = context.out, item.operand
    if not isinstance(load, Load) or not isinstance(load.base, Load) or not item.field.count:
        raise TypeError("an array of strings is fetched through pointers in memory")
    pointers = _first_pointer(context, load.base)
    places = f.op("add", address, item.field.offset)
    with f.loop(item.field.count, room[0]) as each:
        fault, read = f.label("fault"), f.label("read")
        pointer = f.op("add", pointers, f.op("mul", each.index, _WORD))
        scratch = context.registers["scratch"]
        failed = copy_bytes(context, load.base, (scratch, pointer), _WORD)
        f.branch(f.compare("ne", failed, 0), fault, read, is_likely=False)
        f.place(read)
        source = f.op("add", f.load(scratch), load.offset)
        size = _copy(context, load, (address, source, fault), (each.carried, room[1]))
        place = f.op("add", places, f.op("mul", each.index, _LOCATION))
        each.following = _locate(context, place, each.carried, size)
    return each.following


def _first_pointer(context: Context, load: Load) -> Value:
    # Where that cannot be known, somewhere that can never be read: every string is a fault.
    f = context.out
    if not can_fault(load.base):
        return address_of(context, load, "")
    fault, found, join = f.label("fault"), f.label("found"), f.label("pointers")
    address = address_of(context, load, fault)
    f.jump(found)
    f.place(found)
    f.jump(join)
    f.place(fault)
    f.jump(join)
    f.place(join)
    return f.phi({found: address, fault: const(_NOWHERE)})


def _copy(
    context: Context, load: Load, where: tuple[Value, Value, str], room: tuple[Value, int]
) -> Value:
    # Where the record is, where the string is, and the label of all that has gone wrong before.
    # Long strings before it may leave the last ones less than a string's most, or nothing: the
    # readers give 0 then, which is a fault.
    f = context.out
    address, source, fault = where
    end, limit = room
    left = f.op("sub", const(limit), end)
    size = f.select(f.compare("ult", left, MAX_STRING), left, const(MAX_STRING))
    length = copy_string(context, load, (f.op("add", address, end), source, size))
    join, copied = f.label("join"), f.label("copied")
    is_bad = f.compare("ugt", f.op("sub", length, 1), MAX_STRING - 1)
    f.branch(is_bad, fault, copied, is_likely=False)
    f.place(copied)
    f.jump(join)
    f.place(fault)
    f.jump(join)
    f.place(join)
    return f.phi({copied: length, fault: const(0)})


def _locate(context: Context, place: Value, end: Value, size: Value) -> Value:
    # [length:16] [offset:16], as the kernel's make_data_loc(): length 0 is a fault.
    f = context.out
    f.store(place, f.resize(f.op("or", f.op("shl", size, 16), end), "i32"))
    return f.op("add", end, size)


def _store_stack(context: Context, item: FieldFetch, address: Value, end: Value) -> Value:
    # The guest's unwinder writes into the record.
    f = context.out
    if not isinstance(item.operand, StackTraceValue):
        raise TypeError(f"{item.operand} is no stack")
    to, place = (f.op("add", address, at) for at in (end, item.field.offset))
    if context.asked_stack is None or item.field.name != STACKTRACE:
        return _locate(context, place, end, f.op("shl", walk(context, item.operand, to), 3))
    before, asked, walked, done = (f.label(hint) for hint in ("before", "asked", "walked", "done"))
    f.jump(before)
    f.place(before)
    f.branch(f.compare("ne", f.read(context.asked_stack), 0), asked, done)
    f.place(asked)
    found = f.op("shl", walk(context, item.operand, to), 3)
    f.jump(walked)
    f.place(walked)
    f.jump(done)
    f.place(done)
    size = f.phi({before: const(0), walked: found})
    return _locate(context, place, end, size)


def walk(context: Context, operand: StackTraceValue, to: Value) -> Value:
    """Have the guest's unwinder write the hit's stack; return how many addresses.

    Args:
        context: what is being written.
        operand: how it is fetched.
        to: where there is room for ``MAX_DEPTH``.
    """
    if operand.is_user:
        return _walk_user(context, to)
    # Where a register has the return address the unwinder begins with the caller's frame: the hit
    # and that address come first, and the unwinder skips the hit.
    f, skipped, most = context.out, 0, MAX_DEPTH
    regs = _registers(context)
    if operand.has_link:
        f.store(to, _hit(context))
        f.store(f.op("add", to, _WORD), context.registers[str(context.code.call.link)])
        skipped, to, most = 1, f.op("add", to, 2 * _WORD), most - 2
    count = f.call("walk_stack", (regs, to, const(most), const(skipped)))
    count = f.op("and", count, 0xFFFFFFFF)
    return f.op("add", count, 2) if operand.has_link else count


def _walk_user(context: Context, to: Value) -> Value:
    # The program's memory may not be there, and in an NMI a page fault is not served:
    # ftrace_trace_userstack() in kernel/trace/trace.c.
    f = context.out
    normal, done, before = (f.label(hint) for hint in ("normal", "walked", "before"))
    f.jump(before)
    f.place(before)
    is_nmi = f.op("and", per_cpu.preempt_count(context), CONTEXT_NMI)
    f.branch(f.compare("eq", is_nmi, 0), normal, done, is_likely=True)
    f.place(normal)
    count = f.op("and", f.call("walk_user_stack", (to, const(MAX_DEPTH))), 0xFFFFFFFF)
    walked = f.label("counted")
    f.jump(walked)
    f.place(walked)
    f.jump(done)
    f.place(done)
    return f.phi({before: const(0), walked: count})


def _registers(context: Context) -> Value:
    # What the unwinder looks at of a pt_regs.
    f, regs = context.out, context.pt_regs
    if regs is None:
        raise TypeError("no room for registers")
    pc = context.code.call.pc
    for name in context.arch.unwound:
        place = f.op("add", regs, _WORD * context.arch.registers.index(name))
        f.store(place, _hit(context) if name == pc else context.registers[name])
    return regs


def _hit(context: Context) -> Value:
    # The kernel's own probe says one byte more, which may be another instruction to its unwinder.
    pc = context.registers[context.code.call.pc]
    is_shifted = context.returned is None
    return context.out.op("sub", pc, context.arch.hit_shift) if is_shifted else pc


def store_fields(context: Context, probe: Resolved, address: Value) -> Value:
    """Write every field of a record.

    Args:
        context: what is being written.
        probe: whose fields.
        address: of the record.

    Returns:
        Where the record's bytes end, counted from its start.
    """
    end = const(probe.layout.size)
    # Stacks first: strings take what is left.
    for item in probe.fetches:
        if item.is_stack:
            end = _store_stack(context, item, address, end)
    limit = probe.layout.size + room_after(probe.layout)
    for item in probe.fetches:
        match item.field.storage:
            case Storage.NUMBER | Storage.DURATION:
                _store_number(context, probe.layout, item, address)
            case Storage.STRING:
                end = store(context, item, address, (end, limit))
            case Storage.COMM | Storage.TEXT | Storage.STACK:
                pass
            case _:
                assert_never(item.field.storage)
    return end


def room_after(layout: RecordLayout) -> int:
    """Return the bytes that stacks and strings may take after a record's fixed part."""
    number = sum(field.count or 1 for field in layout.fields if field.storage is Storage.STRING)
    stacks = sum(field.storage is Storage.STACK for field in layout.fields)
    return min(number * MAX_STRING, MAX_DYNAMIC) + stacks * MAX_DEPTH * _WORD


def _store_number(context: Context, layout: RecordLayout, item: FieldFetch, address: Value) -> None:
    f, field = context.out, item.field
    place = f.op("add", address, field.offset)
    if field.index in context.early:
        _store_early(context, layout, item, address)
        return
    fault = f.label("fault") if can_fault(item.operand) else ""
    if isinstance(item.operand, Load):
        source = address_of(context, item.operand, fault)
        failed = copy_bytes(context, item.operand, (place, source), field.room)
        good = f.label("good")
        f.branch(f.compare("ne", failed, 0), fault, good, is_likely=False)
        f.place(good)
        cut_in_place(context, item, place)
    else:
        value = value_of(context, item.operand, fault)
        f.store(place, cut(context, item, f.resize(value, f"i{field.size * 8}")))
    if fault:
        _on_fault(context, layout, item, (address, fault))


def _store_early(context: Context, layout: RecordLayout, item: FieldFetch, address: Value) -> None:
    # No branch: whether it was a fault is a bit that is known on every way to here.
    f, field = context.out, item.field
    early = context.early[field.index]
    f.store(f.op("add", address, field.offset), early.number)
    bit = f.op("shl", f.resize(early.is_fault, "i64"), field.index % 64)
    bits = _fault_bits(context, layout, field, address)
    f.store(bits, f.op("or", f.load(bits), bit))


def _on_fault(
    context: Context, layout: RecordLayout, item: FieldFetch, where: tuple[Value, str]
) -> None:
    f, field = context.out, item.field
    address, fault = where
    done = f.label("fetched")
    f.jump(done)
    f.place(fault)
    _each(context, field, address, lambda place: f.store(place, const(0, f"i{field.size * 8}")))
    bits = _fault_bits(context, layout, field, address)
    f.store(bits, f.op("or", f.load(bits), 1 << (field.index % 64)))
    f.jump(done)
    f.place(done)


def _fault_bits(context: Context, layout: RecordLayout, field: Field, address: Value) -> Value:
    word = field.index // 64 * 8
    return context.out.op("add", address, (layout.faults_offset or 0) + word)


def cut_in_place(context: Context, item: FieldFetch, place: Value) -> None:
    """Cut a bit-field of memory, or an array of them, out of the numbers at a place.

    Args:
        context: what is being written.
        item: the bit-field; nothing is done for others.
        place: of the first number.
    """
    f, field = context.out, item.field
    if not item.bit_width:
        return

    def cut_one(element: Value) -> None:
        number = f.load(element, f"i{field.size * 8}")
        f.store(element, cut(context, item, number))

    address = f.op("sub", place, field.offset)
    _each(context, field, address, cut_one)


def cut(context: Context, item: FieldFetch, number: Value) -> Value:
    """Return the bits of a number that are the field.

    Args:
        context: what is being written.
        item: the field.
        number: of its container's width.
    """
    if not item.bit_width:
        return number
    f = context.out
    return f.op("and", f.op("lshr", number, item.bit_offset), (1 << item.bit_width) - 1)


def _each(context: Context, field: Field, address: Value, act: Callable[[Value], None]) -> None:
    # Once for every element: a loop, for arrays may have 64.
    start = context.out.op("add", address, field.offset)
    if field.count is None:
        act(start)
        return
    with context.out.loop(field.count) as each:
        act(context.out.op("add", start, context.out.op("mul", each.index, field.size)))
