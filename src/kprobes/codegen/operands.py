"""Operands to numbers and addresses, and memory through the guest's fault-safe readers."""

from typing import assert_never

from kprobes.codegen import per_cpu
from kprobes.codegen.context import Context, Returned
from kprobes.codegen.ir import Value, const
from kprobes.model.resolved import (
    CommValue,
    Constant,
    EntryCounter,
    EntryValue,
    ExitAddress,
    Load,
    Operand,
    PerCpuAddress,
    RegisterValue,
    ReturnedValue,
    StackValue,
    TaskAddress,
    TextValue,
)
from kprobes.model.returns import FRAME_COUNTER, FRAME_VALUES

_AtReturn = ReturnedValue | ExitAddress | EntryCounter | EntryValue | CommValue | TextValue
_WORD = 8
_PAGE = 4096
_GUARD = 4096
"""User space ends a page before its half of the addresses does."""


def value(context: Context, operand: Operand, fault: str) -> Value:
    """Return an operand's 64 bits; memory that cannot be read leads to the label ``fault``."""
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
        case PerCpuAddress(base=base, cpu_offset=cpu_offset):
            inner = value(context, base, fault)
            return f.op("add", inner, _offset(context, cpu_offset))
        case Load():
            return _loaded(context, operand, fault)
        case _:
            return _at_return(context, operand)


def _offset(context: Context, place: int | None) -> Value:
    # Of the running CPU's copy of per-CPU symbols: in a word of its own, or that is the base.
    return per_cpu.base(context) if place is None else per_cpu.load(context, place)


def _at_return(context: Context, operand: _AtReturn) -> Value:
    f, returned = context.out, context.returned
    if returned is None:
        raise TypeError(f"{operand} is no plain value at a function's entry")
    match operand:
        case ReturnedValue():
            return context.registers[context.arch.returns.value]
        case ExitAddress():
            return returned.exit
        case EntryCounter():
            return f.load(f.op("add", _frame(returned), FRAME_COUNTER))
        case EntryValue(base=base):
            place = FRAME_VALUES + _WORD * returned.kept.index(base)
            return f.load(f.op("add", _frame(returned), place))
        case CommValue() | TextValue():
            raise TypeError(f"{operand} is no plain value")
        case _:
            assert_never(operand)


def _frame(returned: Returned) -> Value:
    if returned.frame is None:
        raise TypeError("nothing of the entry is kept")
    return returned.frame


def address(context: Context, load: Load, fault: str) -> Value:
    """Return where a Load's memory is; what is read before leads to ``fault`` if it fails."""
    return context.out.op("add", value(context, load.base, fault), load.offset)


def copy(context: Context, load: Load, where: tuple[Value, Value], size: int) -> Value:
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
    """Copy a string up to its NUL: to, from, and the most bytes.

    Returns:
        Its length with the NUL; 0, or a negative number, when it could not be read.
    """
    return _read(context, load, ("string_kernel", "string_user"), where)


def _loaded(context: Context, load: Load, fault: str) -> Value:
    f = context.out
    source, scratch = address(context, load, fault), context.registers["scratch"]
    go_on = f.label("read")
    failed = copy(context, load, (scratch, source), _WORD)
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
