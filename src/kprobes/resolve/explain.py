"""How a field is fetched, in words: registers, addresses and their arithmetic as C writes them."""

from kprobes.model.layout import Storage
from kprobes.model.resolved import (
    CommValue,
    Constant,
    EntryCounter,
    EntryValue,
    ExitAddress,
    FieldFetch,
    Load,
    Operand,
    PerCpuAddress,
    RegisterValue,
    ReturnedValue,
    StackValue,
    TaskAddress,
)
from kprobes.model.returns import Returns


def explain(fetch: FieldFetch) -> str:
    """Return what a field holds and where that comes from, such as ``s32 = %di``.

    What is read from memory is *at* an address; everything else is a value. ``__user`` marks a
    pointer that is itself read from user space.
    """
    operand = fetch.operand
    if isinstance(operand, CommValue):
        return "string = the running task's name"
    if isinstance(operand, Load):
        space = "user space" if operand.is_user else "kernel memory"
        return f"{_type(fetch)}{_where(fetch, operand)}, read from {space}{_bits(fetch)}"
    if isinstance(operand, EntryCounter):
        return "ns since the entry"
    text = f'"{fetch.field.text.decode(errors="backslashreplace")}"'
    value = text if fetch.field.storage is Storage.TEXT else _value(operand)
    return f"{_type(fetch)} = {value}{_bits(fetch)}"


def explain_kept(returns: Returns) -> list[str]:
    """Return what is kept from a call's entry for its return."""
    values = [_value(operand) for operand in returns.kept]
    return [*values, "the time"] if returns.is_timed else values


def _where(fetch: FieldFetch, load: Load) -> str:
    field, base = fetch.field, load.base
    if field.storage is Storage.STRING and field.count and isinstance(base, Load):
        # What is loaded is the first string; its pointer is the first of a row.
        return f", their pointers u64[{field.count}] at {_place(base)}"
    return f" at {_place(load)}"


def _type(fetch: FieldFetch) -> str:
    field = fetch.field
    return f"{field.type}[{field.count}]" if field.count is not None else field.type


def _bits(fetch: FieldFetch) -> str:
    if not fetch.bit_width:
        return ""
    first, last = fetch.bit_offset, fetch.bit_offset + fetch.bit_width - 1
    return f", bit {first} of it" if first == last else f", bits {first} to {last} of it"


def _value(operand: Operand) -> str:
    match operand:
        case RegisterValue(name=name):
            return f"%{name}"
        case StackValue(slot=slot):
            return f"*(u64 *)({_plus('%sp', 8 * slot)})"
        case Constant(value=value):
            return f"{value:#x}"
        case Load(is_user=is_user):
            return f"*(u64 {'__user ' if is_user else ''}*)({_place(operand)})"
        case _:
            return _computed(operand)


def _computed(operand: Operand) -> str:
    match operand:
        case TaskAddress():
            return "current"
        case PerCpuAddress(base=base):
            return f"this_cpu_ptr({_value(base)})"
        case ReturnedValue():
            return "the returned value"
        case EntryValue(base=base):
            return f"{_value(base)} at entry"
        case ExitAddress():
            return "the instruction by which it is left"
        case _:
            raise TypeError(f"{operand} is no number")


def _place(load: Load) -> str:
    return _plus(_value(load.base), load.offset)


def _plus(base: str, offset: int) -> str:
    if offset == 0:
        return base
    return f"{base} {'-' if offset < 0 else '+'} {abs(offset):#x}"
